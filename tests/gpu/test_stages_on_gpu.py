"""The three stages on a GPU: as on a CPU, and the same after a stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages import ppo, reward_model, sft
from stages.errors import Interrupted
from stages.runtime.reporter import SilentReporter
from tests.gpu.device import DEVICE, on_gpu
from tests.stages.project import Listener, Project
from tests.stages.results import assert_equal, left_behind, rows, run_json, weights

pytestmark = on_gpu
QUIET = SilentReporter()
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}
LOSS = {"sft": "loss/sft", "reward_model": "loss/ranking", "ppo": "loss/value"}
RESUMED = 1e-5  # of the weights: sums on a GPU may be taken in another order each time

each_stage = pytest.mark.parametrize("stage", RUNS)


@pytest.fixture
def small(project: Project) -> Project:
    """Models whose heads are wide enough for the variable-length kernel."""
    project.model("base", "qwen3", dtype=torch.float32)
    project.model("reward", "qwen3", kind="reward", dtype=torch.float32, seed=1)
    return project


def first_loss(project: Project, stage: str, output: str, **changes: Any) -> float:
    config = project.config(stage, output=output, **changes)
    result = RUNS[stage](config, QUIET)
    assert result.status == "done"
    assert all(bool(w.isfinite().all()) for w in weights(f"{output}/model").values())
    return float(rows(output, "train")[0][LOSS[stage]])


@pytest.mark.parametrize(
    ("stage", "precision", "rtol"),
    [
        ("sft", "fp32", 1e-4),
        ("sft", "bf16", 5e-2),
        ("reward_model", "fp32", 1e-4),
        ("reward_model", "bf16", 5e-2),
        ("ppo", "fp32", 1e-4),
    ],
)
def test_the_first_step_has_the_loss_of_a_cpu(small, stage, precision, rtol):
    """In bf16 the answers of ppo may differ, and with them everything behind."""
    greedy = {"rollout.temperature": 0.05} if stage == "ppo" else {}
    options = {"train.precision": precision, **greedy}
    own = first_loss(small, stage, "runs/gpu", **options, device=DEVICE.type)
    assert run_json("runs/gpu")["device"].startswith(DEVICE.type)
    expected = first_loss(small, stage, "runs/cpu", **{**options, "train.precision": "fp32"})
    assert own == pytest.approx(expected, rel=rtol, abs=rtol)


def test_ppo_in_bf16_starts_at_a_ratio_of_one(small):
    config = small.config("ppo", output="runs/gpu", device=DEVICE.type, train__precision="bf16")
    assert ppo.run(config, QUIET).status == "done"
    first = rows("runs/gpu", "train")[0]
    assert first["policy/ratio_first"] == pytest.approx(1.0, abs=1e-2)
    assert all(bool(w.isfinite().all()) for w in weights("runs/gpu/model").values())


@each_stage
def test_a_stopped_run_goes_on_to_the_weights_of_one_that_was_not(small, stage):
    options = {"train.precision": "fp32", "device": DEVICE.type, "train.ema_decay": 0.9}
    whole = small.config(stage, output="runs/whole", **options)
    parts = small.config(stage, output="runs/parts", **options)
    RUNS[stage](whole, QUIET)
    with pytest.raises(Interrupted):
        RUNS[stage](parts, Listener(stop_at=1))
    RUNS[stage](parts, QUIET, resume=True)
    got, expected = left_behind("runs/parts"), left_behind("runs/whole")
    assert_equal(got, expected, rtol=RESUMED)
