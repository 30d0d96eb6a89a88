"""Runs with low-rank adapters: what they train, write, share and go on from, at each stage."""

from __future__ import annotations

from typing import Any

from stages import ppo, reward_model, sft
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project
from tests.stages.results import identity, weights

QUIET = SilentReporter()


def adapted(project: Project, stage: str, **changes: Any) -> Any:
    """A stage's config with adapters of rank 2."""
    return project.config(stage, **{"lora.rank": 2, "train.learning_rate": 0.05, **changes})


def test_the_three_stages_run_one_after_the_other_on_merged_folders(project: Project) -> None:
    sft.run(adapted(project, "sft"), QUIET)
    reward_model.run(adapted(project, "reward_model", model="runs/sft"), QUIET)
    changes = {"model": "runs/sft", "reward.path": "runs/reward_model"}
    result = ppo.run(adapted(project, "ppo", **changes), QUIET)
    assert result.status == "done"
    for folder in ("runs/sft/model", "runs/ppo/model"):
        assert weights(folder).keys() == weights("base").keys()
    for folder in ("runs/reward_model/model", "runs/ppo/critic"):
        assert weights(folder).keys() == weights("reward").keys()
    assert identity("runs/ppo/model")["parent"]["path"] == "runs/sft"
