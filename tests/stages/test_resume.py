"""A run that was stopped, or killed, and resumed is the run that was never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import actors, online, ppo, preference, reward_model, sft
from stages.errors import CheckpointError, Interrupted
from stages.runtime import checkpoint
from stages.runtime.reporter import SilentReporter
from stages.update import Update
from tests.stages.project import Listener, Project, rankings
from tests.stages.results import assert_equal, checkpoints, left_behind, rows, run_json, weights

QUIET = SilentReporter()
RUNS: dict[str, Any] = {
    "sft": sft.run,
    "reward_model": reward_model.run,
    "ppo": ppo.run,
    "dpo": preference.run,
    "grpo": online.run,
    "reinforce": online.run,
}
ITERATED = ("ppo", "grpo", "reinforce")  # several optimiser steps on each rollout

HELD_OUT = {
    "sft": [{"prompt": "ab:", "response": "zyx"}],
    "reward_model": rankings(),
    "ppo": [{"prompt": "fa:"}],
    "dpo": rankings(),
    "grpo": [{"prompt": "fa:"}],
    "reinforce": [{"prompt": "fa:"}],
}
RANKED = {
    "model": "wet",
    "train.max_steps": 6,
    "train.tokens_per_micro_batch": 16,
    "train.batch_size": 3,  # two steps an epoch, the second on one ranking
    "train.ema_decay": 0.9,
    "evaluate.every": 2,
    "log.every": 4,
}
FULL: dict[str, dict[str, Any]] = {
    "sft": {
        "model": "wet",
        "train.max_steps": 6,
        "train.tokens_per_micro_batch": 16,
        "train.batch_size": 3,  # three steps an epoch, the third on one demonstration
        "train.ema_decay": 0.9,
        "sft.pretrain.data": "documents.jsonl",
        "sft.pretrain.share": 0.3,
        "evaluate.every": 2,
        "log.every": 4,
    },
    "reward_model": RANKED,
    "ppo": {
        "model": "wet",
        "train.total_episodes": 18,
        "train.tokens_per_micro_batch": 16,
        "train.batch_size": 4,
        "train.ema_decay": 0.9,
        "ppo.epochs": 2,
        "critic.learning_rate": 3e-3,
        "score.position": "after_last",
        "kl.controller": "adaptive",
        "kl.gain": 0.5,
        "kl.target": 0.05,
        "ptx.data": "documents.jsonl",
        "ptx.coef": 0.5,
        "ptx.ratio": 1,
        "evaluate.every": 2,
        "log.every": 2,
    },
    "dpo": RANKED,
    "grpo": {
        "model": "wet",
        "train.total_episodes": 24,
        "train.tokens_per_micro_batch": 16,
        "train.batch_size": 4,
        "train.ema_decay": 0.9,
        "rollout.batch_size": 8,
        "grpo.group_size": 4,
        "grpo.epochs": 2,
        "evaluate.every": 2,
        "log.every": 2,
    },
    "reinforce": {
        "model": "wet",
        "train.total_episodes": 24,
        "train.tokens_per_micro_batch": 16,
        "train.ema_decay": 0.9,
        "reinforce.baseline": "moving_average",
        "kl.controller": "adaptive",
        "kl.gain": 0.5,
        "kl.target": 0.05,
        "evaluate.every": 2,
        "log.every": 2,
    },
}


def full(project: Project, stage: str, output: str, **changes: Any) -> Any:
    """A run with everything that has a state: dropout, averages, evaluations, windows of rows."""
    project.model("wet", "gpt2", dropout=0.3, dtype=torch.float64)
    project.write("held_out.jsonl", HELD_OUT[stage])
    values = {"data.eval": "held_out.jsonl", "output": output, **FULL[stage], **changes}
    return project.config(stage, **values)


WHOLE: dict[str, dict[str, Any]] = {}


def whole(project: Project, stage: str, **changes: Any) -> dict[str, Any]:
    """What the uninterrupted run leaves behind; made once for all tests."""
    key = f"{stage} {changes}"
    if key not in WHOLE:
        RUNS[stage](full(project, stage, "runs/whole", **changes), QUIET)
        WHOLE[key] = left_behind("runs/whole")
    return WHOLE[key]


def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM while a minibatch of ppo is being worked on."""
    real, calls = Update.step, [0]

    def update(self: Update, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    monkeypatch.setattr(Update, "step", update)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", ["sft", "reward_model", "dpo"])
def test_invariant_12_a_stop_after_any_step_leaves_no_trace(
    project: Project, stage: str, stop: int
) -> None:
    config = full(project, stage, "runs/parts")
    with pytest.raises(Interrupted) as caught:
        RUNS[stage](config, Listener(stop_at=stop))
    assert caught.value.exit_code == 143
    assert run_json("runs/parts")["status"] == "interrupted"
    assert checkpoints("runs/parts")[-1].name == f"step-{stop:06d}"
    result = RUNS[stage](config, QUIET, resume=True)
    assert (result.status, result.step) == ("done", 6)
    assert_equal(left_behind("runs/parts"), whole(project, stage))


@pytest.mark.parametrize(
    ("stop", "position"),
    [(1, "last"), (2, "after_last"), (4, "last"), (7, "after_last"), (11, "last"), (12, "last")],
)
def test_invariant_12_a_stop_inside_an_iteration_leaves_no_trace(
    project: Project, stop: int, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"score.position": position}
    config = full(project, "ppo", "runs/parts", **changes)
    with monkeypatch.context() as patch:
        stopped_at(stop, patch)
        with pytest.raises(Interrupted):
            ppo.run(config, QUIET)
    assert checkpoints("runs/parts")[-1].name == f"step-{stop:06d}"
    assert ppo.run(config, QUIET, resume=True).step == 12
    assert_equal(left_behind("runs/parts"), whole(project, "ppo", **changes))


@pytest.mark.parametrize("position", ["last", "after_last"])
def test_invariant_12_a_stop_between_iterations_leaves_no_trace(
    project: Project, position: str
) -> None:
    changes = {"score.position": position}
    config = full(project, "ppo", "runs/parts", **changes)
    with pytest.raises(Interrupted):
        ppo.run(config, Listener(stop_at=1))
    ppo.run(config, QUIET, resume=True)
    assert_equal(left_behind("runs/parts"), whole(project, "ppo", **changes))


def test_invariant_12_stops_after_every_single_step_leave_no_trace(project: Project) -> None:
    config = full(project, "sft", "runs/parts")
    for stop in range(1, 6):
        with pytest.raises(Interrupted):
            sft.run(config, Listener(stop_at=stop, by=signal.SIGINT), resume=True)
    sft.run(config, QUIET, resume=True)
    assert_equal(left_behind("runs/parts"), whole(project, "sft"))


@pytest.mark.parametrize("stage", RUNS)
def test_a_stop_asked_for_during_a_save_leaves_no_trace(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {"checkpoint.every": 1}
    config = full(project, stage, "runs/parts", **every)
    real, calls = checkpoint.save, [0]

    def save(*arguments: Any) -> Path:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        with pytest.raises(Interrupted):
            RUNS[stage](config, QUIET)
    assert calls == [3], "the state stands still since the save, and is not written twice"
    RUNS[stage](config, QUIET, resume=True)
    assert_equal(left_behind("runs/parts"), whole(project, stage, **every))


class Killed(Exception):
    """What no stage catches, as little as it would a power cut."""


class Killer(Listener):
    """Ends the run without a word when it reaches a count."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def advance(self, done: int, metrics: Any = None) -> None:
        if self.trains and done == self.at:
            raise Killed


@pytest.mark.parametrize("stage", RUNS)
def test_a_killed_run_goes_on_from_its_last_checkpoint(project: Project, stage: str) -> None:
    every = {"checkpoint.every": 1 if stage in ITERATED else 2, "log.every": 1}
    config = full(project, stage, "runs/parts", **every)
    with pytest.raises(Killed):
        RUNS[stage](config, Killer(2 if stage in ITERATED else 5))
    log = Path("runs/parts/metrics.jsonl")
    beyond = int(checkpoints("runs/parts")[-1].name.removeprefix("step-"))
    assert rows("runs/parts")[-1]["step"] > beyond, "the log is not ahead of the checkpoint"
    log.write_text(log.read_text() + '{"kind": "train", "ste')
    RUNS[stage](config, QUIET, resume=True)
    assert_equal(left_behind("runs/parts"), whole(project, stage, **every))


def test_an_incomplete_checkpoint_is_passed_over_with_a_notice(project: Project) -> None:
    config = full(project, "sft", "runs/parts", **{"checkpoint.every": 2})
    with pytest.raises(Interrupted):
        sft.run(config, Listener(stop_at=5))
    assert [path.name for path in checkpoints("runs/parts")] == ["step-000004", "step-000005"]
    (checkpoints("runs/parts")[-1] / "COMPLETE").unlink()
    listener = Listener()
    sft.run(config, listener, resume=True)
    assert any("step-000005 is incomplete" in text for text in listener.warnings)
    assert_equal(left_behind("runs/parts"), whole(project, "sft"))


def test_a_damaged_checkpoint_is_refused_with_its_file(project: Project) -> None:
    config = full(project, "sft", "runs/parts")
    with pytest.raises(Interrupted):
        sft.run(config, Listener(stop_at=3))
    file = checkpoints("runs/parts")[-1] / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not what was written"):
        sft.run(config, QUIET, resume=True)


@pytest.mark.parametrize("stage", RUNS)
def test_a_finished_run_resumed_returns_its_stored_result_at_once(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = full(project, stage, "runs/x")
    result = RUNS[stage](config, QUIET)
    before = {path: path.stat().st_mtime_ns for path in Path("runs/x").rglob("*.safetensors")}

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a finished run loads no model")

    for name in ("load_policy", "load_reward", "with_fresh_head"):
        for module in (sft, reward_model, preference, actors):
            monkeypatch.setattr(module, name, refuse, raising=False)
    again = RUNS[stage](config, QUIET, resume=True)
    assert again == result
    after = {path: path.stat().st_mtime_ns for path in Path("runs/x").rglob("*.safetensors")}
    assert after == before


def test_more_epochs_go_on_where_the_finished_run_ended(project: Project) -> None:
    changes = {
        "train.max_steps": None,
        "train.schedule": "constant",
        "evaluate.every": 100,
        "log.every": 1,
    }
    sft.run(full(project, "sft", "runs/whole", **changes, **{"train.epochs": 3}), QUIET)
    sft.run(full(project, "sft", "runs/parts", **changes, **{"train.epochs": 1}), QUIET)
    assert run_json("runs/parts")["step"] == 3
    config = full(project, "sft", "runs/parts", **changes, **{"train.epochs": 3})
    assert sft.run(config, QUIET, resume=True).step == 9
    assert rows("runs/parts", "train") == rows("runs/whole", "train")
    last = "step-000009"
    for part in ("model", "optimizer_model", "ema"):
        file = f"checkpoints/{last}/{part}.safetensors"
        assert Path(f"runs/parts/{file}").read_bytes() == Path(f"runs/whole/{file}").read_bytes()


def test_more_episodes_go_on_and_no_row_comes_twice(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that is resumed holds a rollout whose last minibatch was done."""
    changes = {"train.schedule": "constant", "data.eval": None, "log.every": 1, "log.samples": 0}
    short = {**changes, "train.total_episodes": 12}
    with monkeypatch.context() as patch:
        stopped_at(8, patch)
        with pytest.raises(Interrupted):
            ppo.run(full(project, "ppo", "runs/parts", **short), QUIET)
    assert ppo.run(full(project, "ppo", "runs/parts", **short), QUIET, resume=True).step == 8
    ppo.run(full(project, "ppo", "runs/parts", **changes), QUIET, resume=True)
    assert_equal(left_behind("runs/parts"), whole(project, "ppo", **changes))


@pytest.mark.parametrize(
    ("stage", "key", "value"),
    [
        ("sft", "train.learning_rate", 0.5),
        ("sft", "seed", 1),
        ("reward_model", "ranking.ties", "half"),
        ("ppo", "kl.coef", 0.7),
        ("ppo", "rollout.batch_size", 4),
    ],
)
def test_a_changed_key_is_refused_by_name(
    project: Project, stage: str, key: str, value: Any
) -> None:
    with pytest.raises(Interrupted):
        RUNS[stage](full(project, stage, "runs/x"), Listener(stop_at=1))
    before = left_behind("runs/x")
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")) as caught:
        RUNS[stage](full(project, stage, "runs/x", **{key: value}), QUIET, resume=True)
    assert caught.value.exit_code == 4
    assert_equal(left_behind("runs/x"), before)


def test_a_key_that_changes_no_number_may_change(project: Project) -> None:
    with pytest.raises(Interrupted):
        sft.run(full(project, "sft", "runs/x"), Listener(stop_at=2))
    changed = {"log.every": 1, "checkpoint.every": 1}
    sft.run(full(project, "sft", "runs/x", **changed), QUIET, resume=True)
    newest = whole(project, "sft")["checkpoints/step-000006/model.safetensors"]
    assert_equal(weights(checkpoints("runs/x")[-1]), newest)


@pytest.mark.parametrize("stage", RUNS)
def test_a_parent_model_that_has_changed_is_refused(project: Project, stage: str) -> None:
    config = full(project, stage, "runs/x")
    with pytest.raises(Interrupted):
        RUNS[stage](config, Listener(stop_at=1))
    project.model("wet", "gpt2", dropout=0.3, dtype=torch.float64, seed=7)
    with pytest.raises(CheckpointError, match="have changed since the run was started") as caught:
        RUNS[stage](config, QUIET, resume=True)
    assert caught.value.where == "wet"
    assert checkpoints("runs/x"), "nothing that was there is lost"


def test_resume_starts_where_there_is_nothing_to_resume(project: Project) -> None:
    assert sft.run(project.config("sft"), QUIET, resume=True).step == 3
    assert len(rows("runs/sft")) == 3
