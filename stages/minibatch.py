"""The rows of a rollout that an optimiser step takes, packed, with what belongs to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stages.batch import Batch, Example, pack
from stages.rollout import Rollout, widened


class Row(NamedTuple):
    """One episode of a minibatch: its place in the rollout and its sequence."""

    index: int  # type: ignore[assignment]  # no one looks for a value in a row
    example: Example


def rows_of(rollout: Rollout, indices: Sequence[int]) -> list[Row]:
    """Some rows of a rollout, each with its sequence."""
    examples = rollout.examples()
    return [Row(n, examples[n]) for n in indices]


def packed(
    rows: Sequence[Row], rollout: Rollout, device: torch.device
) -> tuple[Batch, Callable[[Tensor], Tensor]]:
    """The rows of a micro-batch, and a function that takes them out of ``[B, …]`` tensors."""
    indices = [row.index for row in rows]
    batch = pack([row.example for row in rows])
    batch = widened(batch, rollout.mask.shape[1]).to(device)
    return batch, lambda tensor: tensor[indices].to(device)


def per_token(sums: NamedTuple, tokens: float) -> dict[str, Tensor]:
    """Diagnostics summed over a micro-batch as its share of the minibatch's token mean."""
    names = {"ratio": "policy/ratio", "clip_fraction": "policy/clip_fraction"}
    return {
        names.get(field, f"policy/{field}"): value / tokens
        for field, value in sums._asdict().items()
    }
