"""From a loss for each pair of a prompt's answers to the loss of a batch, weighted as in ranking.

A table ``[P, K, K]`` has its entry (w, l) for answer w preferred to answer l.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stages.functional.masking import divide, masked, masked_sum, require_same_shape
from stages.functional.ranking import (
    PairDenominator,
    Reduction,
    Ties,
    pair_counts,
    pair_weights,
    strict_pairs,
)


class RewardStatistics(NamedTuple):
    """Sums over strictly ranked pairs, which add over batches."""

    pairs: Tensor
    correct: Tensor
    margin: Tensor
    chosen: Tensor
    rejected: Tensor


def pair_table(values: Tensor, mask: Tensor) -> Tensor:
    """v_w − v_l of every pair, ``[P, K, K]``; an answer that is none has the value 0.

    Args:
        values: ``[P, K]``, such as log-ratios.
        mask: ``[P, K]``, True = a real answer.
    """
    require_same_shape(mask, values=values)
    values = masked(values, mask)
    return values[:, :, None] - values[:, None, :]


def pairwise_loss(
    losses: Tensor,
    ranks: Tensor,
    mask: Tensor,
    *,
    ties: Ties,
    pair_denominator: PairDenominator,
    reduction: Reduction,
    denominator: Tensor,
) -> Tensor:
    """The losses of the pairs that are kept, averaged as Ouyang et al. 2022, Eq. 1, average them.

        L = mean over prompts of (1/|P|) Σ_{(w,l)∈P} ℓ_wl

    Args:
        losses: ``[P, K, K]``, a loss for each pair (w, l); entries of no pair may be anything.
        ranks: ``[P, K]``, 1 = best.
        mask: ``[P, K]``, True = a real answer.
        ties: drop them, or keep each with half of both its orders.
        pair_denominator: |P| is the number of pairs kept, or K(K−1)/2.
        reduction: ``prompt_mean``, or ``pair_mean`` of all pairs together.
        denominator: ``ranking_denominator`` summed over the whole optimiser batch.

    Returns:
        A scalar: this micro-batch's share of the loss. Prompts without a pair add nothing.
    """
    weights = pair_weights(ranks, mask, ties=ties).to(losses.dtype)
    sums = (weights * masked(losses, weights > 0)).sum(dim=(1, 2))
    if reduction == "prompt_mean":
        counts = pair_counts(ranks, mask, ties=ties, pair_denominator=pair_denominator)
        sums = divide(sums, counts)
    return divide(sums.sum(), denominator)


def reward_statistics(rewards: Tensor, ranks: Tensor, mask: Tensor) -> RewardStatistics:
    """What accuracy, margin and the two mean rewards are made of, over strictly ranked pairs.

    A pair is correct where its preferred answer has the larger reward: equal ones are wrong.

    Args:
        rewards: ``[P, K]`` implicit rewards.
        ranks: ``[P, K]``.
        mask: ``[P, K]``.
    """
    strict = strict_pairs(ranks, mask)
    table = pair_table(rewards, mask)
    known = masked(rewards, mask)
    return RewardStatistics(
        strict.sum().to(rewards.dtype),
        (strict & (table > 0)).sum().to(rewards.dtype),
        masked_sum(table, strict),
        masked_sum(known[:, :, None].expand_as(table), strict),
        masked_sum(known[:, None, :].expand_as(table), strict),
    )


def per_token(sums: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """Sums over the tokens of each answer as means, ``[P, K]``; 0 where there is no answer.

    Args:
        sums: ``[P, K]``, such as log-probabilities of whole answers.
        lengths: ``[P, K]`` tokens of each answer, the end token included.
        mask: ``[P, K]``, True = a real answer.
    """
    require_same_shape(mask, sums=sums, lengths=lengths)
    return masked(sums, mask) / torch.where(mask, lengths, 1).clamp(min=1)
