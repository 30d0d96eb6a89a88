"""What a reward model's scores say of the pairs in rankings that it did not learn from."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stages.batch import Group
from stages.functional.judged import rank_utility, selection_regret
from stages.functional.ranking import Calibration, pair_calibration


class Judgement(NamedTuple):
    """Figures by metric name, and the bins of the calibration: n, confidence, accuracy."""

    figures: dict[str, float]
    bins: list[dict[str, float]]


@dataclass
class Accuracies:
    """Pairs that are ordered right, by some name of their ranking.

    Attributes:
        counts: name → pairs ordered right, and all pairs.
    """

    counts: dict[Any, list[int]] = field(default_factory=dict)

    def add(self, name: Any, gaps: Iterable[float]) -> None:
        """Count the pairs of a ranking; equal scores are wrong. One without a name is left out."""
        if name is None:
            return
        count = self.counts.setdefault(name, [0, 0])
        for gap in gaps:
            count[0] += gap > 0
            count[1] += 1

    def shares(self) -> dict[Any, float]:
        """Name → share of its pairs that are ordered right; those with most pairs come first."""
        ordered = sorted(self.counts.items(), key=lambda entry: -entry[1][1])
        return {name: right / pairs for name, (right, pairs) in ordered}


@dataclass
class Verdicts:
    """Strict pairs and their scores, counted while the rankings pass by; 8 bytes of each are kept.

    Attributes:
        gaps: score differences, preferred minus other.
        longer: pairs whose preferred answer has more tokens.
        by_k: accuracy by the number of ranked answers.
    """

    gaps: array[float] = field(default_factory=lambda: array("d"))
    longer: int = 0
    by_k: Accuracies = field(default_factory=Accuracies)

    def add(self, group: Group, table: np.ndarray) -> list[float]:
        """Count a ranking with its K scores.

        Returns:
            The score differences of its pairs.
        """
        pairs, lengths = list(strict_pairs(group)), [len(answer) for answer in group.answers]
        gaps = [float(table[better] - table[worse]) for better, worse in pairs]
        self.gaps.extend(gaps)
        self.longer += sum(lengths[better] > lengths[worse] for better, worse in pairs)
        if gaps:
            self.by_k.add(len(lengths), gaps)
        return gaps

    def judgement(self) -> Judgement:
        """Accuracy overall and by K, margin, log loss and calibration over all strict pairs.

        Beside the accuracy stands that of "the longer answer wins", the judge that knows nothing.
        """
        if not self.gaps:
            return Judgement({}, [])
        gaps = np.array(self.gaps)
        calibration = pair_calibration(torch.from_numpy(gaps))
        figures = {
            "eval/loss": float(calibration.nll),
            "eval/accuracy": float(np.mean(gaps > 0)),
            "eval/margin": float(np.mean(gaps)),
            "eval/ece": float(calibration.ece),
            "eval/length_accuracy": self.longer / len(gaps),
            **{f"eval/accuracy_k{k}": ok for k, ok in sorted(self.by_k.shares().items())},
        }
        return Judgement(figures, _bins(calibration))


@dataclass
class Regret:
    """What is lost where the answer with the highest score is taken, summed over rankings.

    The worth of an answer is its own score in the file, or the share of the other answers that it
    is ranked above; the latter as soon as a ranking has not a score for every ranked answer.

    Attributes:
        rankings: how many.
        in_scores: loss in units of the file's scores.
        in_ranks: loss in shares of the other answers.
        scored: whether every ranking has scores.
    """

    rankings: int = 0
    in_scores: float = 0.0
    in_ranks: float = 0.0
    scored: bool = True

    def add(
        self,
        groups: Sequence[Group],
        tables: Sequence[np.ndarray],
        scores: Sequence[tuple[float, ...] | None],
    ) -> None:
        """Count rankings with what the judge says of their answers, and what the file says."""
        judged, ranks = _padded(tables), _padded([group.ranks for group in groups])
        sizes = torch.tensor([len(table) for table in tables])
        mask = torch.arange(judged.shape[1]) < sizes[:, None]
        self.rankings += len(groups)
        self.in_ranks += float(selection_regret(judged, rank_utility(ranks, mask), mask).sum())
        known = [row for row in scores if row is not None]
        self.scored &= len(known) == len(groups)
        if self.scored:
            self.in_scores += float(selection_regret(judged, _padded(known), mask).sum())

    def mean(self) -> float:
        """Mean over the rankings."""
        return (self.in_scores if self.scored else self.in_ranks) / self.rankings


def judge(held_out: Iterable[Group], tables: Iterable[np.ndarray]) -> Judgement:
    """The figures of rankings with their scores.

    Args:
        held_out: rankings.
        tables: the K scores of each.
    """
    verdicts = Verdicts()
    for group, table in zip(held_out, tables, strict=True):
        verdicts.add(group, table)
    return verdicts.judgement()


def strict_pairs(group: Group) -> Iterator[tuple[int, int]]:
    """The pairs (preferred, other) of unlike rank."""
    ranks = group.ranks
    return ((i, j) for i, j in permutations(range(len(ranks)), 2) if ranks[i] < ranks[j])


def _padded(rows: Iterable[Sequence[float] | np.ndarray]) -> Tensor:
    """Rows of unequal length as one tensor in float64, filled with 0."""
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


def _bins(calibration: Calibration) -> list[dict[str, float]]:
    """The bins that hold a pair, as JSON can hold them."""
    rows = zip(*(part.tolist() for part in calibration.bins), strict=True)
    names = calibration.bins._fields
    return [dict(zip(names, row, strict=True)) for row in rows if row[0] > 0]
