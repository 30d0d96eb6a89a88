"""``check``: what it tells agrees with what the stages do, and it leaves nothing behind."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_cli.commands.check import as_lines
from stages import check
from stages.batch import Example, pack
from stages.errors import CheckpointError, ConfigError, DataError, ResourceError
from stages.models.attention import NAME
from stages.models.forward import response_logps
from stages.models.network import Network
from stages.models.precision import Arithmetic
from stages.runtime import estimate, room
from stages.runtime.estimate import MIB, Load
from stages.runtime.reporter import SilentReporter
from tests.families import tiny_config
from tests.stages.project import (
    DEMONSTRATIONS,
    PROMPTS,
    RANKINGS,
    Listener,
    Project,
    ids_of,
    rankings,
)
from tests.stages.results import checkpoints, rows

STAGES = ("sft", "reward_model", "ppo")
LONG = "a" * 300  # more than the tiny models have positions


def report_of(project: Project, stage: str, *, dump: str | None = None, **changes: Any) -> Any:
    """The report on a stage's config, as JSON brings it."""
    found = check.run(project.config(stage, **changes), SilentReporter(), dump=dump)
    return json.loads(json.dumps(found, allow_nan=False))


def dumped(project: Project, stage: str, **changes: Any) -> list[dict[str, Any]]:
    """The lines of a dump."""
    report = report_of(project, stage, dump="dump.jsonl", **changes)
    found = [json.loads(line) for line in Path("dump.jsonl").read_text().splitlines()]
    assert report["dump"] == {"file": "dump.jsonl", "lines": len(found)}
    return found


