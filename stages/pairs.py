"""What a reward model's scores say of the pairs in held-out rankings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import NamedTuple

import numpy as np
import torch

from stages.batch import Group
from stages.functional.ranking import Calibration, pair_calibration


class Judgement(NamedTuple):
    """Figures by metric name, and the bins of the calibration: n, confidence, accuracy."""

    figures: dict[str, float]
    bins: list[dict[str, float]]


def judge(held_out: Iterable[Group], tables: Iterable[np.ndarray]) -> Judgement:
    """Accuracy overall and by K, margin, log loss and calibration over all strict pairs.

    Beside the accuracy stands that of "the longer answer wins", the judge that knows nothing.

    Args:
        held_out: rankings.
        tables: the K scores of each.
    """
    right: dict[int, list[bool]] = {}
    longer: list[bool] = []
    gaps: list[float] = []
    for group, table in zip(held_out, tables, strict=True):
        for better, worse in strict_pairs(group):
            gaps.append(float(table[better] - table[worse]))
            right.setdefault(len(group.answers), []).append(gaps[-1] > 0)
            longer.append(len(group.answers[better]) > len(group.answers[worse]))
    if not gaps:
        return Judgement({}, [])
    calibration = pair_calibration(torch.tensor(gaps, dtype=torch.float64))
    figures = {
        "eval/loss": float(calibration.nll),
        "eval/accuracy": float(np.mean([ok for oks in right.values() for ok in oks])),
        "eval/margin": float(np.mean(gaps)),
        "eval/ece": float(calibration.ece),
        "eval/length_accuracy": float(np.mean(longer)),
        **{f"eval/accuracy_k{k}": float(np.mean(oks)) for k, oks in sorted(right.items())},
    }
    return Judgement(figures, _bins(calibration))


def strict_pairs(group: Group) -> Iterator[tuple[int, int]]:
    """The pairs (preferred, other) of unlike rank."""
    ranks = group.ranks
    return ((i, j) for i, j in permutations(range(len(ranks)), 2) if ranks[i] < ranks[j])


def _bins(calibration: Calibration) -> list[dict[str, float]]:
    """The bins that hold a pair, as JSON can hold them."""
    rows = zip(*(part.tolist() for part in calibration.bins), strict=True)
    names = calibration.bins._fields
    return [dict(zip(names, row, strict=True)) for row in rows if row[0] > 0]
