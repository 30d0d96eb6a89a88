"""Two processes compute what one computes, end as one ends, and stop as one stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages import ppo, reward_model, sft
from stages.config import to_yaml
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project, rankings
from tests.stages.results import assert_equal, checkpoints, rows, run_json, samples, weights
from tests.stages.world import Job, start_world

pytestmark = pytest.mark.slow

QUIET = SilentReporter()
ROOT = Path(__file__).parents[2]
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}
COMMANDS = {"sft": "sft", "reward_model": "train-rm", "ppo": "ppo"}
HELD_OUT = {
    "sft": [{"prompt": "ab:", "response": text} for text in ("zyx", "cd", "c")],
    "reward_model": rankings()[:3],
    "ppo": [{"prompt": "fa:"}, {"prompt": "gab:"}, {"prompt": "c:"}],
}
# Batches of three and a rest, so that the shares of two processes differ.
CHANGES: dict[str, dict[str, Any]] = {
    "sft": {"train.batch_size": 3, "train.max_steps": 4},
    "reward_model": {"train.batch_size": 3, "train.max_steps": 4, "train.ema_decay": 0.9},
    "ppo": {
        "rollout.batch_size": 7,
        "train.total_episodes": 14,
        "train.batch_size": 3,
        "score.position": "after_last",
        "ptx.data": "documents.jsonl",
        "ptx.coef": 0.5,
        "ptx.ratio": 1,
        "log.samples": 7,
        "ppo.target_kl": 0.5,
    },
}


def written(project: Project, stage: str, output: str, **changes: Any) -> Any:
    """A config and its file, ``<output>.yaml``."""
    held_out = project.write(f"held_out_{stage}.jsonl", HELD_OUT[stage])
    values = {"data.eval": held_out, "evaluate.every": 1, "output": output}
    config = project.config(stage, **values | CHANGES[stage] | changes)
    (project.folder / f"{output}.yaml").write_text(to_yaml(config))
    return config


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A Python of its own on one thread, which finds this tree."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **pipes, **options)


def two_processes(stage: str, output: str, *more: str) -> subprocess.Popen[str]:
    command = ["-m", "rlhf_cli", COMMANDS[stage], f"{output}.yaml", "--num-processes", "2", *more]
    return start(*command)


def require_ppo_of_two_equal(project: Project, **changes: Any) -> None:
    """PPO under these changes gives on two processes what it gives on one."""
    written(project, "ppo", "two", **changes)
    child = two_processes("ppo", "two")
    ppo.run(written(project, "ppo", "one", **changes), QUIET)
    err = child.communicate(timeout=300)[1]
    assert child.returncode == 0, err
    require_equal("ppo")


def require_equal(stage: str, one: str = "one", two: str = "two") -> None:
    """The run folders of one process and of two tell the same."""
    assert run_json(two)["processes"] == 2
    assert_equal(rows(two), rows(one), rtol=1e-10)
    parts = ("model", "critic") if stage == "ppo" else ("model",)
    for part in (*parts, *(["model_ema"] if stage == "reward_model" else [])):
        assert_equal(weights(f"{two}/{part}"), weights(f"{one}/{part}"), rtol=1e-8)
    assert [path.name for path in checkpoints(two)] == [path.name for path in checkpoints(one)]
    if stage == "ppo":
        assert_equal(samples(two), samples(one), rtol=1e-8)


@pytest.mark.parametrize("stage", ["ppo"])  # the others: test_processes_equal.py
def test_invariant_5_two_processes_give_the_rows_and_weights_of_one(
    project: Project, stage: str
) -> None:
    written(project, stage, "two")
    child = two_processes(stage, "two", "--json")
    RUNS[stage](written(project, stage, "one"), QUIET)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    told = json.loads(out)
    assert told["status"] == "done"
    assert told["step"] == run_json("one")["step"]
    require_equal(stage)


def test_a_world_that_torchrun_started_is_joined(project: Project) -> None:
    alone = {stage: written(project, stage, f"{stage}-one") for stage in RUNS}
    for stage in RUNS:
        written(project, stage, f"{stage}-two")
    jobs = [Job([COMMANDS[stage], f"{stage}-two.yaml", "--json"]) for stage in RUNS]
    child = start_world(project.folder, jobs, torchrun=True)
    for stage, config in alone.items():
        RUNS[stage](config, QUIET)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert [(one["stage"], one["status"]) for one in told] == [(stage, "done") for stage in RUNS]
    for stage in RUNS:
        require_equal(stage, f"{stage}-one", f"{stage}-two")


def test_a_signal_is_handed_on_and_the_state_is_saved(project: Project) -> None:
    """The interrupted world is resumed by one process, which ends where one alone ends."""
    changes = {"train.max_steps": 100, "data.eval": None, "log.every": 1}
    config = written(project, "sft", "two", **changes)
    child = two_processes("sft", "two")
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("sft: 2/100"):
            break
    child.send_signal(signal.SIGTERM)
    err = child.communicate(timeout=300)[1]
    assert child.returncode == 143
    assert "--resume" in err
    assert "Traceback" not in err
    step = run_json("two")["step"]
    assert 2 <= step < 100
    assert run_json("two")["status"] == "interrupted"
    assert checkpoints("two")[-1].name == f"step-{step:06d}"
    sft.run(config, QUIET, resume=True)
    sft.run(written(project, "sft", "one", **changes), QUIET)
    assert_equal(rows("two"), rows("one"), rtol=1e-6)


def test_a_failure_ends_the_world_with_its_exit_code_and_one_message(project: Project) -> None:
    written(project, "sft", "two")
    project.write("demonstrations.jsonl", [{"prompt": "ab:", "response": 7}])
    child = two_processes("sft", "two")
    err = child.communicate(timeout=300)[1]
    assert child.returncode == 3
    assert err.count("demonstrations.jsonl:1") == 1
    assert "Traceback" not in err
    assert not (project.folder / "two/run.json").exists()


def test_a_process_that_fails_in_a_step_ends_the_world_with_its_message(project: Project) -> None:
    """The others wait for its sums, and must neither hang nor speak over it."""
    written(project, "sft", "two")
    job = Job([COMMANDS["sft"], "two.yaml"], fail=2, rank=1)
    child = start_world(project.folder, [job])
    out, err = child.communicate(timeout=300)
    assert child.returncode == 6, err
    assert err.count("error: there is no room left") == 1
    assert "Traceback" not in err
    assert out == ""
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((project.folder / f"process-{rank}").read_text()), 0)
    assert run_json("two")["status"] == "failed"
    assert [row["step"] for row in rows("two", "train")] == [1]
