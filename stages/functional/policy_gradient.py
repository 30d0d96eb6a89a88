"""The policy's loss in PPO, what to watch beside it, and the total with its other terms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stages.functional.divergence import kl_estimate
from stages.functional.masking import (
    Aggregation,
    aggregate,
    masked,
    masked_sum,
    require_same_shape,
)


class PolicyDiagnostics(NamedTuple):
    """Sums over real tokens, which add over micro-batches; divide by the number of tokens."""

    ratio: Tensor
    clip_fraction: Tensor
    approx_kl_k1: Tensor
    approx_kl_k2: Tensor
    approx_kl_k3: Tensor


def policy_loss(
    logp_new: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: Aggregation,
    denominator: Tensor,
) -> Tensor:
    """The clipped surrogate objective, negated.

        ρ_t = exp(logp_new,t − logp_old,t)
        ℓ_t = −min(ρ_t·A_t, clip(ρ_t, 1 − ε_low, 1 + ε_high)·A_t)

    The gradient vanishes only where (A > 0, ρ > 1 + ε_high) or (A < 0, ρ < 1 − ε_low). Source:
    Schulman et al. 2017, Eq. 7.

    Args:
        logp_new: ``[B, T]`` of the policy being trained, nats.
        logp_old: ``[B, T]`` of the policy that sampled, nats; a constant.
        advantages: ``[B, T]``; constants.
        mask: ``[B, T]``.
        clip_low: ε_low.
        clip_high: ε_high.
        aggregation: how token losses become one number.
        denominator: ``loss_denominator`` of the whole optimiser batch.

    Returns:
        A scalar: this micro-batch's share of the loss.
    """
    terms = _surrogate_losses(logp_new, logp_old, advantages, mask, clip_low, clip_high)
    losses = torch.maximum(*terms)
    return aggregate(losses, mask, aggregation=aggregation, denominator=denominator)


def policy_diagnostics(
    logp_new: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyDiagnostics:
    """Ratio, clipped tokens and KL(π_old‖π_new), each summed over the real tokens.

    A token is clipped where its clipped term is strictly the larger loss. k2 is what Ziegler et
    al. 2019 log as ``approxkl``.

    Args:
        logp_new: ``[B, T]`` of the policy being trained, nats.
        logp_old: ``[B, T]`` of the policy that sampled, nats.
        advantages: ``[B, T]``.
        mask: ``[B, T]``.
        clip_low: ε_low.
        clip_high: ε_high.

    Returns:
        Five scalars.
    """
    terms = _surrogate_losses(logp_new, logp_old, advantages, mask, clip_low, clip_high)
    new, old = masked(logp_new, mask), masked(logp_old, mask)
    return PolicyDiagnostics(
        masked_sum((new - old).exp(), mask),
        (terms[1] > terms[0]).to(new.dtype).sum(),
        kl_estimate(old, new, estimator="k1").sum(),
        kl_estimate(old, new, estimator="k2").sum(),
        kl_estimate(old, new, estimator="k3").sum(),
    )


def total_loss(
    policy: Tensor,
    value: Tensor,
    entropy: Tensor,
    ptx_nll: Tensor,
    *,
    vf_coef: float,
    ent_coef: float,
    ptx_coef: float,
) -> Tensor:
    """L = L_policy + c_vf·L_value − c_ent·H + γ_ptx·NLL_pretrain.

    Its gradient is the sum of the terms' gradients, so each may be back-propagated by itself with
    its coefficient. Source: Ouyang et al. 2022, §3.5, Eq. 2 (the ptx term); Schulman et al. 2017,
    Eq. 9 (value and entropy).

    Args:
        policy: scalar, ``policy_loss``.
        value: scalar, ``value_loss``.
        entropy: scalar, mean over tokens, nats.
        ptx_nll: scalar, negative log-likelihood of the pretraining text, nats.
        vf_coef: c_vf.
        ent_coef: c_ent.
        ptx_coef: γ_ptx.

    Returns:
        A scalar.
    """
    return policy + vf_coef * value - ent_coef * entropy + ptx_coef * ptx_nll


def _surrogate_losses(
    logp_new: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """−ρ·A and −clip(ρ)·A, ``[B, T]`` each, 0 under the mask."""
    require_same_shape(mask, logp_new=logp_new, logp_old=logp_old, advantages=advantages)
    advantages = masked(advantages, mask)
    ratio = masked(logp_new - logp_old, mask).exp()
    return -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
