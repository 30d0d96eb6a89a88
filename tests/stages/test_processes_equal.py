"""Two processes give the losses, gradients, metrics and weights of one, and write as one writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.config import to_yaml
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project, enter, make_models, rankings
from tests.stages.results import assert_equal, checkpoints, left_behind, rows, samples, weights
from tests.stages.test_processes import COMMANDS, RUNS
from tests.stages.world import Job, start_world, traced

pytestmark = pytest.mark.slow

STAGES = ("sft", "reward_model", "ppo")
HELD_OUT = {  # one record each: in an evaluation one process has nothing
    "sft": [{"prompt": "ab:", "response": "zyx"}],
    "reward_model": rankings()[:1],
    "ppo": [{"prompt": "fa:"}],
}
# The last step of each epoch, or rollout, has one record: one process has nothing there either.
CHANGES: dict[str, dict[str, Any]] = {
    "sft": {"train.batch_size": 4},
    "reward_model": {"train.batch_size": 3},
    "ppo": {
        "rollout.batch_size": 7,
        "train.total_episodes": None,
        "train.batch_size": 3,
        "ppo.whiten_rewards": True,
        "score.position": "after_last",
        "kl.controller": "adaptive",
        "kl.gain": 0.5,
        "kl.target": 0.05,
        "ptx.data": "documents.jsonl",
        "ptx.coef": 0.5,
        "ptx.ratio": 1,
        "log.samples": 7,
    },
}
# In fp32 a model without biases, and small steps: where a gradient is rounding and nothing else, as
# that of gpt2's key biases is, Adam makes whole steps of it. In fp64 one without rms norms, which
# transformers computes in fp32.
MODELS = {
    "fp64": {"model": "dry", "reward.path": "judge", "train.learning_rate": 1e-3},
    "fp32": {"model": "base", "reward.path": "reward", "train.learning_rate": 1e-4},
}
ROWS = {"fp64": {"rtol": 1e-10, "atol": 1e-12}, "fp32": {"rtol": 1e-5, "atol": 1e-6}}
WEIGHTS = {"fp64": {"rtol": 1e-8, "atol": 1e-12}, "fp32": {"rtol": 0.0, "atol": 1e-5}}


def write(project: Project, stage: str, precision: str, output: str) -> Any:
    """A config of 20 steps, and its file beside the run folder."""
    models = MODELS[precision].copy()
    if stage != "ppo":
        del models["reward.path"]
    config = project.config(
        stage,
        **models,
        **CHANGES[stage],
        **{
            "output": output,
            "data.eval": f"held_out_{stage}.jsonl",
            "evaluate.every": 4,
            "train.precision": precision,
            "train.max_steps": 20,
            "train.ema_decay": 0.9,
            "train.tokens_per_micro_batch": 16,
        },
    )
    Path(f"{output}.yaml").write_text(to_yaml(config))
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run folders ``<stage>-<precision>-one``, ``-two`` and, in fp64, ``-again``; what was seen."""
    with pytest.MonkeyPatch.context() as patch:
        project = enter(tmp_path_factory.mktemp("worlds"), patch)
        make_models(project)
        project.model("dry", "gpt2", dtype=torch.float64)
        project.model("judge", "gpt2", kind="reward", dtype=torch.float64, seed=1)
        for stage, records in HELD_OUT.items():
            project.write(f"held_out_{stage}.jsonl", records)
        names = [f"{s}-{p}-two" for s in STAGES for p in ROWS] + [f"{s}-fp64-again" for s in STAGES]
        jobs = []
        for name in names:
            stage, precision, _ = name.split("-")
            write(project, stage, precision, name)
            jobs.append(Job([COMMANDS[stage], f"{name}.yaml"], traced=name))
        world = start_world(project.folder, jobs)
        for stage in STAGES:
            for precision in ROWS:
                name = f"{stage}-{precision}-one"
                with traced(name):
                    RUNS[stage](write(project, stage, precision, name), SilentReporter())
        _, err = world.communicate(timeout=500)
        assert world.returncode == 0, err
        yield


def seen(name: str, rank: int) -> Any:
    return json.loads(Path(f"{name}-seen/seen-{rank}.json").read_text())


def gradients(name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(f"{name}-seen/gradients-{rank}.safetensors")


@pytest.mark.parametrize("precision", ROWS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("runs")
def test_invariant_5_two_processes_compute_what_one_computes(stage: str, precision: str) -> None:
    """Losses, metrics and evaluations of 20 steps, their gradients, and the weights behind them."""
    one, two = (f"{stage}-{precision}-{number}" for number in ("one", "two"))
    assert [row["step"] for row in rows(one, "train")][-1] == 20
    assert len(rows(one, "eval")) > 2
    assert_equal(rows(two), rows(one), **ROWS[precision])
    assert len(gradients(one)) >= 20
    assert_equal(gradients(two), gradients(one), **ROWS[precision])
    assert_equal(gradients(two, rank=1), gradients(two))
    files = [path.name for path in checkpoints(one)[-1].glob("*.safetensors")]
    for name in ("model", "ema", "critic"):
        if f"{name}.safetensors" in files:
            got, expected = (
                load_file(checkpoints(run)[-1] / f"{name}.safetensors") for run in (two, one)
            )
            assert_equal(got, expected, **WEIGHTS[precision])
    assert {"model.safetensors", "ema.safetensors"} <= {*files}
    assert_equal(weights(f"{two}/model"), weights(f"{one}/model"), **WEIGHTS[precision])
    if stage == "ppo":  # each with its KL, a sum of differences of log-probabilities
        assert_equal(samples(two), samples(one), rtol=1e-5, atol=10 * ROWS[precision]["atol"])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("runs")
def test_some_steps_leave_one_process_without_data(stage: str) -> None:
    shares = [seen(f"{stage}-fp64-two", rank)["shares"] for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1]) >= 20
    pairs = set(zip(*shares, strict=True))
    assert (1, 0) in pairs
    assert any(min(pair) > 0 for pair in pairs)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("runs")
def test_a_repeated_run_of_two_processes_is_equal_bit_for_bit(stage: str) -> None:
    again, two = f"{stage}-fp64-again", f"{stage}-fp64-two"
    assert_equal(left_behind(again), left_behind(two))
    assert_equal(gradients(again), gradients(two))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("runs")
def test_the_main_process_alone_writes(stage: str) -> None:
    main, other = (seen(f"{stage}-fp64-two", rank)["operations"] for rank in (0, 1))
    assert {"open", "write", "fsync", "replace", "save_file"} <= {*main}
    assert other == []
