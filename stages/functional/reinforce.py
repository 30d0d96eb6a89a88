"""REINFORCE on whole answers: each is one action, whose log-probability its reward multiplies."""

from __future__ import annotations

from torch import Tensor

from stages.functional.masking import Aggregation, aggregate, masked


def reinforce_loss(
    logp_new: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "seq_sum",
    denominator: Tensor,
) -> Tensor:
    """The policy gradient of a bandit, negated.

        L = −mean over answers of A·Σ_t log π(y_t | x, y_<t)

    Sources: Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740, §2 (whole answers, rloo).

    Args:
        logp_new: ``[B, T]`` of the policy being trained, nats.
        advantages: ``[B]``; constants.
        mask: ``[B, T]``.
        aggregation: ``seq_sum`` as above, or another average of −A·log π over the tokens.
        denominator: ``loss_denominator`` of the whole optimiser batch.

    Returns:
        A scalar: this micro-batch's share of the loss.
    """
    losses = -advantages[:, None] * masked(logp_new, mask)
    return aggregate(losses, mask, aggregation=aggregation, denominator=denominator)
