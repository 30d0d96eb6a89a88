"""The critic's loss in PPO, and what to watch beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.functional.masking import (
    Aggregation,
    aggregate,
    masked,
    masked_moments,
    masked_sum,
    require_same_shape,
)


def value_loss(
    values_new: Tensor,
    values_old: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float | None,
    aggregation: Aggregation,
    denominator: Tensor,
) -> Tensor:
    """Half the squared error against the returns, the clipped or the unclipped, whichever is more.

        ℓ_t = ½·max((V_t − G_t)², (clip(V_t, V_old,t − ε, V_old,t + ε) − G_t)²)

    Source: Ziegler et al. 2019, code ``train_policy.py``; Ouyang et al. 2022 print no formula.

    Args:
        values_new: ``[B, T]`` of the critic being trained.
        values_old: ``[B, T]`` of the critic at rollout time; constants.
        returns: G, ``[B, T]``; constants.
        mask: ``[B, T]``.
        clip_range: ε in units of the value; None = no clipping.
        aggregation: how token losses become one number.
        denominator: ``loss_denominator`` of the whole optimiser batch.

    Returns:
        A scalar: this micro-batch's share of the loss.
    """
    errors = torch.maximum(*_squared_errors(values_new, values_old, returns, mask, clip_range))
    return aggregate(0.5 * errors, mask, aggregation=aggregation, denominator=denominator)


def value_clip_count(
    values_new: Tensor,
    values_old: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float | None,
) -> Tensor:
    """Number of real tokens whose clipped error is strictly the larger, a scalar that adds up."""
    plain, clipped = _squared_errors(values_new, values_old, returns, mask, clip_range)
    return masked_sum((clipped > plain).to(values_new.dtype), mask)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of the returns that the values explain: 1 − Var(G − V)/Var(G).

    Args:
        values: ``[B, T]``.
        returns: ``[B, T]``.
        mask: ``[B, T]``.

    Returns:
        A scalar ≤ 1; NaN where the returns do not vary, for it is undefined.
    """
    require_same_shape(mask, values=values, returns=returns)
    _, unexplained = masked_moments(returns - values, mask)
    _, total = masked_moments(returns, mask)
    return torch.where(total > 0, 1 - unexplained / total, torch.nan)


def _squared_errors(
    values_new: Tensor,
    values_old: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None,
) -> tuple[Tensor, Tensor]:
    """(V − G)² and (clip(V) − G)², ``[B, T]`` each, 0 under the mask."""
    require_same_shape(mask, values_new=values_new, values_old=values_old, returns=returns)
    new, old, target = (masked(x, mask) for x in (values_new, values_old, returns))
    plain = (new - target).square()
    if clip_range is None:
        return plain, plain
    return plain, (new.clamp(old - clip_range, old + clip_range) - target).square()
