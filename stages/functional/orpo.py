"""Odds ratio preference optimisation: fine-tuning and preference in one loss, no reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def log_odds(mean_logps: Tensor) -> Tensor:
    """log(p/(1 − p)) for p = exp of the mean log-probability of an answer's tokens.

    Source: Hong et al. 2024, arXiv 2403.07691, Eq. 4; log(1 − p) = log(−expm1(log p)) stays exact
    where p is near 1.

    Args:
        mean_logps: log p in nats per token, of any shape.
    """
    below = mean_logps.clamp(max=-torch.finfo(mean_logps.dtype).tiny)
    return below - torch.log(-torch.expm1(below))


def orpo_losses(mean_logps: Tensor, *, lam: float) -> Tensor:
    """The loss of each pair, −log p_w − λ·log σ(log odds_w − log odds_l), ``[P, K, K]``.

    Source: Hong et al. 2024, arXiv 2403.07691, Eq. 6 and 7. The first term is over the tokens of
    the answer, its mean per answer.

    Args:
        mean_logps: ``[P, K]`` mean log-probability of each answer's tokens, in nats.
        lam: λ.
    """
    odds = log_odds(mean_logps)
    ratios = odds[:, :, None] - odds[:, None, :]
    return -mean_logps[:, :, None] - lam * logsigmoid(ratios)
