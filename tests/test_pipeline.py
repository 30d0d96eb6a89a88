"""The whole way at the command line: sft, sample, labels by a rule, train-rm, ppo."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rlhf_cli.app import main
from tests.stages.project import TOKENIZER, Project, ids_of
from tests.stages.results import identity, raw_score, rows, run_json, samples, weights

PROMPTS = [f"{a}{b}:" for a in "bcdef" for b in "bcdef"]
SFT = """
stage: sft
model: base
data: {train: demonstrations.jsonl, eval: 0.2}
output: runs/sft
train: {epochs: 6, batch_size: 10, learning_rate: 1e-2, precision: fp32}
"""
REWARD_MODEL = """
stage: reward_model
model: base  # the command that sft prints names another
data: {train: rankings.jsonl, eval: 0.2}
output: runs/reward_model
train: {epochs: 8, batch_size: 8, learning_rate: 1e-2, precision: fp32}
"""
PPO = """
stage: ppo
model: runs/sft
data: {train: prompts.jsonl, eval: null}
output: runs/ppo
train: {total_episodes: 640, batch_size: 32, learning_rate: 1e-2, precision: fp32}
reward: {path: nowhere}  # the command that train-rm prints names it
rollout: {batch_size: 64, max_new_tokens: 8}
kl: {coef: 0.02}
log: {samples: 8}
"""


class Told(NamedTuple):
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        return json.loads(self.out)


def rlhf(*arguments: str) -> Told:
    """One command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return Told(code, out.getvalue(), err.getvalue())


def taste(text: str) -> int:
    """The rule in the place of people: the more a, the better."""
    return text.count("a")


def label(answers: str, rankings: str) -> None:
    """Ranks for the answers of ``rlhf sample``, by the rule."""
    lines = [json.loads(line) for line in Path(answers).read_text().splitlines()]
    for line in lines:
        counts = sorted({taste(r["text"]) for r in line["responses"]}, reverse=True)
        for response in line["responses"]:
            response["rank"] = 1 + counts.index(taste(response["text"]))
    Path(rankings).write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(file: str) -> list[str]:
    """The texts of all answers in a file of rankings."""
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [response["text"] for line in lines for response in line["responses"]]


