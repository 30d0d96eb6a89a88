"""Files → tokenised records, opened without reading them into memory, split and reported on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from stages.data import cache, files
from stages.data import report as reports
from stages.data.build import LoadSpec, cache_key, stored_chunks
from stages.data.kinds import KINDS, Kind
from stages.data.report import DataReport, RoleReport, Tally
from stages.data.templates import Codec

__all__ = ["LoadSpec", "Splits", "Store", "load"]


class Store:
    """Tokenised records of one kind in a memory-mapped file: a sequence of items.

    Attributes:
        lengths: ``[n]`` total tokens of each item; a ranking counts its prompt once.
        keys: ``[n]`` hash of each prompt's opening.
    """

    def __init__(self, kind: Kind, batches: Sequence[pa.RecordBatch], rows: np.ndarray) -> None:
        self._kind = kind
        self._batches = batches
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._rows = rows
        self.lengths = _column(batches, "length", np.int64)[rows]
        self.keys = _column(batches, "key", np.uint64)[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._kind.from_row(*self._find(index))

    def __iter__(self) -> Iterator[Any]:
        return (self[n] for n in range(len(self)))

    def origin(self, index: int) -> str:
        """The place of a record: ``file:line``."""
        batch, row = self._find(index)
        place: str = batch.column("origin")[row].as_py()
        return place

    def select(self, mask: np.ndarray) -> Store:
        """The items where ``mask`` is True."""
        return Store(self._kind, self._batches, self._rows[mask])

    def _find(self, index: int) -> tuple[pa.RecordBatch, int]:
        row = int(self._rows[index])
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._batches[batch], row - int(self._starts[batch])


class Splits(NamedTuple):
    """Training and held-out records; ``eval`` is None where nothing is held out."""

    train: Store
    eval: Store | None
    report: DataReport


def load(spec: LoadSpec, codec: Codec, *, reporter: Any = None) -> Splits:
    """Read, check, tokenise and split; what was done before is taken from the cache.

    Raises:
        DataError: a file is missing, empty, broken, of another kind, or too little of it is left.
        ConfigError: messages without a chat template, an unknown format.
    """
    source = spec.data.train if spec.source is None else spec.source
    train, report = _open(spec, codec, source, reporter)
    reports.check(report, spec.data.max_dropped)
    whole = spec.source is not None or spec.kind == "documents"
    held_out = None if whole else spec.data.eval
    if held_out is None or (isinstance(held_out, int | float) and held_out == 0):
        return Splits(train, None, DataReport((report,), (report.line(),)))
    if isinstance(held_out, int | float):
        return _split(train, report, float(held_out))
    test, test_report = _open(spec, codec, held_out, reporter)
    test_report = replace(test_report, role="eval")
    reports.check(test_report, spec.data.max_dropped)
    notes = [report.line(), test_report.line(), *_overlap(train, test)]
    return Splits(train, test, DataReport((report, test_report), tuple(notes)))


def _split(store: Store, report: RoleReport, share: float) -> Splits:
    """Hold out the prompts whose hash is in the lowest ``share``, at least one of ten or more."""
    held = store.keys < np.uint64(min(share, 1.0) * (2**64 - 2048))
    distinct = np.unique(store.keys)
    if not held.any() and len(distinct) > 1 and share * len(distinct) >= 0.5:
        held = store.keys == distinct[0]
    if held.all():
        held = store.keys != distinct[-1]
    count = int(held.sum())
    if not count:
        note = "eval: nothing is held out of so few records"
        return Splits(store, None, DataReport((report,), (report.line(), note)))
    train = replace(report, kept=len(store) - count)
    test = replace(report, role="eval", records=count, kept=count, dropped={}, first={})
    notes = (report.line(), f"eval: {count} of {len(store)} records are held out, by prompt")
    return Splits(store.select(~held), store.select(held), DataReport((train, test), notes))


def _overlap(train: Store, test: Store) -> list[str]:
    shared = int(np.isin(test.keys, train.keys).sum())
    text = f"eval: {shared} of {len(test)} records open with the prompt of a training record"
    return [text] if shared else []


def _open(
    spec: LoadSpec, codec: Codec, source: str | Sequence[str], reporter: Any
) -> tuple[Store, RoleReport]:
    """Build in the main process while the others wait.

    When the build fails, the others find no cache, build as well and fail with the same error: no
    process is left waiting.
    """
    if not spec.main:
        spec.wait()
        return _open_here(spec, codec, source, None)
    try:
        return _open_here(spec, codec, source, reporter)
    finally:
        spec.wait()


def _open_here(
    spec: LoadSpec, codec: Codec, source: str | Sequence[str], reporter: Any
) -> tuple[Store, RoleReport]:
    names = tuple(files.find(source))
    hashes = tuple(files.digest(name) for name in names)

    def write() -> tuple[Generator[bytes, None, None], Callable[[], dict[str, Any]]]:
        tally = Tally()
        messages = (c.batch for c in stored_chunks(names, spec, codec, tally, reporter))
        return messages, lambda: reports.to_dict(tally.report(names, hashes))

    kind = KINDS[spec.kind]
    key = cache_key(names, hashes, spec, codec)
    batches, about = cache.open_or_build(key, kind.schema, spec.output, write)
    count = sum(batch.num_rows for batch in batches)
    return Store(kind, batches, np.arange(count)), reports.from_dict(about)


def _column(batches: Sequence[pa.RecordBatch], name: str, dtype: Any) -> np.ndarray:
    parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in batches]
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)
