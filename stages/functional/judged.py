"""What scores say of answers: who wins, what the best of n is worth, what a judge misses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stages.functional.masking import divide, masked, require_same_shape


def best_of_n_kl(n: int) -> float:
    """KL from the policy to the best of n of its own answers: log n − (n − 1)/n, in nats.

    Exact where no two answers score alike, else an upper bound (Beirami et al. 2024, arXiv
    2401.01879). Source: Stiennon et al. 2020, App. G.3.
    """
    return math.log(n) - (n - 1) / n


def expected_best(judged: Tensor, *, n: int) -> Tensor:
    """The expected score of the best of n answers, from K ≥ n of them, without bias.

    Args:
        judged: ``[..., K]`` scores of independent answers to a prompt.
        n: 1 ≤ n ≤ K.

    Returns:
        ``[...]``, in units of the score.
    """
    return expected_choice(judged, judged, n=n)


def expected_choice(judged: Tensor, true: Tensor, *, n: int) -> Tensor:
    """The expected true value of the answer that a judge likes best among n, without bias.

        E = Σ_{i=n…K} C(i−1, n−1)/C(K, n) · v_(i),      s_(1) ≤ … ≤ s_(K)

    with v_(i) the value of the answer of score s_(i): the mean over all subsets of n of the K
    answers. Source: Nakano et al. 2021, arXiv 2112.09332, App. I.

    Args:
        judged: ``[..., K]`` scores of independent answers to a prompt.
        true: ``[..., K]`` their true values.
        n: 1 ≤ n ≤ K.

    Returns:
        ``[...]``, in units of the value.
    """
    k = judged.shape[-1]
    if not 1 <= n <= k:
        raise ValueError(f"the best of {n} cannot be told from {k} answers")
    subsets = math.comb(k, n)
    weights = true.new_tensor([math.comb(i, n - 1) / subsets for i in range(k)])
    return true.gather(-1, judged.argsort(dim=-1)) @ weights


def selection_regret(judged: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """How much is lost by taking the answer that a judge puts first: max true − true of its choice.

    Answers that share the highest score are chosen with equal probability.

    Args:
        judged: ``[P, K]`` scores of the judge.
        true: ``[P, K]`` what the answers are worth.
        mask: ``[P, K]``, True = a real answer.

    Returns:
        ``[P]`` ≥ 0, in units of ``true``; 0 where a prompt has no answer.
    """
    require_same_shape(mask, judged=judged, true=true)
    lowest = -torch.inf
    chosen = mask & (judged == judged.where(mask, lowest).amax(dim=1, keepdim=True))
    taken = divide(masked(true, chosen).sum(dim=1), chosen.sum(dim=1))
    best = true.where(mask, lowest).amax(dim=1)
    return torch.where(mask.any(dim=1), best - taken, 0.0)


def rank_utility(ranks: Tensor, mask: Tensor) -> Tensor:
    """The share of the other answers that an answer is ranked above, a tie counting half.

        u_i = Σ_{j≠i} ([rank_i < rank_j] + ½·[rank_i = rank_j]) / (K − 1)

    Without ties it is (K − place)/(K − 1): 1 for the best answer, 0 for the worst.

    Args:
        ranks: ``[P, K]``, 1 = best.
        mask: ``[P, K]``, True = a real answer.

    Returns:
        ``[P, K]`` float64 in [0, 1]; 0 where masked and where there is no other answer.
    """
    require_same_shape(mask, ranks=ranks)
    real = mask[:, :, None] & mask[:, None, :]
    above = real & (ranks[:, :, None] < ranks[:, None, :])
    level = real & (ranks[:, :, None] == ranks[:, None, :])
    others = (mask.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    # An answer is level with itself, which is no tie.
    won = above.sum(dim=2).double() + 0.5 * (level.sum(dim=2) - mask.long())
    return torch.where(mask, won / others, 0.0)


def win_rate(judged: Tensor, other: Tensor) -> Tensor:
    """The share of answers that score higher than their counterparts, ties counting half.

    Args:
        judged: scores of the answers.
        other: scores of their counterparts, same shape.

    Returns:
        A scalar in [0, 1]; NaN without answers.
    """
    if judged.shape != other.shape:
        raise ValueError(f"shapes {tuple(judged.shape)} and {tuple(other.shape)} differ")
    return torch.where(judged == other, 0.5, (judged > other).to(judged.dtype)).mean()
