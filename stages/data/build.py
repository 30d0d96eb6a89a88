"""Records of files as rows of the store: read, converted, encoded, counted, one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from stages.batch import Group
from stages.data import encode, files, formats
from stages.data.kinds import KINDS, PromptItem, as_kind, lengths_of
from stages.data.records import Document, Record, Row, Useless, opening, prompt_text
from stages.data.report import DUPLICATE, Tally
from stages.data.templates import Codec
from stages.errors import DataError, RlhfError

_VERSION = 1  # of what is stored; a change makes older caches unfindable
_PROGRESS_EVERY = 512


@dataclass(frozen=True)
class LoadSpec:
    """What to load, and how far it may reach.

    Attributes:
        kind: ``demonstrations``, ``rankings``, ``prompts`` or ``documents``.
        data: the config's ``data`` section.
        source: files in place of ``data.train``, in any known format, whole, with nothing held out.
        max_positions: positions of the model, None = no limit.
        train_on: targets of demonstrations.
        ties: what becomes of rankings without a strict pair.
        margin: ``ranking.margin``.
        reserve_tokens: positions that a prompt leaves for its answer.
        max_tokens: length of the pieces that documents are cut into.
        output: the run folder, where the cache folder cannot be written.
        main: whether this process builds the cache.
        wait: returns when every process has called it.
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
    output: Path | None = None
    main: bool = True
    wait: Callable[[], None] = lambda: None


def stored_rows(
    names: Sequence[str], spec: LoadSpec, codec: Codec, tally: Tally, reporter: Any
) -> Iterator[dict]:
    """The stored rows of all records, one record in memory at a time."""
    kind = KINDS[spec.kind]
    seen: set[int] = set()
    limit = None if spec.source is not None else spec.data.limit
    if reporter is not None:
        reporter.begin("reading data", total=None, unit="records")
    for record in islice(_records(names, spec, codec, tally), limit):
        tally.records += 1
        if reporter is not None and tally.records % _PROGRESS_EVERY == 0:
            reporter.advance(tally.records)
        key, encoded = _encoded(record, spec, codec, seen)
        if isinstance(encoded, str):
            tally.drop(encoded, record.origin)
            continue
        tally.kept += 1
        for item in encoded:
            prompt, answers = lengths_of(item)
            tally.prompts.append(prompt)
            tally.responses.extend(answers)
            tally.answers.update([len(answers)] if isinstance(item, Group) else [])
            yield {"origin": record.origin, "key": key, **kind.to_row(item)}
    if reporter is not None:
        reporter.end()


def _records(names: Sequence[str], spec: LoadSpec, codec: Codec, tally: Tally) -> Iterator[Record]:
    own = spec.source is None
    columns = (spec.data.columns if own else None) or {}
    given = spec.data.format if own else "auto"
    for name in names:
        rows = _renamed(files.rows(name), columns, name)
        entry, records = formats.convert(rows, given, codec.as_messages)
        tally.formats[entry.name] += 1
        for record in records:
            yield as_kind(record, spec.kind, entry.name)


def _renamed(rows: Iterator[Row], columns: dict[str, str], name: str) -> Iterator[Row]:
    """Rows under our column names; a foreign name that the first row lacks is a mistake."""
    for n, row in enumerate(rows):
        missing = [column for column in columns if column not in row.fields]
        if n == 0 and missing:
            what = f"data.columns names {missing[0]!r}, but the columns are {', '.join(row.fields)}"
            raise DataError(what, where=row.origin, do="write foreign names on the left")
        yield Row({columns.get(key, key): v for key, v in row.fields.items()}, row.origin)


def _encoded(
    record: Record, spec: LoadSpec, codec: Codec, seen: set[int]
) -> tuple[int, Sequence[Any] | str]:
    """The hash of a record's opening, and its items or the reason to leave it out."""
    if isinstance(record, Useless):
        return 0, record.reason
    prompt = record.text if isinstance(record, Document) else record.prompt
    if spec.kind == "prompts":
        name = _number(prompt_text(prompt))
        if name in seen:
            return 0, DUPLICATE
        seen.add(name)
    try:
        return _number(opening(prompt)), _items(record, spec, codec)
    except RlhfError as error:
        where = ": ".join(part for part in (record.origin, error.where) if part)
        raise type(error)(
            error.what, do=error.do, where=error.where if record.origin in error.where else where
        ) from error


def _items(record: Any, spec: LoadSpec, codec: Codec) -> Sequence[Any] | str:
    limits = encode.Limits(
        prompt=spec.data.max_prompt_tokens,
        response=getattr(spec.data, "max_response_tokens", None),
        positions=spec.max_positions,
        truncate=spec.data.overlong == "truncate",
    )
    item: Any
    if spec.kind == "documents":
        lengths = [n for n in (spec.max_tokens, spec.max_positions) if n is not None]
        return encode.encode_document(record, codec, min(lengths, default=None)) or encode.NO_TARGET
    if spec.kind == "demonstrations":
        item = encode.encode_demonstration(record, codec, limits, train_on=spec.train_on)
    elif spec.kind == "rankings":
        item = encode.encode_ranking(record, codec, limits, ties=spec.ties, margin=spec.margin)
    else:
        encoded = encode.encode_prompt(record, codec, limits, reserve=spec.reserve_tokens)
        if isinstance(encoded, str):
            return encoded
        item = PromptItem(encoded.ids, record.prompt, codec.render(record.prompt))
    return item if isinstance(item, str) else [item]


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
        "lengths": [spec.reserve_tokens, spec.max_tokens],
        "codec": [codec.template_hash, codec.tokenizer_hash, codec.stop_ids],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
