"""What a stage hands on: prompts read alike, agreed special tokens, folders that stand alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import stages.models.load
import stages.reward_model
import stages.sft
from stages import ppo, reward_model, sft
from stages.errors import ConfigError
from stages.runtime.reporter import SilentReporter
from stages.sample import SampleOptions
from stages.sample import run as sample
from tests.families import save_tiny
from tests.stages.project import (
    DEFAULTS,
    DEMONSTRATIONS,
    END,
    END_ID,
    TOKENIZER,
    TURN,
    TURN_END,
    Project,
    ids_of,
    letter_tokenizer,
)
from tests.stages.results import (
    identity,
    logps,
    losses_by_hand,
    policy,
    rows,
    run_json,
    samples,
    weights,
)
from tests.stages.watch import watch_models, watch_steps

QUIET = SilentReporter()
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}
TURN_END_ID = TOKENIZER.convert_tokens_to_ids(TURN_END)
CHAT = {"data.chat_template": "chatml", "data.as_messages": True}


def pads_with_the_end_token(project: Project) -> None:
    """A base model as many are published: pad token = end token, and odd sampling settings."""
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = END
    save_tiny(project.folder / "base", "llama", tokenizer, dtype=torch.float64)
    settings = {"do_sample": False, "temperature": 0.3, "max_length": 7, "eos_token_id": END_ID}
    (project.folder / "base" / "generation_config.json").write_text(json.dumps(settings))


def as_turn(text: str) -> str:
    """A user turn in ChatML, up to where the answer starts."""
    return f"{TURN}user\n{text}{TURN_END}\n{TURN}assistant\n"


# Special tokens.


def test_special_tokens_agree_in_memory_and_in_every_saved_folder(
    empty_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, stops = empty_project, [TURN_END_ID, END_ID]
    pads_with_the_end_token(project)
    models = watch_models(monkeypatch)
    changes = {**CHAT, "train.ema_decay": 0.5}
    sft.run(project.config("sft", **changes), QUIET)
    reward_model.run(project.config("reward_model", model="runs/sft", **changes), QUIET)
    changes |= {"model": "runs/sft", "reward.path": "runs/reward_model"}
    ppo.run(project.config("ppo", **changes), QUIET)
    for network in models[0].readers.networks:
        config = network.module.config
        assert (config.pad_token_id, config.eos_token_id) == (0, stops)
    folders = [path.parent for path in Path("runs").glob("*/*/config.json")]
    assert {folder.name for folder in folders} == {"model", "model_ema", "critic"}
    assert len(folders) == 7
    for folder in folders:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        told = identity(str(folder))
        assert tokenizer.pad_token_id == config.pad_token_id == told["pad_id"] == 0
        assert config.eos_token_id == told["stop_ids"] == stops
        assert tokenizer.eos_token_id in stops
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        if told["kind"] == "policy":
            settings = GenerationConfig.from_pretrained(folder)
            assert (settings.pad_token_id, settings.eos_token_id) == (0, stops)
            settings.save_pretrained("elsewhere")  # refuses what is invalid


def test_a_base_model_that_pads_with_its_end_token_learns_to_stop_all_the_same(
    empty_project: Project,
) -> None:
    pads_with_the_end_token(empty_project)
    config = empty_project.config("sft", train__batch_size=5, train__max_steps=1)
    sft.run(config, QUIET)
    losses = losses_by_hand("base", DEMONSTRATIONS)
    assert [len(loss) for loss in losses] == [len(d["response"]) + 1 for d in DEMONSTRATIONS]
    expected = float(torch.cat(losses).mean())
    assert rows("runs/sft")[0]["loss/sft"] == pytest.approx(expected, rel=1e-9)


def test_the_end_token_of_such_a_model_is_trained_where_it_is_read(empty_project: Project) -> None:
    """An embedding gives its padding row no gradient; scores are read at the end token."""
    pads_with_the_end_token(empty_project)
    reward_model.run(empty_project.config("reward_model"), QUIET)
    before, after = (
        weights(folder)["model.embed_tokens.weight"]
        for folder in ("base", "runs/reward_model/model")
    )
    changed = (before != after).any(dim=1)
    assert bool(changed[END_ID])
    assert not bool(changed[TURN_END_ID]), "a token that no text holds"


def test_the_end_of_turn_of_a_template_carries_loss_ends_rollouts_and_is_saved(
    project: Project,
) -> None:
    changes = {"train.max_steps": 120, "train.batch_size": 8, "train.schedule": "constant"}
    sft.run(project.config("sft", **changes, **CHAT), QUIET)
    model, losses = policy("base"), []
    for record in DEMONSTRATIONS:
        prompt = ids_of(as_turn(record["prompt"]))
        answer = ids_of(record["response"] + TURN_END)
        losses.append(-logps(model, prompt + answer)[len(prompt) - 1 :])
    expected = float(torch.cat(losses).mean())
    assert rows("runs/sft")[0]["loss/sft"] == pytest.approx(expected, rel=1e-9)
    settings = GenerationConfig.from_pretrained("runs/sft/model")
    assert settings.eos_token_id == [TURN_END_ID, END_ID]
    prompt = torch.tensor([ids_of(as_turn("ab:"))])
    out = policy("runs/sft/model").generate(prompt, max_new_tokens=20, do_sample=False)
    assert out[0, prompt.shape[1] :].tolist() == ids_of(f"cd{TURN_END}")
    changes = {"model": "runs/sft", "rollout.max_new_tokens": 20, "train.total_episodes": 6}
    ppo.run(project.config("ppo", **changes, **CHAT), QUIET)
    ended = [s["ended"] and s["response_ids"][-1] == TURN_END_ID for s in samples("runs/ppo")]
    assert sum(ended) >= 5
    assert all(TURN_END_ID not in s["response_ids"][:-1] for s in samples("runs/ppo"))


# Prompts.


READINGS: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "a text": ("ab:", "ab:", END, {}),
    "a turn": ("ab:", as_turn("ab:"), TURN_END, CHAT),
    "a conversation": (
        [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "cd"},
            {"role": "user", "content": "e"},
        ],
        f"{TURN}user\nab{TURN_END}\n{TURN}assistant\ncd{TURN_END}\n{as_turn('e')}",
        TURN_END,
        {"data.chat_template": "chatml"},
    ),
}


@pytest.mark.parametrize("reading", READINGS)
def test_all_three_stages_read_a_prompt_as_the_same_ids(
    project: Project, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, text, end, changes = READINGS[reading]
    better, worse = ({"text": t, "rank": n} for n, t in enumerate(("fg", "h"), start=1))
    project.write("demonstrations.jsonl", [{"prompt": prompt, "response": "fg"}])
    project.write("rankings.jsonl", [{"prompt": prompt, "responses": [better, worse]}])
    project.write("prompts.jsonl", [{"prompt": prompt}])
    packed: dict[str, list[Any]] = {"sft": [], "reward_model": []}
    for module, name, stage in (
        (stages.sft, "pack", "sft"),
        (stages.reward_model, "pack_groups", "reward_model"),
    ):
        real = getattr(module, name)
        seen = packed[stage]
        monkeypatch.setattr(module, name, lambda items, f=real, s=seen: s.extend(items) or f(items))
    steps = watch_steps(monkeypatch)
    for stage, run in RUNS.items():
        run(project.config(stage, **changes), QUIET)
    expected = ids_of(text)
    assert packed["sft"]
    assert packed["reward_model"]
    for example in packed["sft"]:
        assert example.ids.tolist() == [*expected, *ids_of(f"fg{end}")]
    for group in packed["reward_model"]:
        assert group.prompt.tolist() == expected
        assert group.answers[0].tolist() == ids_of(f"fg{end}")
    for ids in steps[0].rollout.prompts:
        assert ids.tolist() == expected


@pytest.mark.parametrize("stage", RUNS)
def test_messages_without_a_template_are_refused_before_any_weight_is_read(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    answers = [{"text": "c", "rank": 1}, {"text": "d", "rank": 2}]
    rest = {"sft": {"response": "c"}, "reward_model": {"responses": answers}, "ppo": {}}
    record = {"prompt": [{"role": "user", "content": "ab"}], **rest[stage]}
    project.write(DEFAULTS[stage]["data.train"], [record])
    monkeypatch.setattr(stages.models.load, "_from_pretrained", refuse)
    with pytest.raises(ConfigError, match="no chat template") as caught:
        RUNS[stage](project.config(stage), QUIET)
    assert "data.chat_template" in caught.value.where
    assert "chatml" in caught.value.do
    assert not Path(f"runs/{stage}").exists()


# Folders.


def hand_on(project: Project, output: str, **names: str) -> None:
    """Move model folders out of a run; the run, its data and its caches are gone afterwards."""
    told = run_json(output)
    assert told["config"]["output"] == output
    assert told["config"]["train"]["learning_rate"] == 1e-2
    for folder, name in names.items():
        assert identity(f"{output}/{folder}")["stage"] == told["stage"]
        assert identity(f"{output}/{folder}")["parent"]["path"] == told["config"]["model"]
        shutil.move(f"{output}/{folder}", name)
    for path in ("runs", "cache"):
        shutil.rmtree(project.folder / path)


def test_each_stage_needs_nothing_but_the_model_folder_of_the_one_before(project: Project) -> None:
    sft.run(project.config("sft", **CHAT), QUIET)
    hand_on(project, "runs/sft", model="tuned")
    shutil.rmtree(project.folder / "base")
    Path("demonstrations.jsonl").unlink()
    as_before = {"data.as_messages": True}  # the template itself comes with the folder
    reward_model.run(project.config("reward_model", model="tuned", **as_before), QUIET)
    hand_on(project, "runs/reward_model", model="judge")
    Path("rankings.jsonl").unlink()
    changes = {"model": "tuned", "reward.path": "judge", **as_before}
    ppo.run(project.config("ppo", **changes), QUIET)
    hand_on(project, "runs/ppo", model="speaker", critic="values")
    for name in ("tuned", "judge", "values"):
        shutil.rmtree(project.folder / name)
    lines: list[str] = []
    options = SampleOptions("speaker", "prompts.jsonl", max_new_tokens=5, precision="fp32")
    sample(options, QUIET, write=lines.append)
    assert len(lines) == 6
