"""Reductions over the entries that count.

A mask is bool and True means *counts*. Masked entries are replaced by 0 with ``torch.where`` before
any arithmetic, never multiplied by 0: a NaN under a mask reaches neither value nor gradient.

A loss is a numerator of one micro-batch over a denominator of the whole optimiser batch. The mean
of micro-batch means is another number as soon as lengths differ.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean", "seq_sum", "fixed_length"]


class Whitened(NamedTuple):
    """Whitened values (0 under the mask) and the moments that were used."""

    values: Tensor
    mean: Tensor
    var: Tensor


def require_same_shape(mask: Tensor, **tensors: Tensor) -> None:
    """Guard of the kernels: the mask is bool, and every tensor has its shape.

    Raises:
        TypeError: the mask is not bool.
        ValueError: a tensor has another shape than the mask; names it.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"the mask must be bool, not {mask.dtype}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, mask {tuple(mask.shape)}")


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values, with 0 where the mask is False."""
    return torch.where(mask, values, 0.0)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ of the values that count, a scalar."""
    require_same_shape(mask, values=values)
    return masked(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values that count, a scalar; NaN where nothing counts, for it is undefined."""
    return masked_sum(values, mask) / mask.sum()


def masked_moments(values: Tensor, mask: Tensor, *, ddof: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and variance of the values that count.

        μ = Σ v / n,    σ² = Σ (v − μ)² / max(n − ddof, 1)

    Args:
        values: any shape.
        mask: same shape.
        ddof: 0 for the population variance, 1 for Bessel's correction.

    Returns:
        (μ, σ²), two scalars; both 0 where nothing counts.
    """
    count = mask.sum().clamp(min=1)
    mean = masked_sum(values, mask) / count
    # A second pass takes away the rounding of the first: equal values get variance 0 exactly.
    mean = mean + masked_sum(values - mean, mask) / count
    squares = masked_sum((masked(values, mask) - mean).square(), mask)
    return mean, squares / (mask.sum() - ddof).clamp(min=1)


def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, ddof: int = 0, eps: float = 1e-8
) -> Whitened:
    """Values shifted to mean 0 and scaled to variance 1 over the entries that count.

        w = (v − μ) / √(σ² + ε),    plus μ where the mean is kept

    The moments are those of everything in the mask: pass the whole rollout of all processes,
    else the numbers depend on how it was split. Source: Ziegler et al. 2019, code
    ``utils/core.py`` (population variance, mean kept for rewards).

    Args:
        values: any shape.
        mask: same shape.
        shift_mean: False adds the mean back.
        ddof: 0 for the population variance, 1 for Bessel's correction.
        eps: added to the variance.

    Returns:
        The whitened values, 0 under the mask, with μ and σ²; a single entry whitens to 0.
    """
    mean, var = masked_moments(values, mask, ddof=ddof)
    scaled = (masked(values, mask) - mean) * torch.rsqrt(var + eps)
    if not shift_mean:
        scaled = scaled + mean
    return Whitened(masked(scaled, mask), mean, var)


def loss_denominator(
    mask: Tensor, *, aggregation: Aggregation, fixed_length: int | None = None
) -> Tensor:
    """What the numerators of ``aggregate`` are divided by; it adds over micro-batches.

    ``token_mean``: the number of tokens. ``seq_mean`` and ``seq_sum``: the number of sequences that
    are not empty. ``fixed_length``: B·L (Liu et al. 2025, arXiv 2503.20783).

    Args:
        mask: ``[B, T]`` of the whole optimiser batch, or of a part whose denominators are added up.
        aggregation: how token losses become one number.
        fixed_length: L in tokens, for ``fixed_length`` only.

    Returns:
        A float scalar.
    """
    if aggregation == "token_mean":
        return mask.sum().float()
    if aggregation in ("seq_mean", "seq_sum"):
        return mask.any(dim=1).sum().float()
    if fixed_length is None:
        raise ValueError("aggregation fixed_length needs a fixed_length in tokens")
    return torch.tensor(float(mask.shape[0] * fixed_length), device=mask.device)


def aggregate(
    losses: Tensor, mask: Tensor, *, aggregation: Aggregation, denominator: Tensor
) -> Tensor:
    """Token losses of a micro-batch as its share of the loss of the whole optimiser batch.

        token_mean, seq_sum, fixed_length:  Σ_{b,t} ℓ / D    seq_mean:  Σ_b (1/T_b) Σ_t ℓ / D

    Args:
        losses: ``[B, T]``.
        mask: ``[B, T]``.
        aggregation: how token losses become one number.
        denominator: D, ``loss_denominator`` summed over the whole optimiser batch.

    Returns:
        A scalar; 0 where D is 0, because then nothing counts.
    """
    require_same_shape(mask, losses=losses)
    losses = masked(losses, mask)
    if aggregation == "seq_mean":
        losses = losses / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return divide(losses.sum(), denominator)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Numerator over a count; 0 where the count is 0, because then the numerator is 0 too."""
    return numerator / torch.where(denominator == 0, 1.0, denominator)
