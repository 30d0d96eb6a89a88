"""Two processes are stopped and resumed as one is, by as many processes or by another number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from stages.config import to_yaml
from stages.errors import Interrupted
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Listener, Project, enter, make_models
from tests.stages.results import assert_equal, checkpoints, left_behind, rows, run_json, weights
from tests.stages.test_processes import COMMANDS, RUNS
from tests.stages.test_resume import FULL, HELD_OUT, stopped_at
from tests.stages.world import Job, start_world

pytestmark = pytest.mark.slow

STAGES = ("sft", "reward_model", "ppo")
STOPS = {"sft": 3, "reward_model": 3, "ppo": 7}  # an epoch's end, within one, an inner epoch
INTERRUPTED = 143


class Told(NamedTuple):
    """What two processes wrote on standard error; what one was told when it resumed theirs."""

    err: str
    notes: dict[str, list[str]]


def write(project: Project, stage: str, output: str, model: str = "wet") -> Any:
    """A config with everything that has a state, and its file beside the run folder."""
    held_out = f"held_out_{stage}.jsonl"
    changes = {**FULL[stage], "model": model, "data.eval": held_out, "output": output}
    config = project.config(stage, **changes)
    Path(f"{output}.yaml").write_text(to_yaml(config))
    return config


def jobs(project: Project, stage: str) -> list[Job]:
    """A whole run, one that is stopped and resumed, one that one process resumes, and back."""
    for output in ("whole", "parts"):
        write(project, stage, f"{stage}-{output}")
    for output in ("down", "up"):
        write(project, stage, f"{stage}-{output}", model="dry")
    command, stop = COMMANDS[stage], STOPS[stage]
    return [
        Job([command, f"{stage}-whole.yaml"]),
        Job([command, f"{stage}-parts.yaml"], code=INTERRUPTED, stop=stop, rank=1),
        Job([command, f"{stage}-parts.yaml", "--resume"]),
        Job([command, f"{stage}-down.yaml"], code=INTERRUPTED, stop=stop, rank=0),
        Job([command, f"{stage}-up.yaml", "--resume"]),
    ]


def stop_alone(project: Project, stage: str) -> None:
    """The first part of the run that two processes resume."""
    config = write(project, stage, f"{stage}-up", model="dry")
    with pytest.MonkeyPatch.context() as patch:
        if stage == "ppo":
            stopped_at(STOPS[stage], patch)
        listener = Listener(stop_at=None if stage == "ppo" else STOPS[stage])
        with pytest.raises(Interrupted):
            RUNS[stage](config, listener)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """All runs, in one world; ``<stage>-alone`` is the uninterrupted run of one process."""
    with pytest.MonkeyPatch.context() as patch:
        project = enter(tmp_path_factory.mktemp("worlds"), patch)
        make_models(project)
        project.model("wet", "gpt2", dropout=0.3, dtype=torch.float64)
        project.model("dry", "gpt2", dtype=torch.float64)
        for stage, records in HELD_OUT.items():
            project.write(f"held_out_{stage}.jsonl", records)
        work = [job for stage in STAGES for job in jobs(project, stage)]
        for stage in STAGES:
            stop_alone(project, stage)
        world = start_world(project.folder, work)
        for stage in STAGES:
            RUNS[stage](write(project, stage, f"{stage}-alone", model="dry"), SilentReporter())
        _, err = world.communicate(timeout=500)
        assert world.returncode == 0, err
        listeners = {stage: Listener() for stage in STAGES}
        for stage, listener in listeners.items():
            config = write(project, stage, f"{stage}-down", model="dry")
            RUNS[stage](config, listener, resume=True)
        yield Told(err, {stage: listener.notes for stage, listener in listeners.items()})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("told")
def test_two_processes_stopped_and_resumed_end_as_two_that_were_not(stage: str) -> None:
    """Bit for bit, on a model with dropout, with averages, adaptive KL and pretraining texts."""
    assert f"step-{STOPS[stage]:06d}" in {path.name for path in checkpoints(f"{stage}-parts")}
    assert run_json(f"{stage}-parts")["processes"] == 2
    assert_equal(left_behind(f"{stage}-parts"), left_behind(f"{stage}-whole"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("name", "processes"), [("down", 1), ("up", 2)])
def test_another_number_of_processes_goes_on_in_the_same_order_and_says_so(
    told: Told, stage: str, name: str, processes: int
) -> None:
    run, alone = f"{stage}-{name}", f"{stage}-alone"
    assert run_json(run)["processes"] == processes
    assert_equal(rows(run), rows(alone), rtol=1e-9)
    assert_equal(weights(checkpoints(run)[-1]), weights(checkpoints(alone)[-1]), rtol=1e-8)
    if name == "down":
        text = "goes on with 1 process, where it had 2 processes: the order of the data"
        assert any(text in note for note in told.notes[stage])
    else:
        text = "goes on with 2 processes, where it had 1 process: the order of the data"
        assert told.err.count(text) == len(STAGES)
