"""Records of files as batches of the store: read here, encoded on every core, counted in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from stages.data import files, formats, workers
from stages.data.chunks import Chunk, Recipe, encode_chunk, prompt_number
from stages.data.fit import Limits
from stages.data.kinds import as_kind
from stages.data.records import Document, Prompt, Record, Row, Useless
from stages.data.report import DUPLICATE, Tally
from stages.data.templates import Codec
from stages.errors import RlhfError

_VERSION = 4  # of what is stored; a change makes older caches unfindable
_CHUNK = 512  # records that are encoded and stored together
_ALONE = 16  # chunks encoded here before other processes are started: small data need none
_SECONDS = 5.0  # between lines that tell how far the reading is


@dataclass(frozen=True)
class LoadSpec:
    """What to load, and how far it may reach.

    Attributes:
        kind: ``demonstrations``, ``rankings``, ``labelled``, ``prompts`` or ``documents``.
        data: the config's ``data`` section.
        source: files in place of ``data.train``, in any known format, whole, with nothing held out.
        max_positions: positions of the model, None = no limit.
        train_on: targets of demonstrations.
        ties: what becomes of rankings without a strict pair.
        margin: ``ranking.margin``.
        reserve_tokens: positions that a prompt leaves for its answer.
        max_tokens: length of the pieces that documents are cut into.
        fields: whether a prompt keeps the other fields of its line.
        output: the run folder, where the cache folder cannot be written.
        main: whether this process builds the cache.
        wait: returns when every process has called it.
        workers: processes that encode; None = one a core. What is stored does not depend on it.
    """

    kind: str
    data: Any
    source: str | Sequence[str] | None = None
    max_positions: int | None = None
    train_on: str = "assistant"
    ties: str = "drop"
    margin: Any = 0.0
    reserve_tokens: int = 0
    max_tokens: int | None = None
    fields: bool = False
    output: Path | None = None
    main: bool = True
    wait: Callable[[], None] = lambda: None
    workers: int | None = None

    def recipe(self) -> Recipe:
        """The part that decides how a record is encoded."""
        limits = Limits(
            prompt=self.data.max_prompt_tokens,
            response=getattr(self.data, "max_response_tokens", None),
            positions=self.max_positions,
            truncate=self.data.overlong == "truncate",
        )
        return Recipe(
            kind=self.kind,
            limits=limits,
            train_on=self.train_on,
            ties=self.ties,
            margin=self.margin,
            reserve_tokens=self.reserve_tokens,
            max_tokens=self.max_tokens,
        )


def stored_chunks(
    names: Sequence[str], spec: LoadSpec, codec: Codec, tally: Tally, reporter: Any
) -> Iterator[Chunk]:
    """All records, encoded, a bounded number of them in memory at a time."""
    limit = None if spec.source is not None else spec.data.limit
    records: Iterator[Record] = islice(_records(names, spec, codec, tally), limit)
    if spec.kind == "prompts":
        records = _once(records)
    progress = _Progress(reporter)
    for chunk in _encoded(_in_chunks(records), spec, codec):
        tally.add(chunk)
        progress.advance(tally.records)
        yield chunk
    progress.end()


def _encoded(chunks: Iterator[list[Record]], spec: LoadSpec, codec: Codec) -> Iterator[Chunk]:
    """The chunks in their order: the first ones encoded here, more of them by other processes."""
    recipe = spec.recipe()
    for chunk in islice(chunks, _ALONE):
        yield encode_chunk(recipe, codec, chunk)
    count = workers.usable_cores() if spec.workers is None else spec.workers
    yield from workers.in_order(encode_chunk, (recipe, codec), chunks, count)


def _in_chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Lists of records. An error comes after the records before it, whose own errors go first."""
    chunk: list[Record] = []
    try:
        for record in records:
            chunk.append(record)
            if len(chunk) == _CHUNK:
                yield chunk
                chunk = []
    except RlhfError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def _records(names: Sequence[str], spec: LoadSpec, codec: Codec, tally: Tally) -> Iterator[Record]:
    own = spec.source is None
    columns = (spec.data.columns if own else None) or {}
    given = spec.data.format if own else "auto"
    for name in names:
        rows = _Newest(files.rows(name, columns))
        entry, records = formats.convert(rows, given, codec.as_messages)
        tally.formats[entry.name] += 1
        for record in records:
            found = as_kind(record, spec.kind, entry.name)
            if spec.fields and isinstance(found, Prompt):
                found = replace(found, fields=rows.fields_of(found.origin))
            yield found


class _Newest(Iterator[Row]):
    """Rows, the newest of which is remembered for the record that is made of it."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._row: Row | None = None

    def __next__(self) -> Row:
        self._row = next(self._rows)
        return self._row

    def fields_of(self, origin: str) -> dict[str, Any] | None:
        """The fields of the row at a place, or None where a format makes records of many rows."""
        known = self._row is not None and self._row.origin == origin
        return self._row.fields if known and self._row is not None else None


def _once(records: Iterable[Record]) -> Iterator[Record]:
    """Each prompt once; 8 bytes of each are remembered."""
    seen: set[int] = set()
    for record in records:
        if isinstance(record, Useless | Document):
            yield record
            continue
        number = prompt_number(record.prompt)
        yield Useless(DUPLICATE, record.origin) if number in seen else record
        seen.add(number)


class _Progress:
    """Tells how many records are done: every chunk to a bar, every few seconds to a log."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self._started = self._told = time.monotonic()
        if reporter is not None:
            reporter.begin("reading data", total=None, unit="records")

    def advance(self, done: int) -> None:
        """``done`` records are encoded."""
        if self._reporter is None:
            return
        now = time.monotonic()
        if now - self._told < _SECONDS:
            self._reporter.advance(done)
            return
        self._told = now
        self._reporter.advance(done, {"records/s": done / (now - self._started)})

    def end(self) -> None:
        """All are done."""
        if self._reporter is not None:
            self._reporter.end()


def cache_key(names: Sequence[str], hashes: Sequence[str], spec: LoadSpec, codec: Codec) -> str:
    """The hash of everything that decides what is stored."""
    own = spec.source is None
    limits = ("max_prompt_tokens", "max_response_tokens", "overlong")
    shape = ("format", "columns", "limit") if own else ()
    parts = {
        "version": [_VERSION, tokenizers.__version__],
        "files": [[name, digest] for name, digest in zip(names, hashes, strict=True)],
        "data": {name: getattr(spec.data, name, None) for name in (*limits, *shape)},
        "spec": [spec.kind, spec.max_positions, spec.train_on, spec.ties, str(spec.margin)],
        "lengths": [spec.reserve_tokens, spec.max_tokens, spec.fields],
        "codec": [codec.template_hash, codec.tokenizer_hash, codec.stop_ids],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()
