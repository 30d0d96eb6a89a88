"""Simple preference optimisation: mean log-probability as reward, with a target margin."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def simpo_losses(mean_logp_gaps: Tensor, *, beta: float, gamma: float) -> Tensor:
    """The loss −log σ(β·(mean log π(y_w) − mean log π(y_l)) − γ) of each pair.

    Source: Meng et al. 2024, arXiv 2405.14734, Eq. 6. γ is the margin itself; the authors' code
    asks for γ/β.

    Args:
        mean_logp_gaps: difference of the mean log-probabilities per token in nats, of any shape.
        beta: β.
        gamma: γ, in units of the implicit reward.
    """
    return -logsigmoid(beta * mean_logp_gaps - gamma)