def contents(folder: Path) -> set[str]:
    """Names of everything in a folder but the caches."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in names if not name.startswith("cache")}


# The examples.


def test_a_dumped_demonstration_is_prompt_and_answer_with_the_answer_as_target(
    project: Project,
) -> None:
    lines = dumped(project, "sft")
    assert [line["origin"] for line in lines] == [f"demonstrations.jsonl:{n}" for n in range(1, 6)]
    for line, record in zip(lines, DEMONSTRATIONS, strict=True):
        prompt, answer = ids_of(record["prompt"]), ids_of(record["response"], end=True)
        assert line == {
            "origin": line["origin"],
            "split": "train",
            "ids": prompt + answer,
            "targets": list(range(len(prompt), len(prompt) + len(answer))),
            "text": f"{record['prompt']}{record['response']}<|end|>",
        }


def test_a_dumped_ranking_is_a_line_for_each_answer_with_its_rank(project: Project) -> None:
    lines = dumped(project, "reward_model")
    expected = [(r["prompt"], text, rank) for r in RANKINGS for text, rank in r["responses"]]
    assert [(line["text"], line["rank"]) for line in lines] == [
        (f"{prompt}{text}<|end|>", rank) for prompt, text, rank in expected
    ]
    assert [len(line["targets"]) for line in lines] == [len(text) + 1 for _, text, _ in expected]


def test_a_dumped_prompt_has_no_targets(project: Project) -> None:
    lines = dumped(project, "ppo")
    assert [line["text"] for line in lines] == [record["prompt"] for record in PROMPTS]
    assert {tuple(line["targets"]) for line in lines} == {()}


def test_a_dump_tells_held_out_records_from_training_records(project: Project) -> None:
    project.write("held_out.jsonl", DEMONSTRATIONS[:2])
    lines = dumped(project, "sft", data__eval="held_out.jsonl")
    assert [line["split"] for line in lines] == ["train"] * 5 + ["eval"] * 2


def test_the_first_example_marks_its_targets_and_its_end_token(project: Project) -> None:
    example = report_of(project, "sft")["example"]
    assert example["origin"] == "demonstrations.jsonl:1"
    assert example["text"] == "ab:cd<|end|>"
    marks = [(t["token"], t["target"], t["end"]) for t in example["tokens"]]
    assert marks == [
        ("a", False, False),
        ("b", False, False),
        (":", False, False),
        ("c", True, False),
        ("d", True, False),
        ("<|end|>", True, True),
    ]
    assert [token["id"] for token in example["tokens"]] == ids_of("ab:cd", end=True)


def test_the_first_ranking_shows_all_its_answers_with_their_ranks(project: Project) -> None:
    example = report_of(project, "reward_model")["example"]
    assert example["prompt"]["text"] == "ab:"
    shown = [(example[f"answer {n}"]["text"], example[f"answer {n}"]["rank"]) for n in (1, 2, 3)]
    assert shown == [("cd<|end|>", 1), ("dcba<|end|>", 2), ("e<|end|>", 3)]


def test_a_long_example_is_shown_around_its_seam(project: Project) -> None:
    project.write("long.jsonl", [{"prompt": "a" * 100, "response": "b" * 100}])
    tokens = report_of(project, "sft", data__train="long.jsonl")["example"]["tokens"]
    around = check.show.AROUND
    left_out = [row["left_out"] for row in tokens if "left_out" in row]
    assert left_out == [100 - 2 * around, 101 - 2 * around]
    shown = [row["token"] for row in tokens if "token" in row]
    assert shown == ["a"] * 2 * around + ["b"] * (2 * around - 1) + ["<|end|>"]


# The data.


def test_each_reason_to_drop_a_record_is_counted_with_its_first_place(project: Project) -> None:
    bad = rankings(
        [
            {"prompt": "a", "responses": [("b", 1)]},
            {"prompt": "b", "responses": [("b", 1), ("c", 1)]},
            {"prompt": "c", "responses": [("b", 1), (LONG, 2)]},
            {"prompt": "d", "responses": [("b", 1)]},
        ]
    )
    project.write("mixed.jsonl", [*rankings(), *bad])
    role = report_of(project, "reward_model", data__train="mixed.jsonl")["data"]["train"]
    assert (role["records"], role["kept"]) == (8, 4)
    assert role["dropped"] == {
        "fewer than two ranked answers": {"records": 2, "first": "mixed.jsonl:5"},
        "no strict pair": {"records": 1, "first": "mixed.jsonl:6"},
        "prompt and answer over the model's positions": {"records": 1, "first": "mixed.jsonl:7"},
    }
    assert role["answers_per_prompt"] == {"K=2": 1, "K=3": 2, "K=4": 1}
    assert role["response_tokens"]["max"] == len("dcba") + 1


def test_documents_are_told_beside_the_records(project: Project) -> None:
    data = report_of(project, "sft", sft__pretrain__data="documents.jsonl")["data"]
    assert data["documents"]["kept"] == 5
    data = report_of(project, "ppo", ptx__data="documents.jsonl", ptx__coef=1.0)["data"]
    assert data["documents"]["kept"] == 5


# Steps.


@pytest.mark.parametrize("stage", STAGES)
def test_the_steps_and_learning_rates_are_those_that_the_stage_takes(
    stage: str, project: Project
) -> None:
    changes = {"train__max_steps": None, "train__warmup_steps": 2}
    if stage != "ppo":
        changes |= {"train__epochs": 3, "train__batch_size": 2}
    told = report_of(project, stage, **changes)["batches"]
    config = project.config(stage, **changes)
    result = importlib.import_module(f"stages.{stage}").run(config, SilentReporter())
    assert told["total_steps"] == result.step
    rates = [row["optim/lr"] for row in rows(config.output, "train")]
    if stage == "ppo":  # a row is the mean over the steps of an iteration
        assert told["iterations"] == len(rates)
        assert told["steps_per_iteration"] == result.step / len(rates)
    else:
        assert told["learning_rate"]["first"] == pytest.approx(rates[0], rel=1e-12)
        assert told["learning_rate"]["last"] == pytest.approx(rates[-1], rel=1e-12)


def test_documents_in_a_batch_leave_room_for_fewer_demonstrations(project: Project) -> None:
    options = {
        "train__max_steps": None,
        "train__epochs": 2,
        "sft__pretrain__data": "documents.jsonl",
        "sft__pretrain__share": 0.5,
    }
    told = report_of(project, "sft", **options)["batches"]
    assert (told["records_per_step"], told["documents_per_step"]) == (2, 2)
    result = importlib.import_module("stages.sft").run(
        project.config("sft", **options), SilentReporter()
    )
    assert told["total_steps"] == result.step == 6


def test_the_first_batch_is_cut_by_the_token_budget(project: Project) -> None:
    # Sequences of 6, 7, 6, 12 and 5 tokens; longest first into rooms of 13: 12 | 7, 6 | 6, 5.
    options = {"train__batch_size": 5, "train__tokens_per_micro_batch": 13}
    first = report_of(project, "sft", **options)["batches"]["first_batch"]
    assert first == {
        "tokens": 36,
        "micro_batches": 3,
        "largest_micro_batch": 13,
        "records_over_the_budget": 0,
    }


def test_fewer_prompts_than_a_rollout_are_said_to_repeat(project: Project) -> None:
    listener = Listener()
    report = check.run(project.config("ppo", rollout__batch_size=12), listener)
    assert report["batches"]["times_each_prompt_in_an_iteration"] == 2
    told = "fewer prompts (6) than a rollout asks (rollout.batch_size 12): they repeat"
    assert any(text.startswith(told) for text in listener.warnings)


# The models.


def test_parameters_are_counted_without_loading_weights(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    models = report_of(project, "ppo")["models"]
    for role, folder in (("policy", "base"), ("reward", "reward"), ("critic", "reward")):
        stored = load_file(project.folder / folder / "model.safetensors")
        assert models[role]["parameters"] == sum(w.numel() for w in stored.values()), role
    assert models["policy"]["layout"] == "tree"
    assert models["policy"]["positions"] == 256


def test_a_folder_that_a_stage_made_is_called_so(project: Project) -> None:
    importlib.import_module("stages.sft").run(project.config("sft"), SilentReporter())
    report = report_of(project, "reward_model", model="runs/sft")
    assert report["models"]["model"]["made_by"] == "rlhf sft, as a policy"


# Memory and disk.


def test_memory_in_training_is_weights_gradients_and_two_moments(project: Project) -> None:
    report = report_of(project, "sft", train__ema_decay=0.9)
    size = report["models"]["model"]["parameters"] * 8 / MIB  # float64
    assert report["memory"]["model"] == {
        "weights": size,
        "gradients": size,
        "optimiser": 2 * size,
        "average": size,
    }
    memory = report_of(project, "ppo")["memory"]
    assert memory["reference"].keys() == memory["reward"].keys() == {"weights"}
    assert memory["critic"].keys() == {"weights", "gradients", "optimiser"}


@pytest.mark.parametrize("stage", STAGES)
def test_the_disk_estimate_is_the_size_of_what_a_run_leaves(stage: str, project: Project) -> None:
    config = project.config(stage, train__ema_decay=0.9)
    told = report_of(project, stage, train__ema_decay=0.9)["disk"]
    importlib.import_module(f"stages.{stage}").run(config, SilentReporter())
    state = [
        f for f in checkpoints(config.output)[-1].glob("*.safetensors") if "roll" not in f.stem
    ]
    numbers = sum(w.nbytes for file in state for w in load_file(file).values())
    assert told["one_checkpoint"] * MIB == pytest.approx(numbers, rel=0.02)
    models = list(Path(config.output).glob("*/model.safetensors"))
    numbers = sum(w.nbytes for file in models for w in load_file(file).values())
    assert told["models"] * MIB == pytest.approx(numbers, rel=0.02)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "mistral", "opt"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_the_estimate_of_activations_is_right_to_a_factor_of_two(
    family: str, compute: torch.dtype | None
) -> None:
    config, lengths = tiny_config(family), [40] * 12
    arithmetic = Arithmetic(torch.device("cpu"), torch.float32, compute)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.set_attn_implementation(NAME)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    batch = pack([Example(np.arange(n) % 50, np.arange(n // 2, n)) for n in lengths])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        response_logps(Network(module, "policy", "tree", compute), batch).logp.sum()
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    shape = estimate.shape_of(config, "policy")
    load = Load(sum(lengths), keys=max(lengths), targets=sum(lengths) // 2, micro_batches=1)
    told = (
        estimate.activations(shape, arithmetic, load, dropout=False, checkpointing=False)
        + estimate.casts(shape, arithmetic)
        + estimate.logits(shape, arithmetic, targets=load.targets)
    )
    assert measured / 2 <= told <= measured * 2


def test_a_run_that_does_not_fit_is_warned_of(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_memory", lambda device: 1000)
    listener = Listener()
    report = check.run(project.config("sft"), listener)
    assert report["memory"]["fits"] is False
    assert any("of memory are needed" in warning for warning in listener.warnings)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_the_disk_cannot_hold_ends_before_anything_is_written(
    stage: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = report_of(project, stage)["disk"]["need"] * MIB
    monkeypatch.setattr(room, "free_disk", lambda folder: int(need) - 1)
    assert report_of(project, stage)["disk"]["fits"] is False
    run = importlib.import_module(f"stages.{stage}").run
    with pytest.raises(ResourceError, match="MiB are needed for models and training") as caught:
        run(project.config(stage), SilentReporter())
    assert caught.value.exit_code == 6
    assert not Path(f"runs/{stage}/run.json").exists()
    monkeypatch.setattr(room, "free_disk", lambda folder: int(need) + 1)
    assert run(project.config(stage), SilentReporter()).status == "done"


def test_what_the_earlier_run_left_counts_as_free(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = importlib.import_module("stages.sft").run
    run(project.config("sft"), SilentReporter())
    left = sum(f.stat().st_size for f in Path("runs/sft").glob("*/**/*") if f.is_file())
    monkeypatch.setattr(room, "free_disk", lambda folder: 0)
    disk = report_of(project, "sft")["disk"]
    assert disk["free"] * MIB == pytest.approx(left, rel=1e-9)
    assert disk["fits"]
    assert run(project.config("sft"), SilentReporter(), overwrite=True).status == "done"


def test_a_run_writes_no_more_training_states_than_it_has_saves(project: Project) -> None:
    told = report_of(project, "sft", train__max_steps=3, checkpoint__every=500)["disk"]
    assert told["checkpoints_at_most"] == 1
    told = report_of(project, "sft", train__max_steps=9, checkpoint__every=2)["disk"]
    assert told["checkpoints_at_most"] == 3, "two are kept while the third is written"


# What it leaves alone.


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_written_but_the_cache(stage: str, project: Project) -> None:
    before = contents(project.folder)
    report_of(project, stage)
    assert contents(project.folder) == before


def test_no_cache_is_left_in_the_output_folder_where_there_is_no_other(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", str(project.folder / "prompts.jsonl"))
    before = contents(project.folder)
    assert report_of(project, "sft")["data"]["train"]["kept"] == 5
    assert contents(project.folder) == before


def test_a_dump_never_replaces_a_data_file(project: Project) -> None:
    before = Path("demonstrations.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="is one of the data files"):
        report_of(project, "sft", dump="./demonstrations.jsonl")
    assert Path("demonstrations.jsonl").read_bytes() == before


def test_a_dump_never_replaces_another_file(project: Project) -> None:
    Path("notes.txt").write_text("mine")
    Path("link").symlink_to("notes.txt")
    for name in ("notes.txt", "link"):
        with pytest.raises(ConfigError, match=f"--dump {name}: is there already"):
            report_of(project, "sft", dump=name)
    assert Path("notes.txt").read_text() == "mine"
    Path("empty.jsonl").touch()
    assert report_of(project, "sft", dump="empty.jsonl")["dump"]["lines"] > 0


def test_a_dump_that_cannot_be_written_is_named(project: Project) -> None:
    with pytest.raises(ConfigError, match=r"--dump no/dump\.jsonl: cannot be written"):
        report_of(project, "sft", dump="no/dump.jsonl")


# The same refusals as the stage.


@pytest.mark.parametrize(
    ("stage", "changes", "kind"),
    [
        ("sft", {"data__train": "no.jsonl"}, DataError),
        ("sft", {"model": "reward"}, CheckpointError),
        ("reward_model", {"normalise__demonstrations": "no.jsonl"}, DataError),
        ("ppo", {"reward__path": "base"}, CheckpointError),
        ("ppo", {"rollout__stop": ["ab"]}, ConfigError),
    ],
)
def test_check_refuses_what_the_stage_refuses_in_the_same_words(
    stage: str, changes: dict[str, Any], kind: type[Exception], project: Project
) -> None:
    config = project.config(stage, **changes)
    with pytest.raises(kind) as by_check:
        check.run(config, SilentReporter())
    with pytest.raises(kind) as by_stage:
        importlib.import_module(f"stages.{stage}").run(config, SilentReporter())
    assert str(by_check.value) == str(by_stage.value)
    assert not Path(config.output).exists()


def test_a_report_is_readable_lines(project: Project) -> None:
    lines = list(as_lines(report_of(project, "reward_model")))
    assert "stage    reward_model" in [line[:21].rstrip() for line in lines]
    assert any(line.split() == ["id=4", "token=a", "target=no", "end=no"] for line in lines)
    assert max(map(len, lines)) < 120
