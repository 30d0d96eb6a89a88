"""A signal before the first step: there is nothing to save, and the run ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stages import actors, iterations, preference, sample, sft
from stages.errors import Interrupted
from tests.stages.project import Listener, Project
from tests.stages.results import assert_equal, left_behind, run_json
from tests.stages.test_resume import RUNS as IN_TURN

RUNS = {**IN_TURN, "dpo": preference.run}


class Stopping(Listener):
    """Stops the process in a phase, or as soon as figures of step 0 are told."""

    def __init__(self, phase: str, by: signal.Signals) -> None:
        super().__init__(by=by)
        self.phase = phase

    def begin(self, what: str, **_: Any) -> None:
        super().begin(what)
        self._stop(what)

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        if done == 0 and metrics:
            self._stop("evaluation")

    def _stop(self, what: str) -> None:
        if what == self.phase:
            self.phase = ""
            os.kill(os.getpid(), self.by)


def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in whose first call a SIGTERM arrives."""
    calls = []

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **options)

    return call


def of_stage(project: Project, stage: str) -> Any:
    return project.config(stage, **{"data.eval": 0.3})


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo", "dpo"])
def test_a_stop_while_data_are_read_leaves_no_run(
    project: Project, stage: str, by: signal.Signals
) -> None:
    config = of_stage(project, stage)
    with pytest.raises(Interrupted) as caught:
        RUNS[stage](config, Stopping("reading data", by))
    assert caught.value.exit_code == 128 + by
    assert "before the first step" in caught.value.what
    assert not Path(config.output).exists()
    assert RUNS[stage](config, Listener(), resume=True).status == "done"


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo", "dpo"])
def test_a_stop_during_the_evaluation_of_step_0_is_told_and_resumed(
    project: Project, stage: str
) -> None:
    config = of_stage(project, stage)
    RUNS[stage](config, Listener())
    whole = left_behind(config.output)
    with pytest.raises(Interrupted) as caught:
        RUNS[stage](config, Stopping("evaluation", signal.SIGTERM), overwrite=True)
    assert caught.value.exit_code == 143
    told = run_json(config.output)
    assert (told["status"], told["step"]) == ("interrupted", 0)
    assert told["error"]["kind"] == "interrupted"
    RUNS[stage](config, Listener(), resume=True)
    assert_equal(left_behind(config.output), whole)


def test_a_stop_while_models_are_loaded_leaves_an_earlier_run_as_it_was(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project.config("sft")
    sft.run(config, Listener())
    before = left_behind("runs/sft")
    monkeypatch.setattr(sft, "load_policy", stopping(sft.load_policy))
    with pytest.raises(Interrupted):
        sft.run(config, Listener(), overwrite=True)
    assert_equal(left_behind("runs/sft"), before)


def test_a_stop_while_the_models_of_ppo_are_loaded_leaves_no_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "load", stopping(actors.load))
    with pytest.raises(Interrupted):
        RUNS["ppo"](project.config("ppo"), Listener())
    assert not Path("runs/ppo").exists()


def test_a_stop_in_the_first_rollout_is_told_and_resumed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project.config("ppo")
    monkeypatch.setattr(iterations, "collect", stopping(iterations.collect))
    with pytest.raises(Interrupted):
        RUNS["ppo"](config, Listener())
    assert run_json("runs/ppo")["status"] == "interrupted"
    assert RUNS["ppo"](config, Listener(), resume=True).step == 4


def test_a_stop_while_a_continuation_is_prepared_keeps_its_checkpoint(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = project.config("sft")
    with pytest.raises(Interrupted):
        sft.run(config, Listener(stop_at=1))
    with monkeypatch.context() as patch:
        patch.setattr(sft, "trainee", stopping(sft.trainee))
        with pytest.raises(Interrupted):
            sft.run(config, Listener(), resume=True)
    assert run_json("runs/sft")["status"] == "interrupted"
    assert run_json("runs/sft")["step"] == 1
    assert sft.run(config, Listener(), resume=True).step == 3


def test_a_stop_while_the_first_files_are_written_leaves_a_whole_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.runtime import opening

    config = project.config("sft")
    sft.run(config, Listener())
    monkeypatch.setattr(opening.run_dir, "clear", stopping(opening.run_dir.clear))
    with pytest.raises(Interrupted):
        sft.run(config, Listener(), overwrite=True)
    assert run_json("runs/sft")["status"] == "interrupted"
    assert Path("runs/sft/config.yaml").is_file()
    assert sft.run(config, Listener(), resume=True).status == "done"


def test_a_stop_before_the_first_answers_of_sample_is_a_keyboard_interrupt(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlhf_cli.app import main

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sample, "_load", stopping(sample._load))
    assert main(["sample", "base", "prompts.jsonl", "--output", "a.jsonl", "--json"]) == 143
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert '"exit": 143' in out
    assert not Path("a.jsonl").exists()
    assert signal.getsignal(signal.SIGTERM) is before
