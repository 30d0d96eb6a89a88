"""Rounds in which two sides take turns, and which of them count.

A round during which others used the machine is repeated, up to a bound; what could not be had clean
is used and marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

LIMIT = 0.05  # share of the CPU time that others may have in a clean round


@dataclass(frozen=True)
class Reading:
    """What a child process reports of the work it did.

    Attributes:
        seconds: the work alone.
        mib: peak of the resident memory.
        import_mib: resident memory once the libraries were imported.
        disturbed: share of the CPU time that others had; None where the system does not tell.
        learned: what came out, such as the loss.
        steps: optimiser steps taken.
        tokens: that the work has.
        flops: that the work needs at least.
        peak: FLOP/s of a matrix product, read beside the work.
    """

    seconds: float
    mib: float = 0.0
    import_mib: float = 0.0
    disturbed: float | None = None
    learned: dict[str, Any] | None = None
    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None
    peak: float | None = None


class UnequalWork(Exception):
    """One side took more optimiser steps than the other, so that nothing can be compared."""


class Round(NamedTuple):
    """The two sides, one straight after the other."""

    peer: Reading
    ours: Reading

    @property
    def disturbed(self) -> float:
        """The larger disturbance of the two; 0 where the system does not tell."""
        return max(self.peer.disturbed or 0.0, self.ours.disturbed or 0.0)

    @property
    def clean(self) -> bool:
        """Whether both sides had the machine for themselves."""
        return self.disturbed <= LIMIT

    def require_equal_work(self) -> Round:
        """The same round, both sides of which took as many optimiser steps.

        Raises:
            UnequalWork: they did not.
        """
        if self.peer.steps != self.ours.steps:
            raise UnequalWork(f"the peer took {self.peer.steps} steps, rlhf {self.ours.steps}")
        return self


Side = Callable[[], Reading]


def alternate(peer: Side, ours: Side, *, wanted: int, spare: int) -> list[Round]:
    """Run rounds until enough of them are clean; who goes first changes with each round.

    Args:
        peer: runs the peer once.
        ours: runs this project once.
        wanted: clean rounds.
        spare: how many more may be tried.

    Returns:
        All rounds, in their order.

    Raises:
        UnequalWork: the sides took unlike numbers of optimiser steps.
    """
    done: list[Round] = []
    while len(done) < wanted + spare and sum(r.clean for r in done) < wanted:
        if len(done) % 2 == 0:
            first = peer()
            done.append(Round(first, ours()).require_equal_work())
        else:
            first = ours()
            done.append(Round(peer(), first).require_equal_work())
    return done


def counted(rounds: Sequence[Round], wanted: int) -> list[Round]:
    """The clean rounds, and the least disturbed of the others where those are too few."""
    clean = [r for r in rounds if r.clean]
    dirty = sorted((r for r in rounds if not r.clean), key=lambda r: r.disturbed)
    return clean + dirty[: max(0, wanted - len(clean))]


class Spread(NamedTuple):
    """Median and range."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and range of some readings."""
    return Spread(median(values), min(values), max(values))
