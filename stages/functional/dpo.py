"""Direct preference optimisation: the policy is its own reward model, β·log(π/π_ref)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from stages.functional.masking import masked, require_same_shape

DpoLoss = Literal["sigmoid", "ipo", "hinge", "plackett_luce"]


def dpo_losses(
    log_ratio_gaps: Tensor,
    *,
    loss: Literal["sigmoid", "ipo", "hinge"],
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of each pair from Δ = log(π/π_ref)(y_w) − log(π/π_ref)(y_l).

        sigmoid   −(1−ε)·log σ(β·Δ) − ε·log σ(−β·Δ)
        ipo       (Δ − 1/(2β))²
        hinge     max(0, 1 − β·Δ)

    Sources: Rafailov et al. 2023, arXiv 2305.18290, Eq. 7, with the ε of its code; Azar et al.
    2023, arXiv 2310.12036, Eq. 17, where β is called τ; Zhao et al. 2023, arXiv 2305.10425.

    Args:
        log_ratio_gaps: Δ in nats, of any shape; per token where log-ratios are length-normalised.
        loss: which of the three.
        beta: β, or τ.
        label_smoothing: ε, the share of pairs whose order is taken to be wrong; ``sigmoid`` only.

    Returns:
        Losses in the shape of Δ.
    """
    if loss == "ipo":
        return (log_ratio_gaps - 1 / (2 * beta)).square()
    if loss == "hinge":
        return relu(1 - beta * log_ratio_gaps)
    smoothed = -label_smoothing * logsigmoid(-beta * log_ratio_gaps) if label_smoothing else 0.0
    return -(1 - label_smoothing) * logsigmoid(beta * log_ratio_gaps) + smoothed


def plackett_luce_losses(log_ratios: Tensor, ranks: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """Negative log-likelihood of each prompt's whole order of K answers, ``[P]``.

        L_p = −Σ_k [h_k − log Σ_{j = k or rank_j > rank_k} exp h_j],     h = β·log(π/π_ref)

    Two equal ranks do not compete with each other. K = 2 is the sigmoid loss of dpo. Source:
    Rafailov et al. 2023, arXiv 2305.18290, App. A.3.

    Args:
        log_ratios: ``[P, K]`` in nats.
        ranks: ``[P, K]``, 1 = best.
        mask: ``[P, K]``, True = a real answer.
        beta: β.
    """
    require_same_shape(mask, log_ratios=log_ratios, ranks=ranks)
    h = beta * masked(log_ratios, mask)
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    behind = (ranks[:, :, None] < ranks[:, None, :]) & mask[:, None, :]
    competing = h[:, None, :].masked_fill(~(behind | itself), -torch.inf)
    return masked(torch.logsumexp(competing, dim=2) - h, mask).sum(dim=1)
