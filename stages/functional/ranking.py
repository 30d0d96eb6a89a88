"""The reward model's loss on K ranked answers of a prompt, its metrics and its normalisation.

Rank 1 is best and equal ranks are ties. A pair ``[P, K, K]`` is written (w, l): answer w is
preferred to answer l. Every answer has one score, however many pairs it stands in.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from stages.functional.masking import divide, masked, masked_moments, masked_sum, require_same_shape

Ties = Literal["drop", "half"]
PairDenominator = Literal["pairs", "choose2"]
Reduction = Literal["prompt_mean", "pair_mean"]


class PairStatistics(NamedTuple):
    """Sums over strictly ranked pairs, which add over batches; index K of ``…_by_k`` is that K."""

    pairs: Tensor
    correct: Tensor
    margin: Tensor
    nll: Tensor
    pairs_by_k: Tensor
    correct_by_k: Tensor


class Bins(NamedTuple):
    """Reliability bins, one entry each: pairs in it, their mean confidence, the share correct."""

    n: Tensor
    confidence: Tensor
    accuracy: Tensor


class Calibration(NamedTuple):
    """Reliability bins, expected calibration error and log loss in nats per pair."""

    bins: Bins
    ece: Tensor
    nll: Tensor


class Normalisation(NamedTuple):
    """score = (raw − mean) / std."""

    mean: Tensor
    std: Tensor


def ranking_loss(
    scores: Tensor,
    ranks: Tensor,
    mask: Tensor,
    *,
    margin: float | Tensor = 0.0,
    ties: Ties = "drop",
    pair_denominator: PairDenominator = "pairs",
    reduction: Reduction = "prompt_mean",
    center_coef: float = 0.0,
    denominator: Tensor,
) -> Tensor:
    """All pairs of each prompt's K answers in one loss.

        L_p = (1/|P|) Σ_{(w,l)∈P} [−log σ(s_w − s_l − m_wl) + c·(s_w + s_l)²]

    and the mean of L_p over prompts, or with ``pair_mean`` of all pairs together. A tie kept by
    ``half`` adds ½[−log σ(d) − log σ(−d)]. K = 2 is the Bradley–Terry loss. Sources: Ouyang et al.
    2022, §3.5, Eq. 1; margin: Touvron et al. 2023, arXiv 2307.09288, Eq. 2; centring: Eisenstein
    et al. 2023, arXiv 2312.09244.

    Args:
        scores: ``[P, K]``.
        ranks: ``[P, K]``, 1 = best.
        mask: ``[P, K]``, True = a real answer.
        margin: m, a number or ``[P, K, K]`` with (preferred, other); no tie has one.
        ties: drop them, or keep each with target one half.
        pair_denominator: |P| is the number of pairs kept, or K(K−1)/2.
        reduction: ``prompt_mean`` or ``pair_mean``.
        center_coef: c.
        denominator: ``ranking_denominator`` summed over the whole optimiser batch.

    Returns:
        A scalar: this micro-batch's share of the loss. Prompts without a pair add nothing.
    """
    sums = _pair_sums(scores, ranks, mask, margin=margin, ties=ties, center_coef=center_coef)
    if reduction == "prompt_mean":
        sums = divide(sums, pair_counts(ranks, mask, ties=ties, pair_denominator=pair_denominator))
    return divide(sums.sum(), denominator)


def ranking_denominator(
    ranks: Tensor,
    mask: Tensor,
    *,
    ties: Ties,
    pair_denominator: PairDenominator,
    reduction: Reduction,
) -> Tensor:
    """What ``ranking_loss`` is divided by; it adds over micro-batches.

    ``prompt_mean``: the number of prompts that have a pair. ``pair_mean``: the sum of their |P|.

    Args:
        ranks: ``[P, K]``.
        mask: ``[P, K]``.
        ties: as in ``ranking_loss``.
        pair_denominator: as in ``ranking_loss``.
        reduction: as in ``ranking_loss``.

    Returns:
        A float scalar.
    """
    counts = pair_counts(ranks, mask, ties=ties, pair_denominator=pair_denominator)
    return (counts > 0).sum().float() if reduction == "prompt_mean" else counts.sum()


def per_prompt_loss(
    scores: Tensor,
    ranks: Tensor,
    mask: Tensor,
    *,
    margin: float | Tensor = 0.0,
    ties: Ties = "drop",
    pair_denominator: PairDenominator = "pairs",
) -> Tensor:
    """L_p of each prompt without the centring term, ``[P]``; NaN where a prompt has no pair."""
    sums = _pair_sums(scores, ranks, mask, margin=margin, ties=ties, center_coef=0.0)
    return sums / pair_counts(ranks, mask, ties=ties, pair_denominator=pair_denominator)


def strict_pairs(ranks: Tensor, mask: Tensor) -> Tensor:
    """The pairs (w, l) of real answers with rank w < rank l, ``[P, K, K]`` bool."""
    return _real_pairs(ranks, mask) & (ranks[:, :, None] < ranks[:, None, :])


def rank_margins(ranks: Tensor, *, per_rank: float) -> Tensor:
    """A margin that grows with the difference of the ranks, ``[P, K, K]`` (preferred, other)."""
    return per_rank * (ranks[:, None, :] - ranks[:, :, None])


def pair_statistics(
    scores: Tensor, ranks: Tensor, mask: Tensor, *, max_answers: int | None = None
) -> PairStatistics:
    """What accuracy, mean margin and log loss are made of, over strictly ranked pairs.

    A pair is correct where s_w − s_l > 0: equal scores are wrong. No margin m enters.

    Args:
        scores: ``[P, K]``.
        ranks: ``[P, K]``.
        mask: ``[P, K]``.
        max_answers: the largest K to count by, so that batches of unlike width add; None = K.

    Returns:
        Four scalars and two tensors ``[max_answers + 1]``.
    """
    require_same_shape(mask, scores=scores, ranks=ranks)
    strict = strict_pairs(ranks, mask)
    difference = _differences(masked(scores, mask))
    correct = strict & (difference > 0)
    width = (mask.shape[1] if max_answers is None else max_answers) + 1
    of_k = one_hot(mask.sum(dim=1), width).to(scores.dtype)  # [P, width]
    return PairStatistics(
        strict.sum().to(scores.dtype),
        correct.sum().to(scores.dtype),
        masked_sum(difference, strict),
        masked_sum(-logsigmoid(difference), strict),
        strict.sum(dim=(1, 2)).to(scores.dtype) @ of_k,
        correct.sum(dim=(1, 2)).to(scores.dtype) @ of_k,
    )


def pair_calibration(diffs: Tensor, *, bins: int = 10) -> Calibration:
    """Whether σ(|d|), the confidence in a pair's order, is the share of pairs ordered right.

    Bins of equal width on [0.5, 1]; ECE = Σ_bins (n/N)·|accuracy − confidence|.

    Args:
        diffs: ``[N]`` score differences, preferred minus other.
        bins: number of bins.

    Returns:
        Calibration; the means of an empty bin are NaN, and so are ``ece`` and ``nll`` for N = 0.
    """
    confidence = torch.sigmoid(diffs.abs())
    index = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    empty = diffs.new_zeros(bins)
    n = empty.index_add(0, index, torch.ones_like(diffs))
    confident = empty.index_add(0, index, confidence)
    correct = empty.index_add(0, index, (diffs > 0).to(diffs.dtype))
    ece = (correct - confident).abs().sum() / diffs.numel()
    return Calibration(Bins(n, confident / n, correct / n), ece, -logsigmoid(diffs).mean())


def normalise_by_mean(scores: Tensor) -> Normalisation:
    """The shift that gives demonstrations a mean score of 0: (mean, 1).

    The loss does not see a constant shift, so it is set afterwards. Source: Ouyang et al. 2022,
    §3.5.

    Args:
        scores: ``[N]`` raw scores of demonstrations.

    Returns:
        Mean and std.
    """
    mean, _ = masked_moments(scores, torch.ones_like(scores, dtype=torch.bool))
    return Normalisation(mean, torch.ones_like(mean))


def normalise_by_moments(scores: Tensor) -> Normalisation:
    """Shift and scale that give samples of a policy mean 0 and variance 1 (population).

    In the terms of Ziegler et al. 2019, code ``rewards.py``: gain = 1/std, bias = −mean/std.

    Args:
        scores: ``[N]`` raw scores of samples.

    Returns:
        Mean and std; std is 1 where all scores are equal.
    """
    mean, var = masked_moments(scores, torch.ones_like(scores, dtype=torch.bool))
    return Normalisation(mean, torch.where(var > 0, var.sqrt(), 1.0))


def _real_pairs(ranks: Tensor, mask: Tensor) -> Tensor:
    require_same_shape(mask, ranks=ranks)
    return mask[:, :, None] & mask[:, None, :]


def pair_weights(ranks: Tensor, mask: Tensor, *, ties: Ties) -> Tensor:
    """``[P, K, K]``: 1 for a strict pair; ½ for each of the two orders of a tie that is kept."""
    strict = strict_pairs(ranks, mask).float()
    if ties == "drop":
        return strict
    itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
    tied = _real_pairs(ranks, mask) & (ranks[:, :, None] == ranks[:, None, :]) & ~itself
    return strict + 0.5 * tied


def pair_counts(
    ranks: Tensor, mask: Tensor, *, ties: Ties, pair_denominator: PairDenominator
) -> Tensor:
    """|P| of each prompt, ``[P]``; 0 where no pair is kept, also with ``choose2``."""
    kept = pair_weights(ranks, mask, ties=ties).sum(dim=(1, 2))
    if pair_denominator == "pairs":
        return kept
    k = mask.sum(dim=1)
    return torch.where(kept > 0, k * (k - 1) / 2, 0.0)


def _pair_sums(
    scores: Tensor,
    ranks: Tensor,
    mask: Tensor,
    *,
    margin: float | Tensor,
    ties: Ties,
    center_coef: float,
) -> Tensor:
    """Σ over the pairs of each prompt, ``[P]``."""
    require_same_shape(mask, scores=scores)
    scores = masked(scores, mask)
    margins = torch.as_tensor(margin, dtype=scores.dtype, device=scores.device)
    differences = _differences(scores)
    if margins.dim() and margins.shape != differences.shape:
        raise ValueError(f"margin has shape {tuple(margins.shape)}, not {tuple(differences.shape)}")
    losses = -logsigmoid(differences - masked(margins, strict_pairs(ranks, mask)))
    if center_coef:
        losses = losses + center_coef * (scores[:, :, None] + scores[:, None, :]).square()
    return (pair_weights(ranks, mask, ties=ties) * losses).sum(dim=(1, 2))


def _differences(scores: Tensor) -> Tensor:
    """s_w − s_l, ``[P, K, K]``."""
    return scores[:, :, None] - scores[:, None, :]
