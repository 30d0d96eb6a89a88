"""Kahneman–Tversky optimisation: single answers that are desirable or not, no pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.functional.masking import divide, masked_sum, require_same_shape


def reference_point(mismatched_sum: Tensor, count: Tensor) -> Tensor:
    """z_0 = max(0, mean of log(π/π_ref)(y_j | x_i) over mismatched pairs), without gradient.

    It estimates KL(π‖π_ref) from answers that belong to other prompts. Source: Ethayarajh et al.
    2024, arXiv 2402.01306, §4.1.

    Args:
        mismatched_sum: Σ of the log-ratios of the mismatched pairs of the whole optimiser batch.
        count: how many they are; 0 gives 0.

    Returns:
        A scalar in nats per answer.
    """
    return divide(mismatched_sum.detach(), count).clamp(min=0)


def kto_losses(
    log_ratios: Tensor,
    desirable: Tensor,
    reference: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """The loss of each answer, λ·(1 − σ(±β·(log(π/π_ref) − z_0))).

    The sign is + and λ = λ_D where the answer is desirable, − and λ_U where it is not. Source:
    Ethayarajh et al. 2024, arXiv 2402.01306, §4.1.

    Args:
        log_ratios: in nats, of any shape.
        desirable: bool, of the same shape.
        reference: z_0, a scalar without gradient, as ``reference_point`` gives it.
        beta: β.
        desirable_weight: λ_D.
        undesirable_weight: λ_U.
    """
    distance = beta * (log_ratios - reference)
    gain = desirable_weight * torch.sigmoid(-distance)  # 1 − σ(d) = σ(−d), without cancellation
    loss = undesirable_weight * torch.sigmoid(distance)
    return torch.where(desirable, gain, loss)


def answer_mean(losses: Tensor, mask: Tensor, *, denominator: Tensor) -> Tensor:
    """A micro-batch's share of the mean over all answers of the optimiser batch.

    Args:
        losses: ``[P, K]``.
        mask: ``[P, K]``, True = a real answer.
        denominator: the answers of the whole optimiser batch.
    """
    require_same_shape(mask, losses=losses)
    return divide(masked_sum(losses, mask), denominator)
