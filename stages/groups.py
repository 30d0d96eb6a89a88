"""Reading many rankings without learning from them, every process its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from stages.batch import Group, GroupBatch, pack_groups
from stages.data.plan import micro_batches, share
from stages.runtime.session import Session

CHUNK = 256  # records planned together


@torch.no_grad()
def read_all(
    session: Session, groups: Iterable[Group], table: Callable[[GroupBatch], Tensor]
) -> list[np.ndarray]:
    """What a model says of the K answers of each record, in float64.

    Args:
        session: of the run; every process returns the whole.
        groups: records, the same on every process.
        table: a forward pass, ``[P, K]`` for the answers of P records.

    Returns:
        K numbers for each record, in their order.
    """
    rest, found = iter(groups), []
    while items := list(islice(rest, CHUNK)):
        found += _read(session, items, table)
    return found


def _read(
    session: Session, items: list[Group], table: Callable[[GroupBatch], Tensor]
) -> list[np.ndarray]:
    world, budget = session.world, session.config.train.tokens_per_micro_batch
    lengths = np.array([item.tokens for item in items])
    mine = share(lengths, world.rank, world.size)
    found: list[tuple[int, np.ndarray]] = []
    for rows in micro_batches(lengths[mine], budget):
        chosen = [int(mine[n]) for n in rows]
        values = table(pack_groups([items[n] for n in chosen])).cpu().double().numpy()
        found += [(n, values[row, : len(items[n].answers)]) for row, n in enumerate(chosen)]
    return [values for _, values in sorted(world.gather(found), key=lambda pair: pair[0])]
