"""An evaluation looks, and leaves everything as it found it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stages import iterations, reward_model, sft
from stages.runtime import loop
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project
from tests.stages.results import assert_equal, left_behind, rows
from tests.stages.test_resume import RUNS, full

QUIET = SilentReporter()
EVALUATES: dict[str, Any] = {
    "sft": sft.Supervised,
    "reward_model": reward_model.Ranked,
    "ppo": iterations.Loop,
}
OFTEN = {"evaluate.every": 1, "log.every": 1}


def networks(stage: str, work: Any) -> list[Any]:
    """The networks that an evaluation of a stage uses."""
    if stage != "ppo":
        return [work.trained.network]
    readers = work.readers
    return [readers.policy, readers.reference, readers.reward, readers.critic]


def streams() -> list[Any]:
    """Where every global random stream stands."""
    name, keys, *place = np.random.get_state()
    return [random.getstate(), torch.get_rng_state().tolist(), name, keys.tolist(), place]


def modes(networks: list[Any]) -> list[bool]:
    """Whether each part of each network is in training mode."""
    return [part.training for network in networks for part in network.module.modules()]


def watched(stage: str, real: Callable[[Any], Any], seen: list[Any]) -> Callable[[Any], Any]:
    """Evaluate twice; keep the modes and streams of before and after, and what came out."""

    def evaluate(self: Any) -> Any:
        used = networks(stage, self)
        weights = [p.detach().clone() for n in used for p in n.module.parameters()]
        before = streams()
        first, second = real(self), real(self)
        after = [p.detach() for n in used for p in n.module.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))
        seen.append((before == streams(), same, first == second))
        return second

    return evaluate


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_an_evaluation_leaves_random_streams_and_weights_and_repeats_itself(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a model with dropout, between steps that draw from the streams."""
    seen: list[Any] = []
    kind = EVALUATES[stage]
    monkeypatch.setattr(kind, "evaluate", watched(stage, kind.evaluate, seen))
    RUNS[stage](full(project, stage, "runs/x", **OFTEN), QUIET)
    assert len(seen) >= 4
    assert set(seen) == {(True, True, True)}
    if stage == "ppo":  # which writes its row itself
        found = rows("runs/x", "eval")
        assert found[::2] == found[1::2]
        assert len(found) == 2 * len(seen)


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_an_evaluation_sees_no_dropout_and_restores_the_modes(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[list[bool]] = []
    around: list[tuple[list[bool], list[bool]]] = []
    owner, name = (
        (iterations.Loop, "_collect") if stage == "ppo" else (EVALUATES[stage], "evaluate")
    )
    read = getattr(owner, name)

    def reads(self: Any, *arguments: Any, **options: Any) -> Any:
        found = read(self, *arguments, **options)
        inside.append(modes(networks(stage, self)[:3]))  # a critic takes no part
        return found

    monkeypatch.setattr(owner, name, reads)
    owner, name = (iterations.Loop, "evaluate") if stage == "ppo" else (loop, "_evaluate")
    look = getattr(owner, name)

    def looks(first: Any, *rest: Any, **options: Any) -> None:
        used = networks(stage, rest[0] if rest else first)
        before = modes(used)
        look(first, *rest, **options)
        around.append((before, modes(used)))

    monkeypatch.setattr(owner, name, looks)
    RUNS[stage](full(project, stage, "runs/x", **OFTEN), QUIET)
    assert inside
    assert not any(mode for found in inside for mode in found)
    assert len(around) >= 4
    assert any(before[0] for before, _ in around), "none came while the model was in training"
    for before, after in around:
        assert after == before


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_evaluating_every_step_changes_no_bit(project: Project, stage: str) -> None:
    """Weights, moments, averages, critic, rollouts and rows are those of a run that never looks."""
    left = {}
    for name, held_out in (("often", {}), ("never", {"data.eval": None})):
        RUNS[stage](full(project, stage, f"runs/{name}", **OFTEN, **held_out), QUIET)
        found = left_behind(f"runs/{name}")
        found["rows"] = rows(f"runs/{name}", "train")
        for key in ("selected", "evaluation"):
            del found["state"][key]
        found["state"]["stage"].pop("evaluated", None)  # when it looked last
        # Which step is published depends on what was seen; what is trained does not.
        left[name] = {k: v for k, v in found.items() if k.split("/")[0] not in ("model", "last")}
    assert len(rows("runs/often", "eval")) == (4 if stage == "ppo" else 7)
    assert not rows("runs/never", "eval")
    assert_equal(left["often"], left["never"])
