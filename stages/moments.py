"""Mean and deviation of a stream of numbers, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """What is known of the numbers so far.

    Attributes:
        count: how many there were.
        mean: of them.
        squares: Σ (x - mean)².
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0


def joined(known: Moments, values: Tensor) -> Moments:
    """The moments of all numbers so far, those of a batch included.

    With δ the distance of the batch's mean from the mean so far,

        mean' = mean + δ·m/(n + m),    squares' = squares + squares_b + δ²·n·m/(n + m)

    (Chan et al. 1983, Eq. 2.1). Nothing of an empty batch changes them.

    Args:
        known: n numbers so far.
        values: ``[m]`` further ones.
    """
    exact = values.double()
    m, n = float(len(exact)), known.count
    if not m:
        return known
    mean = exact.mean()
    delta = float(mean) - known.mean
    squares = known.squares + float((exact - mean).square().sum()) + delta**2 * n * m / (n + m)
    return Moments(n + m, known.mean + delta * m / (n + m), squares)


def standardised(values: Tensor, known: Moments) -> Tensor:
    """``(x - mean) / deviation``, of the population; where the deviation is 0, ``x - mean``.

    Before any number is known the mean is 0 and nothing is divided.
    """
    deviation = (known.squares / known.count) ** 0.5 if known.count else 0.0
    centred = values - known.mean
    return centred / deviation if deviation > 0 else torch.as_tensor(centred)