class Pipeline(NamedTuple):
    """The project's folder and what each command said."""

    project: Project
    told: dict[str, Told]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """All stages, each started by the command that the one before printed."""
    project = Project(tmp_path_factory.mktemp("pipeline"))
    project.model("base", seed=3)
    rng = np.random.default_rng(0)
    project.write(
        "demonstrations.jsonl",
        [
            {"prompt": p, "response": "".join(rng.choice([*"abcd"], rng.integers(2, 6)))}
            for p in PROMPTS
            for _ in range(3)
        ],
    )
    project.write("prompts.jsonl", [{"prompt": p} for p in PROMPTS])
    for name, text in (("sft", SFT), ("reward_model", REWARD_MODEL), ("ppo", PPO)):
        (project.folder / f"{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        patch.chdir(project.folder)
        patch.setenv("RLHF_CACHE", str(project.folder / "cache"))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RLHF_LAUNCHED"):
            patch.delenv(name, raising=False)
        told = {"sft": rlhf("sft", "sft.yaml", "--json")}
        told["sample"] = rlhf(
            *("sample", "runs/sft", "prompts.jsonl", "--k", "5", "--max-new-tokens", "8"),
            *("--output", "unranked.jsonl", "--json"),
        )
        label("unranked.jsonl", "rankings.jsonl")
        told["reward_model"] = rlhf(*shlex.split(told["sft"].json["next"])[1:], "--json")
        told["ppo"] = rlhf(*shlex.split(told["reward_model"].json["next"])[1:], "--json")
        told["answers"] = rlhf(*shlex.split(told["ppo"].json["next"])[1:], "--json")
        yield Pipeline(project, told)


def test_every_command_succeeds_and_prints_one_object(pipeline: Pipeline) -> None:
    for name, told in pipeline.told.items():
        assert told.code == 0, f"{name}: {told.err}"
        assert told.json["status"] == "done"
    for name in ("sft", "reward_model", "ppo"):
        told = pipeline.told[name].json
        assert told["stage"] == name
        assert told["output"] == f"runs/{name}"
        assert told["model"] == f"runs/{name}/model"
        assert told["step"] == run_json(f"runs/{name}")["step"] > 0


def test_the_loss_falls_the_rankings_are_learnt_and_the_policy_follows_the_rule(
    pipeline: Pipeline,
) -> None:
    evaluations = rows("runs/sft", "eval")
    assert evaluations[-1]["eval/loss"] < evaluations[0]["eval/loss"] - 0.5
    assert pipeline.told["reward_model"].json["metrics"]["eval/accuracy"] > 0.8
    scores = [row["objective/score"] for row in rows("runs/ppo", "train")]
    assert scores[-1] > scores[0]
    before, after = answers("unranked.jsonl"), answers("answers.jsonl")
    assert np.mean([taste(t) for t in after]) > np.mean([taste(t) for t in before]) + 0.5


@pytest.mark.parametrize(
    ("folder", "kind", "auto"),
    [
        ("runs/sft/model", "policy", AutoModelForCausalLM),
        ("runs/reward_model/model", "reward", AutoModelForSequenceClassification),
        ("runs/ppo/model", "policy", AutoModelForCausalLM),
        ("runs/ppo/critic", "critic", AutoModelForSequenceClassification),
    ],
)
def test_every_folder_loads_whole_in_transformers_and_says_what_it_is(
    pipeline: Pipeline, folder: str, kind: str, auto: Any
) -> None:
    _, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == TOKENIZER.get_vocab()
    told = identity(folder)
    assert told["kind"] == kind
    assert told["stop_ids"] == [TOKENIZER.eos_token_id]
    assert told["pad_id"] not in told["stop_ids"]
    assert told["vocabulary_hash"] == identity("runs/sft/model")["vocabulary_hash"]
    assert told["template_hash"] == identity("runs/sft/model")["template_hash"]
    assert told["std"] == 1.0


def test_each_run_names_its_parents_by_path_and_hash(pipeline: Pipeline) -> None:
    def parents(stage: str) -> dict[str, tuple[str, str]]:
        return {p["role"]: (p["path"], p["hash"]) for p in run_json(f"runs/{stage}")["parents"]}

    sft, reward, ppo = (parents(stage) for stage in ("sft", "reward_model", "ppo"))
    assert sft["model"][0] == "base"
    assert reward["model"][0] == "runs/sft"
    assert ppo["policy"] == ppo["reference"] == reward["model"]
    assert ppo["reward"][0] == "runs/reward_model"
    assert len({sft["model"][1], ppo["policy"][1], ppo["reward"][1]}) == 3
    assert identity("runs/reward_model/model")["parent"]["hash"] == reward["model"][1]


def test_the_policy_starts_at_its_reference(pipeline: Pipeline) -> None:
    assert rows("runs/ppo", "train")[0]["objective/kl"] == 0.0
    assert rows("runs/ppo", "train")[-1]["objective/kl"] > 0.0


def test_sampled_answers_score_the_same_alone_in_transformers(pipeline: Pipeline) -> None:
    folder = "runs/reward_model/model"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    mean = identity(folder)["mean"]
    for sample in samples("runs/ppo"):
        raw = raw_score(model, ids_of(sample["prompt"]) + sample["response_ids"])
        assert sample["score"] == pytest.approx(raw - mean, rel=2e-5, abs=2e-5)


def test_the_reward_model_reads_exactly_the_ids_that_were_sampled(pipeline: Pipeline) -> None:
    lines = [json.loads(line) for line in Path("unranked.jsonl").read_text().splitlines()]
    assert len(lines) == len(PROMPTS)
    for line in lines:
        assert len(line["responses"]) == 5
        for response in line["responses"]:
            assert response["vocabulary"] == identity("runs/sft/model")["vocabulary_hash"]
            ended = response["ids"][-1] == TOKENIZER.eos_token_id
            assert response["flags"] == ([] if ended else ["cut"])
            assert ended or len(response["ids"]) == 8


def test_a_second_run_is_refused_without_overwrite_and_changes_nothing(pipeline: Pipeline) -> None:
    before = {p: p.stat().st_mtime_ns for p in Path("runs/sft").rglob("*") if p.is_file()}
    told = rlhf("sft", "sft.yaml")
    assert told.code == 2
    assert "--overwrite" in told.err
    assert told.out == ""
    after = {p: p.stat().st_mtime_ns for p in Path("runs/sft").rglob("*") if p.is_file()}
    assert {p: t for p, t in after.items() if p.name != ".lock"} == {
        p: t for p, t in before.items() if p.name != ".lock"
    }


def test_a_finished_run_resumed_prints_its_result_and_the_next_command(pipeline: Pipeline) -> None:
    told = rlhf("sft", "sft.yaml", "--resume")
    assert told.code == 0
    assert "runs/sft/model" in told.out
    assert told.out.rstrip().endswith(pipeline.told["sft"].json["next"])
    again = rlhf("sft", "sft.yaml", "--resume", "--json")
    assert again.json == pipeline.told["sft"].json


def test_the_resolved_config_of_a_run_makes_the_same_run_again(pipeline: Pipeline) -> None:
    told = rlhf("sft", "runs/sft/config.yaml", "output=runs/again", "--json")
    assert told.code == 0
    assert rows("runs/again") == rows("runs/sft")
    for name, weight in weights("runs/again/model").items():
        assert torch.equal(weight, weights("runs/sft/model")[name])


def test_overwrite_replaces_the_run_and_keeps_foreign_files(pipeline: Pipeline) -> None:
    copy = ["sft", "sft.yaml", "output=runs/copy", "train.epochs=1"]
    assert rlhf(*copy).code == 0
    foreign = [Path("runs/copy/notes.txt"), Path("runs/copy/figures/loss.svg")]
    foreign[1].parent.mkdir()
    for path in foreign:
        path.write_text("mine")
    assert rlhf(*copy, "seed=5").code == 2
    assert rlhf(*copy, "seed=5", "--overwrite").code == 0
    assert [path.read_text() for path in foreign] == ["mine", "mine"]
    assert run_json("runs/copy")["config"]["seed"] == 5
    assert len(rows("runs/copy", "eval")) == 2


def test_a_gate_that_fails_ends_with_7_and_the_model_is_there(pipeline: Pipeline) -> None:
    command = ["sft", "sft.yaml", "output=runs/gated", "train.max_steps=1"]
    told = rlhf(*command, "--require", "eval/loss<=0.001", "--json")
    assert told.code == 7
    assert told.json["error"]["kind"] == "gate"
    assert weights("runs/gated/model")


def test_a_policy_is_no_reward_model_and_a_reward_model_no_policy(pipeline: Pipeline) -> None:
    told = rlhf("ppo", "ppo.yaml", "output=runs/x", "reward.path=runs/sft")
    assert (told.code, told.out) == (4, "")
    assert "no reward head" in told.err
    models = ["model=runs/reward_model", "reward.path=runs/reward_model"]
    told = rlhf("ppo", "ppo.yaml", "output=runs/x", *models)
    assert told.code == 4
    assert "is a reward model" in told.err
    assert not Path("runs/x").exists()
