"""Figures of a policy's sampled answers, counted while the answers pass by."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages.functional.judged import best_of_n_kl, expected_best
from stages.models.generate import Answer
from stages.seeds import seed_of

GRAMS = (1, 2, 3)
ID_BITS = 21  # three ids of less than two million fit into 64 bits
RESAMPLES = 1000
DRAWN = 1 << 20  # prompts drawn at once for them
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and the bounds of its interval; no bounds where there is one prompt alone."""

    mean: float
    low: float | None
    high: float | None


@dataclass
class Diversity:
    """How many of the n-grams of some answers are different ones, for each n.

    Attributes:
        seen: n → the different n-grams, sorted, each packed into one number.
        total: n → all n-grams.
    """

    seen: dict[int, np.ndarray] = field(
        default_factory=lambda: {n: np.empty(0, np.int64) for n in GRAMS}
    )
    total: dict[int, int] = field(default_factory=lambda: dict.fromkeys(GRAMS, 0))

    def add(self, answers: Sequence[np.ndarray]) -> None:
        """Count the n-grams of answers, given as ids."""
        for n in GRAMS:
            grams = np.concatenate([np.empty(0, np.int64), *(_grams(ids, n) for ids in answers)])
            self.total[n] += len(grams)
            self.seen[n] = np.union1d(self.seen[n], grams)

    def shares(self) -> dict[str, float | None]:
        """distinct-n: n → different n-grams over all of them (Li et al. 2016); None without any."""
        return {
            str(n): len(self.seen[n]) / all_ if all_ else None for n, all_ in self.total.items()
        }


@dataclass
class Sampled:
    """K answers to each prompt.

    Attributes:
        k: answers per prompt.
        scores: of each answer, prompt by prompt; empty where nothing scores them.
        ratios: log π(y|x) less that of the other policy; empty where there is none.
        diversity: of their tokens, stop tokens left out.
        answers, tokens, ended: how many; the tokens with their stop tokens.
    """

    k: int
    scores: array[float] = field(default_factory=lambda: array("d"))
    ratios: array[float] = field(default_factory=lambda: array("d"))
    diversity: Diversity = field(default_factory=Diversity)
    answers: int = 0
    tokens: int = 0
    ended: int = 0

    def add(self, rows: Iterable[Sequence[Answer]]) -> None:
        """Count the answers to some prompts."""
        answers = [answer for row in rows for answer in row]
        self.answers += len(answers)
        self.tokens += sum(len(answer.ids) for answer in answers)
        self.ended += sum(answer.ended for answer in answers)
        self.diversity.add([a.ids[:-1] if a.ended else a.ids for a in answers])

    def table(self) -> Tensor:
        """``[P, K]`` scores in float64."""
        return torch.from_numpy(np.array(self.scores).reshape(-1, self.k))

    def kl(self) -> float | None:
        """Mean over the answers of their log-ratio, nats per answer."""
        return float(np.mean(self.ratios)) if self.ratios else None

    def figures(self, sizes: Sequence[int], seed: int) -> dict[str, Any]:
        """All figures that the answers have by themselves.

        Args:
            sizes: the n of the best-of-n curve.
            seed: of the bootstrap.
        """
        interval = self.interval(seed)
        return {
            "score": None if interval is None else interval._asdict(),
            "length": self.tokens / self.answers,
            "distinct_n": self.diversity.shares(),
            "ended": self.ended / self.answers,
            "best_of_n": self.best_of(sizes),
        }

    def interval(self, seed: int) -> Interval | None:
        """The mean score and its interval."""
        return mean_interval(self.table().mean(dim=1).numpy(), seed=seed) if self.scores else None

    def best_of(self, sizes: Sequence[int]) -> list[dict[str, float]] | None:
        """What the best of n answers scores, and its KL from the policy, for each n."""
        if not self.scores:
            return None
        table = self.table()
        return [
            {"n": n, "score": float(expected_best(table, n=n).mean()), "kl": best_of_n_kl(n)}
            for n in sizes
        ]


def mean_interval(values: np.ndarray, *, seed: int) -> Interval:
    """The mean over prompts with its 95 % percentile bootstrap interval.

    Prompts are drawn anew with replacement, each with all its answers, for answers to one prompt
    are not independent. Source: Efron and Tibshirani 1993, §13.3.

    Args:
        values: ``[P]`` mean of each prompt's answers.
        seed: equal seeds give equal intervals.
    """
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, None, None)
    generator = np.random.Generator(np.random.PCG64(seed_of(seed, "bootstrap")))
    side_by_side = max(1, DRAWN // len(values))
    sizes = [min(side_by_side, RESAMPLES - n) for n in range(0, RESAMPLES, side_by_side)]
    drawn = (generator.integers(len(values), size=(size, len(values))) for size in sizes)
    means = np.concatenate([values[rows].mean(axis=1) for rows in drawn])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))


def _grams(ids: np.ndarray, n: int) -> np.ndarray:
    """Each run of n neighbouring ids as one number."""
    if len(ids) < n:
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.int64), n)
    return windows @ (1 << (ID_BITS * np.arange(n, dtype=np.int64)))
