"""Reading many rankings without learning from them, every process its share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from stages.batch import Group, GroupBatch, pack_groups
from stages.data.plan import micro_batches, share
from stages.models.forward import scores
from stages.models.network import Network
from stages.runtime.processes import World
from stages.runtime.session import Session

CHUNK = 256  # records planned together


def scorer(network: Network) -> Callable[[GroupBatch], Tensor]:
    """``[P, K]`` scores of packed records, as a function of them: one forward pass per answer."""
    return lambda groups: groups.by_prompt(scores(network, groups.batch.to(network.device)))


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
    budget = session.config.train.tokens_per_micro_batch
    rest, found = iter(groups), []
    while items := list(islice(rest, CHUNK)):
        found += read(items, table, budget=budget, world=session.world)
    return found


@torch.no_grad()
def read(
    items: Sequence[Group],
    table: Callable[[GroupBatch], Tensor],
    *,
    budget: int,
    world: World,
) -> list[np.ndarray]:
    """The same of the records of one chunk.

    Args:
        items: records, the same on every process.
        table: as above.
        budget: tokens per forward pass.
        world: whose processes share the records.
    """
    lengths = np.array([item.tokens for item in items])
    mine = share(lengths, world.rank, world.size)
    found: list[tuple[int, np.ndarray]] = []
    for rows in micro_batches(lengths[mine], budget):
        chosen = [int(mine[n]) for n in rows]
        values = table(pack_groups([items[n] for n in chosen])).cpu().double().numpy()
        found += [(n, values[row, : len(items[n].answers)]) for row, n in enumerate(chosen)]
    return [values for _, values in sorted(world.gather(found), key=lambda pair: pair[0])]
