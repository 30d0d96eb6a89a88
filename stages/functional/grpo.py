"""Group relative policy optimisation: the clipped surrogate, the KL to the reference beside it."""

from __future__ import annotations

from torch import Tensor

from stages.functional.divergence import kl_estimate
from stages.functional.masking import Aggregation, aggregate, masked
from stages.functional.policy_gradient import policy_loss


def grpo_loss(
    logp_new: Tensor,
    logp_old: Tensor,
    logp_ref: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
    aggregation: Aggregation,
    denominator: Tensor,
) -> Tensor:
    """One advantage for all tokens of an answer, and β times k3 in the loss, not in the reward.

        ℓ_t = −min(ρ_t·A, clip(ρ_t, 1 − ε_low, 1 + ε_high)·A) + β·k3_t
        k3_t = π_ref/π − log(π_ref/π) − 1

    Differentiated through π, k3 included. Sources: Shao et al. 2024, arXiv 2402.03300, Eq. 3 and 4
    (``seq_mean``); Liu et al. 2025, arXiv 2503.20783 (``fixed_length``); two clip ranges: Yu et al.
    2025, arXiv 2503.14476.

    Args:
        logp_new: ``[B, T]`` of the policy being trained, nats.
        logp_old: ``[B, T]`` of the policy that sampled, nats; a constant.
        logp_ref: ``[B, T]`` of the reference, nats; a constant.
        advantages: ``[B]``; constants.
        mask: ``[B, T]``.
        clip_low: ε_low.
        clip_high: ε_high.
        beta: β; with 0 the reference adds nothing.
        aggregation: how token losses become one number.
        denominator: ``loss_denominator`` of the whole optimiser batch.

    Returns:
        A scalar: this micro-batch's share of the loss.
    """
    surrogate = policy_loss(
        logp_new,
        logp_old,
        advantages[:, None].expand_as(mask),
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        aggregation=aggregation,
        denominator=denominator,
    )
    kl = reference_kl(logp_new, logp_ref, mask)
    return surrogate + beta * aggregate(kl, mask, aggregation=aggregation, denominator=denominator)


def reference_kl(logp_new: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
    """k3 of KL(π‖π_ref) at each token, ``[B, T]`` in nats, 0 under the mask.

    Args:
        logp_new: ``[B, T]`` of the policy being trained, nats.
        logp_ref: ``[B, T]`` of the reference, nats.
        mask: ``[B, T]``.
    """
    return kl_estimate(masked(logp_new, mask), masked(logp_ref, mask), estimator="k3")
