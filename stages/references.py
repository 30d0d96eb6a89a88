"""What a network says of whole answers, and what the reference of dpo said, kept by content.

The reference is the model that the run starts from. It reads every answer once, before the first
step, while the policy still is that model: no second copy of the weights is ever held. With
adapters it is the policy with its adapters off.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from stages.batch import Group, GroupBatch
from stages.data.store import Splits, Store
from stages.errors import Interrupted
from stages.groups import CHUNK, read_all
from stages.models.forward import response_logps
from stages.models.network import Network
from stages.runtime import start
from stages.runtime.session import Session, precision_of

_VERSION = 1  # of what is stored; a change makes older files unfindable


class Remembered(NamedTuple):
    """log π_ref of the K answers of each record, in the order of the stores."""

    train: list[np.ndarray]
    eval: list[np.ndarray]


def answer_logps(
    network: Network, groups: GroupBatch, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log π(y | x) of each answer in nats, and its tokens, both ``[P, K]``; each is read once."""
    batch = groups.batch.to(network.device)
    logps = response_logps(network, batch, temperature=temperature).logp
    sums, lengths = logps.sum(dim=1), batch.mask.sum(dim=1)
    return groups.by_prompt(sums), groups.by_prompt(lengths)


def reader(network: Network) -> Callable[[GroupBatch], Tensor]:
    """log π(y | x) of each answer ``[P, K]``, as a function of the packed records."""
    return lambda groups: answer_logps(network, groups)[0]


def remembered(session: Session, network: Network, records: Splits) -> Remembered:
    """What the reference says of every answer, from an earlier run where that is known.

    Args:
        session: of the run.
        network: the reference.
        records: what is learned from, and what is held out.

    Raises:
        Interrupted: a signal came; nothing is lost but time.
    """
    path = _folder() / f"{_key(session, records)}.npz"
    known = _read(path, records)
    if session.world.most(int(known is None)):
        session.reporter.note("the reference reads every answer once")
        known = Remembered(*(_said(session, network, store) for store in records[:2]))
        if session.world.main:
            _write(path, known)
    assert known is not None
    return known


def _said(session: Session, network: Network, store: Store | None) -> list[np.ndarray]:
    items: Iterator[Group] = iter(()) if store is None else iter(store)
    found: list[np.ndarray] = []
    session.reporter.begin("reference", total=0 if store is None else len(store), unit="records")
    while chunk := list(islice(items, CHUNK)):
        found += read_all(session, chunk, reader(network))
        session.reporter.advance(len(found))
        if signum := session.world.most(session.stop.signum):
            raise Interrupted(
                signum,
                what="interrupted before the first step, while the reference was reading",
                do="run the same command with --resume to begin again",
            )
    session.reporter.end()
    return found


def _folder() -> Path:
    own = os.environ.get("RLHF_CACHE")
    return (Path(own).expanduser() if own else Path.home() / ".cache" / "rlhf") / "references"


def _key(session: Session, records: Splits) -> str:
    """The hash of the reference's weights, its arithmetic, and every token it reads."""
    state = blake2b(digest_size=16)
    weights = start.parent("model", session.config.model)["hash"]
    state.update(f"{_VERSION} {weights} {precision_of(session.arithmetic)}".encode())
    for store in records[:2]:
        for group in store or ():
            for ids in (group.prompt, *group.answers):
                state.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids).tobytes())
        state.update(b"|")
    return state.hexdigest()


def _sizes(store: Store | None) -> list[int]:
    return [] if store is None else [len(group.answers) for group in store]


def _read(path: Path, records: Splits) -> Remembered | None:
    """What is stored, or None where it is missing or damaged."""
    try:
        with path.open("rb") as file, np.load(file) as stored:
            flat = [stored[name] for name in Remembered._fields]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    sizes = [_sizes(store) for store in records[:2]]
    if any(len(values) != sum(size) for values, size in zip(flat, sizes, strict=True)):
        return None
    return Remembered(*(_cut(values, size) for values, size in zip(flat, sizes, strict=True)))


def _cut(flat: np.ndarray, sizes: Iterable[int]) -> list[np.ndarray]:
    """The answers' values, record by record."""
    ends = np.cumsum([0, *sizes])
    return [flat[a:b] for a, b in pairwise(ends)]


def _write(path: Path, known: Remembered) -> None:
    """Keep what the reference said, complete or not at all; without a place for it, it is lost."""
    flat: dict[str, Any] = {
        name: np.concatenate(values) if values else np.zeros(0)
        for name, values in known._asdict().items()
    }
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=".tmp-", suffix=".npz", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                np.savez(file, **flat)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
