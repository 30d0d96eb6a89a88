"""What changes as training goes on: the KL coefficient, the learning rate, averaged weights."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

Schedule = Literal["constant", "linear", "cosine"]


def next_kl_coef(coef: float, kl: float, *, target: float, gain: float) -> float:
    """The KL coefficient for the next rollout, moved towards the target KL.

        e = clip(KL/KL_target − 1, −0.2, 0.2),    β ← β·(1 + K_β·e)

    Source: Ziegler et al. 2019, §2.2: K_β = 0.1 in the paper, n_episodes/horizon in its code.

    Args:
        coef: β that the rollout was made with.
        kl: mean over its answers of Σ_t kl_t (k1), nats per answer.
        target: KL_target > 0, nats per answer.
        gain: K_β.

    Returns:
        The new β.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + gain * error)


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Schedule,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float,
) -> float:
    """The learning rate of an optimiser step.

    Warm-up rises over W steps from a tenth of the peak, s = 0…W−1: peak·(0.1 + 0.9·s/(W−1)), and
    0.1·peak where W = 1. The schedule starts after it, with u going from 0 to 1 at ``total_steps``:

        constant: peak    linear: peak·(1 − u)    cosine: peak·(m + (1 − m)·(1 + cos πu)/2)

    Source: Ouyang et al. 2022, appendix C: cosine to 10 % of the peak, and for PPO a warm-up from
    10 % of the peak.

    Args:
        step: optimiser steps done before this one.
        peak: the highest learning rate.
        schedule: constant, linear or cosine.
        total_steps: optimiser steps of the whole run, warm-up included.
        warmup_steps: W.
        min_ratio: m, the cosine's last learning rate over the peak.

    Returns:
        The learning rate.
    """
    if step < warmup_steps:
        return peak * (0.1 + 0.9 * step / max(warmup_steps - 1, 1))
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)
    raise ValueError(f"unknown schedule {schedule!r}")


def ema(average: Tensor, value: Tensor, *, decay: float) -> Tensor:
    """Exponential moving average: decay·average + (1 − decay)·value.

    Source: Ouyang et al. 2022, appendix C.4, decay 0.992.

    Args:
        average: the average so far.
        value: same shape, the new value.
        decay: in [0, 1]; 0 gives the value itself.

    Returns:
        The new average.
    """
    return decay * average + (1 - decay) * value
