"""Broken numbers and runaway policies end a run with its state saved and no broken model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import stages.runtime.loop
import stages.update
from stages import ppo, reward_model, sft
from stages.errors import CheckpointError, TrainingError
from stages.runtime.reporter import SilentReporter
from tests.stages.project import DEMONSTRATIONS, Listener, Project, rankings
from tests.stages.results import assert_equal, checkpoints, left_behind, rows, run_json

QUIET = SilentReporter()
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}


def spoil(folder: Path, name: str, value: float) -> None:
    """One weight of a saved model becomes a number that is not finite."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def require_whole(output: str) -> None:
    """Every checkpoint holds finite numbers only, and no model was published."""
    for folder in checkpoints(output):
        for path in folder.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                assert bool(torch.isfinite(tensor.double()).all()), f"{path.name}: {name}"
    assert not list(Path(output).glob("*/model.safetensors"))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_reward_head_that_is_not_finite_is_refused_before_anything_is_written(
    project: Project, value: float
) -> None:
    spoil(project.folder / "reward", "score.weight", value)
    with pytest.raises(CheckpointError, match=r"score\.weight holds numbers that are not finite"):
        ppo.run(project.config("ppo"), QUIET)
    assert not (project.folder / "runs/ppo/run.json").exists()


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_a_loss_that_breaks_stops_the_run_and_names_step_and_quantity(
    project: Project, stage: str
) -> None:
    output = f"runs/{stage}"
    changes = {"train.learning_rate": 1e200, "train.schedule": "constant"}
    with pytest.raises(TrainingError, match=r"step 2, loss/|iteration 2, score") as caught:
        RUNS[stage](project.config(stage, **changes), QUIET)
    assert caught.value.exit_code == 5
    told = run_json(output)
    assert told["status"] == "failed"
    assert told["error"]["kind"] == "training"
    assert "; measured last: " in caught.value.what
    assert "optim/lr 1e+200" in caught.value.what
    if stage != "ppo":  # its first row comes after the iteration
        (row,) = rows(output, "train")
        loss = {"sft": "loss/sft", "reward_model": "loss/ranking"}[stage]
        assert f"{loss} {row[loss]:.4g}" in caught.value.what
    assert told["error"]["what"] == str(caught.value)
    require_whole(output)
    assert [path.name for path in checkpoints(output)] == ["step-000001"]


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_figures_that_break_on_held_out_records_stop_the_run_before_a_model_is_published(
    project: Project, stage: str
) -> None:
    held_out = {"sft": DEMONSTRATIONS[:1], "reward_model": rankings(), "ppo": [{"prompt": "fa:"}]}
    project.write("held_out.jsonl", held_out[stage])
    changes = {
        "data.eval": "held_out.jsonl",
        "evaluate.every": 1,
        "train.learning_rate": 1e200,
        "train.max_steps": 1,
    }
    with pytest.raises(TrainingError, match="eval"):
        RUNS[stage](project.config(stage, **changes), QUIET)
    require_whole(f"runs/{stage}")


def test_a_reward_model_whose_mean_score_broke_is_not_published(project: Project) -> None:
    changes = {"train.learning_rate": 1e200, "train.max_steps": 1}
    with pytest.raises(TrainingError, match="step 1, mean score"):
        reward_model.run(project.config("reward_model", **changes), QUIET)
    require_whole("runs/reward_model")


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_weights_that_break_in_the_last_step_are_neither_saved_nor_published(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_step(trained: Any, *, lr: float) -> None:
        trained.parameters[0].data[0, 0] = float("inf")

    for module in (stages.update, stages.runtime.loop):
        monkeypatch.setattr(module, "take_step", take_step)
    with pytest.raises(TrainingError, match=r"step 1: the weight .* not finite"):
        RUNS[stage](project.config(stage, **{"train.max_steps": 1}), QUIET)
    assert not list(Path(f"runs/{stage}").rglob("*.safetensors"))


def test_above_kl_stop_above_the_run_ends_with_its_state_and_goes_on_under_a_wider_limit(
    project: Project,
) -> None:
    changes = {"train.total_episodes": 24, "kl.coef": 0.0, "log.every": 3}
    ppo.run(project.config("ppo", output="runs/free", **changes), QUIET)
    kls = {n: row["objective/kl"] for n, row in enumerate(rows("runs/free", "train"))}
    assert max(kls.values()) > 1e-3
    limited = {**changes, "kl.stop_above": 1e-3}
    with pytest.raises(TrainingError, match=r"iteration 2: the KL to the reference") as caught:
        ppo.run(project.config("ppo", **limited), QUIET)
    assert caught.value.exit_code == 5
    assert run_json("runs/ppo")["status"] == "failed"
    require_whole("runs/ppo")
    ppo.run(project.config("ppo", **changes), QUIET, resume=True)
    assert_equal(left_behind("runs/ppo"), left_behind("runs/free"))


def test_a_first_rollout_over_the_limit_leaves_one_evaluation_when_resumed(
    project: Project,
) -> None:
    project.model("other", seed=5, dtype=torch.float64)
    project.write("held_out.jsonl", [{"prompt": "fa:"}])
    changes = {"reference": "other", "data.eval": "held_out.jsonl"}
    ppo.run(project.config("ppo", output="runs/free", **changes), QUIET)
    with pytest.raises(TrainingError, match="iteration 1"):
        ppo.run(project.config("ppo", **changes, **{"kl.stop_above": 1e-3}), QUIET)
    ppo.run(project.config("ppo", **changes), QUIET, resume=True)
    assert_equal(rows("runs/ppo"), rows("runs/free"))


def test_above_kl_warn_above_the_run_says_so_and_goes_on(project: Project) -> None:
    listener = Listener()
    config = project.config("ppo", **{"kl.coef": 0.0, "kl.warn_above": 1e-3})
    assert ppo.run(config, listener).status == "done"
    assert any("kl.warn_above" in text for text in listener.warnings)
