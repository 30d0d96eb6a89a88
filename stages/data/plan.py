"""The order of the records and how they are cut: pure functions of counters, nothing to restore."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from stages.seeds import seed_of


def order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of n records in one epoch (read-only)."""
    return shuffled(n, seed, "order", epoch)


@lru_cache(maxsize=8)
def shuffled(n: int, seed: int, *key: str | int) -> np.ndarray:
    """The permutation of n things that belongs to a key (read-only)."""
    generator = np.random.Generator(np.random.PCG64(seed_of(seed, *key)))
    permutation = generator.permutation(n)
    permutation.setflags(write=False)
    return permutation


def stream(n: int, seed: int, start: int, count: int, *, name: str = "order") -> np.ndarray:
    """Records ``start … start + count − 1`` of an endless stream that is reordered every epoch.

    Args:
        n: number of records.
        seed: the run's seed.
        start: how many were taken before.
        count: how many are taken now; more than n repeat.
        name: which stream.

    Returns:
        Their indices.
    """
    positions = [divmod(p, n) for p in range(start, start + count)]
    return np.array([shuffled(n, seed, name, e)[i] for e, i in positions], dtype=np.int64)


def optimiser_batch(n: int, batch_size: int, seed: int, step: int) -> tuple[int, np.ndarray]:
    """The records of one optimiser step.

    An epoch has ⌈n / batch_size⌉ steps; its last one takes what is left.

    Args:
        n: number of records.
        batch_size: records per optimiser step over all processes.
        seed: the run's seed.
        step: optimiser step, counted from 0.

    Returns:
        The epoch, counted from 0, and the indices of the step's records.
    """
    epoch, position = divmod(step, steps_per_epoch(n, batch_size))
    start = position * batch_size
    return epoch, order(n, seed, epoch)[start : start + batch_size]


def steps_per_epoch(n: int, batch_size: int) -> int:
    """⌈n / batch_size⌉ optimiser steps."""
    return -(-n // batch_size)


def documents_per_step(batch_size: int, share: float) -> int:
    """Pretraining documents among the records of an optimiser batch: at least one, never all."""
    return min(batch_size - 1, max(1, round(batch_size * share)))


def micro_batches(lengths: Sequence[int] | np.ndarray, budget: int) -> list[list[int]]:
    """Cut one optimiser batch into micro-batches of at most ``budget`` tokens, longest first.

    An example over the budget makes a micro-batch of its own.

    Args:
        lengths: tokens of each example.
        budget: tokens per micro-batch.

    Returns:
        Positions in ``lengths``, each once.
    """
    batches: list[list[int]] = []
    room = 0
    for n in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable"):
        size = int(lengths[n])
        if not batches or size > room:
            batches.append([])
            room = budget
        batches[-1].append(int(n))
        room -= size
    return batches


def share(lengths: Sequence[int] | np.ndarray, rank: int, size: int) -> np.ndarray:
    """One process's part of an optimiser batch: the longest example goes to the lightest load.

    The parts of all processes are disjoint and make up the batch.

    Args:
        lengths: tokens of each example.
        rank: which process, of ``size``.
        size: number of processes.

    Returns:
        Positions in ``lengths``, ascending; perhaps none.
    """
    loads = np.zeros(size, dtype=np.int64)
    mine = []
    for n in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable"):
        lightest = int(np.argmin(loads))
        loads[lightest] += max(int(lengths[n]), 1)
        if lightest == rank:
            mine.append(int(n))
    return np.array(sorted(mine), dtype=np.int64)
