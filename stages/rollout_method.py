"""What a method brings to the loop over rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stages.rollout import Rollout, Targets
from stages.runtime.optim import Trainee
from stages.runtime.session import Metrics


class Estimated(NamedTuple):
    """What a method makes of a rollout.

    Attributes:
        targets: what the minibatches aim at.
        kl: mean KL(π_old‖π_ref), nats per answer.
        metrics: of the iteration.
        kept: what the method keeps for later iterations, by its name in the stage's state.
    """

    targets: Targets
    kl: float
    metrics: dict[str, float]
    kept: dict[str, float]


class Method(Protocol):
    """What a stage brings to the loop."""

    @property
    def trainees(self) -> Mapping[str, Trainee]:
        """What is trained, by its name in a checkpoint."""

    @property
    def may_stop_early(self) -> bool:
        """Whether ``step`` may refuse."""

    def estimate(self, rollout: Rollout, state: Mapping[str, Any]) -> Estimated:
        """What the minibatches of a rollout aim at; β is the ``kl_coef`` of the stage's state."""

    def step(self, rollout: Rollout, targets: Targets, rows: Sequence[int]) -> Metrics | None:
        """An optimiser step on some rows of a rollout; None ends the iteration without it."""
