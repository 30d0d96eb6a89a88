"""The loss of supervised fine-tuning, and of the pretraining term of PPO-ptx."""

from __future__ import annotations

from torch import Tensor

from stages.functional.masking import Aggregation, aggregate


def sft_loss(
    logp: Tensor, mask: Tensor, *, aggregation: Aggregation, denominator: Tensor
) -> Tensor:
    """Negative log-likelihood of the target tokens.

        ℓ_t = −logp(y_t | x, y_<t)

    Targets are the tokens of the response, its end token among them. Source: Ouyang et al. 2022,
    §3.5 and appendix C.1; they print no formula.

    Args:
        logp: ``[B, T]`` log-probabilities of the targets, nats.
        mask: ``[B, T]``.
        aggregation: how token losses become one number.
        denominator: ``loss_denominator`` of the whole optimiser batch.

    Returns:
        A scalar: this micro-batch's share of the loss.
    """
    return aggregate(-logp, mask, aggregation=aggregation, denominator=denominator)
