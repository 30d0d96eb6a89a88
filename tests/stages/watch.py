"""Looking over the shoulder of a PPO run: its minibatches, its rollouts, its four models."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import stages.iterations
from stages import actors
from stages.rollout import Readers, Rollout, Targets
from stages.update import Update


class Step(NamedTuple):
    """A minibatch as the update got it, and the metrics it returned (None: no step was taken)."""

    rollout: Rollout
    targets: Targets
    rows: list[int]
    documents: list[list[int]]
    figures: dict[str, float] | None


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every call of ``Update.step``, in order."""
    seen: list[Step] = []
    real = Update.step

    def step(
        self: Update, rollout: Any, targets: Any, rows: Any, documents: Any, number: int
    ) -> Any:
        figures = real(self, rollout, targets, rows, documents, number)
        texts = [example.ids.tolist() for example in documents]
        seen.append(Step(rollout, targets, list(rows), texts, figures))
        return figures

    monkeypatch.setattr(Update, "step", step)
    return seen


class Models(NamedTuple):
    """The four models of a run, and copies of their weights from before the first step."""

    readers: Readers
    before: dict[str, dict[str, Tensor]]


def watch_models(monkeypatch: pytest.MonkeyPatch) -> list[Models]:
    """The models of every run, with their first weights."""
    seen: list[Models] = []
    real = actors.load

    def load(*arguments: Any, **options: Any) -> Readers:
        readers = real(*arguments, **options)
        names = ("policy", "reference", "reward", "critic")
        before = {
            name: {k: v.clone() for k, v in getattr(readers, name).module.state_dict().items()}
            for name in names
        }
        seen.append(Models(readers, before))
        return readers

    monkeypatch.setattr(actors, "load", load)
    return seen


def in_rollout_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches take the answers in the order of the rollout, so that both plan alike."""
    monkeypatch.setattr(stages.iterations, "shuffled", lambda n, *key: np.arange(n))


def sums(values: Tensor, mask: Tensor) -> Tensor:
    """Σ over the real tokens of each answer."""
    return torch.where(mask, values, 0.0).sum(1)
