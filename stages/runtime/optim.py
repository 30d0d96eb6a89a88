"""One optimiser step: gradients summed over processes once, clipped, applied, averaged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.config.shared import Optimisation
from stages.errors import CheckpointError, TrainingError
from stages.functional.control import ema, learning_rate
from stages.models.network import Network
from stages.runtime.processes import World

BUCKET = 1 << 24  # numbers summed over processes in one message
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Trainee:
    """A network in training: its parameters by name, AdamW, and the average of its weights."""

    network: Network
    adam: torch.optim.AdamW
    names: tuple[str, ...]
    max_grad_norm: float
    average: dict[str, Tensor] | None = None
    decay: float = 0.0
    parameters: list[torch.nn.Parameter] = field(default_factory=list)


def trainee(network: Network, train: Optimisation, *, with_average: bool = True) -> Trainee:
    """AdamW over all of a network's trainable parameters; matrices alone are decayed."""
    named = list(network.parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=train.adam_betas,
        eps=train.adam_eps,
        fused=True,  # one pass over weights and moments, without temporaries
    )
    averaged = with_average and train.ema_decay is not None
    return Trainee(
        network,
        adam,
        tuple(name for name, _ in named),
        train.max_grad_norm,
        {name: p.detach().clone() for name, p in named} if averaged else None,
        train.ema_decay or 0.0,
        [p for _, p in named],
    )


def learning_rate_at(train: Optimisation, step: int, total: int, *, peak: float) -> float:
    """The learning rate of optimiser step ``step`` (from 0) of ``total``."""
    return learning_rate(
        step,
        peak=peak,
        schedule=train.schedule,
        total_steps=total,
        warmup_steps=train.warmup_steps,
        min_ratio=train.min_learning_rate_ratio,
    )


def sum_gradients(trained: Trainee, world: World) -> None:
    """Add the gradients of all processes, in buckets of a fixed order.

    Each process holds Σ over its micro-batches of numerator / (whole batch's denominator), so the
    sum is the gradient of the whole optimiser batch. A process without data adds zeros.
    """
    for p in trained.parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if world.size == 1:
        return
    for bucket in _buckets(trained.parameters):
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        world.sum(flat)
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view_as(p)


def clip(trained: Trainee, *, what: str) -> float:
    """Check and clip the summed gradients.

    Args:
        trained: its parameters hold the gradients of the whole optimiser batch.
        what: names the step and the loss in the error, such as "step 12, loss/sft".

    Returns:
        The gradient norm before clipping.

    Raises:
        TrainingError: the norm is not finite; no step may be taken.
    """
    # On a GPU the scaling is queued behind the norm; reading the number is the one wait of a step.
    norm = float(torch.nn.utils.clip_grad_norm_(trained.parameters, trained.max_grad_norm))
    if not math.isfinite(norm):
        trained.adam.zero_grad(set_to_none=True)
        raise TrainingError(
            f"{what}: the gradient norm is {norm}",
            do="lower train.learning_rate, or look at the data of this step; the state before it "
            "is saved",
        )
    return norm


def take_step(trained: Trainee, *, lr: float) -> None:
    """Apply the clipped gradients, drop them, and move the average."""
    for group in trained.adam.param_groups:
        group["lr"] = lr
    trained.adam.step()
    trained.adam.zero_grad(set_to_none=True)
    _follow(trained)


def require_finite_weights(trained: Trainee, *, what: str) -> None:
    """A guard: no broken weights are saved.

    Raises:
        TrainingError: a weight is not finite; it is named.
    """
    finite = torch.stack([torch.isfinite(p).all() for p in trained.parameters]).tolist()
    for name, ok in zip(trained.names, finite, strict=True):
        if not ok:
            raise TrainingError(
                f"{what}: the weight {name} holds numbers that are not finite",
                do="lower train.learning_rate; the checkpoint before this step, if any, is whole",
            )


def gradient_norm(trained: Trainee) -> float:
    """The norm of the gradients as they are."""
    gradients = [p.grad for p in trained.parameters if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


@torch.no_grad()
def _follow(trained: Trainee) -> None:
    """Move the average towards the new weights."""
    if trained.average is None:
        return
    for name, p in zip(trained.names, trained.parameters, strict=True):
        trained.average[name] = ema(trained.average[name], p.detach(), decay=trained.decay)


def optimiser_state(trained: Trainee) -> dict[str, Tensor]:
    """Adam's moments and counters as plain tensors, named by parameter."""
    state = trained.adam.state
    return {
        f"{name}.{moment}": state[p][moment]
        for name, p in zip(trained.names, trained.parameters, strict=True)
        if p in state
        for moment in MOMENTS
    }


def load_optimiser_state(trained: Trainee, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`optimiser_state`.

    Raises:
        CheckpointError: the file belongs to another model.
    """
    for name, p in zip(trained.names, trained.parameters, strict=True):
        keys = {moment: f"{name}.{moment}" for moment in MOMENTS}
        if not tensors:
            continue
        if any(key not in tensors for key in keys.values()):
            raise CheckpointError(
                f"the optimiser state has nothing for {name}",
                do="resume with the model that the run was started with",
            )
        trained.adam.state[p] = {
            moment: tensors[key].to(p.device, copy=True)  # the step count stands there too
            for moment, key in keys.items()
        }


def weights(trained: Trainee) -> dict[str, Tensor]:
    """The trained parameters by name."""
    return {n: p.detach() for n, p in zip(trained.names, trained.parameters, strict=True)}


@torch.no_grad()
def load_weights(trained: Trainee, tensors: Mapping[str, Tensor]) -> None:
    """Put saved parameters back in place.

    Raises:
        CheckpointError: the file belongs to another model.
    """
    for name, p in zip(trained.names, trained.parameters, strict=True):
        if name not in tensors or tensors[name].shape != p.shape:
            raise CheckpointError(
                f"the training state has no {name} of shape {list(p.shape)}",
                do="resume with the model that the run was started with",
            )
        p.copy_(tensors[name])


@contextmanager
def swapped(trained: Trainee, tensors: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Other weights in the network for a while, such as their average; None changes nothing."""
    if tensors is None:
        yield
        return
    kept = {name: p.clone() for name, p in weights(trained).items()}
    load_weights(trained, tensors)
    try:
        yield
    finally:
        load_weights(trained, kept)


def _buckets(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = [[]]
    size = 0
    for p in parameters:
        if buckets[-1] and size + p.numel() > BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel()
    return buckets
