"""Direct preference optimisation with an offset: better by more should be likelier by more."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

OffsetScale = Literal["log", "identity"]


def offsets(gaps: Tensor, *, alpha: float, scale: OffsetScale) -> Tensor:
    """The offset α·f(s_w − s_l) of each pair, f the logarithm or the identity.

    Source: Amini et al. 2024, arXiv 2402.10571, §3.

    Args:
        gaps: s_w − s_l by score or rank, of any shape; where it is not positive, as for no pair at
            all, the logarithm gives no offset.
        alpha: α.
        scale: f.

    Returns:
        Offsets in the shape of the gaps, in units of the implicit reward.
    """
    if scale == "identity":
        return alpha * gaps
    positive = gaps > 0
    return torch.where(positive, alpha * torch.where(positive, gaps, 1.0).log(), 0.0)


def odpo_losses(log_ratio_gaps: Tensor, offset: Tensor, *, beta: float) -> Tensor:
    """The loss −log σ(β·Δ − offset) of each pair; offset 0 is dpo.

    Source: Amini et al. 2024, arXiv 2402.10571, §3.

    Args:
        log_ratio_gaps: Δ = log(π/π_ref)(y_w) − log(π/π_ref)(y_l) in nats, of any shape.
        offset: of the same shape.
        beta: β.
    """
    return -logsigmoid(beta * log_ratio_gaps - offset)
