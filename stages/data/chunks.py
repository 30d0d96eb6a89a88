"""A few hundred records encoded and laid out for the store: a pure function of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import pyarrow as pa

from stages.batch import Group
from stages.data import encode
from stages.data.fit import Limits
from stages.data.kinds import KINDS, Judged, PromptItem, lengths_of, plain
from stages.data.records import (
    Document,
    PromptLike,
    Ranking,
    Record,
    Useless,
    opening,
    prompt_text,
)
from stages.data.templates import Codec
from stages.errors import RlhfError


@dataclass(frozen=True)
class Recipe:
    """How records of a kind are encoded; the fields are those of ``LoadSpec``."""

    kind: str
    limits: Limits
    train_on: str
    ties: str
    margin: Any
    reserve_tokens: int
    max_tokens: int | None


class Chunk(NamedTuple):
    """Encoded records.

    Attributes:
        batch: the rows of those that are kept, as an Arrow message.
        records: records given.
        kept: records kept.
        dropped: reason and place of each that is left out, in order.
        prompts: tokens of the kept prompts.
        responses: tokens of the kept answers.
        answers: K → rankings with K answers.
    """

    batch: bytes
    records: int
    kept: int
    dropped: list[tuple[str, str]]
    prompts: list[int]
    responses: list[int]
    answers: Counter[int]


def encode_chunk(recipe: Recipe, codec: Codec, records: Sequence[Record]) -> Chunk:
    """Encode records, or say why one is left out."""
    kind = KINDS[recipe.kind]
    found = Chunk(b"", len(records), 0, [], [], [], Counter())
    rows: list[dict[str, Any]] = []
    kept = 0
    for record in records:
        items = _reason(record) or _items(record, recipe, codec)
        if isinstance(items, str):
            found.dropped.append((items, record.origin))
            continue
        assert not isinstance(record, Useless)
        kept += 1
        key = text_number(opening(record.text if isinstance(record, Document) else record.prompt))
        for item in items:
            _count(found, item)
            rows.append({"origin": record.origin, "key": key, **kind.to_row(item)})
    return found._replace(batch=_message(rows, kind.schema), kept=kept)


def _reason(record: Record) -> str:
    return record.reason if isinstance(record, Useless) else ""


def _count(found: Chunk, item: Any) -> None:
    prompt, answers = lengths_of(item)
    found.prompts.append(prompt)
    found.responses.extend(answers)
    if isinstance(item, Group | Judged):
        found.answers[len(answers)] += 1


def _message(rows: list[dict[str, Any]], schema: pa.Schema) -> bytes:
    if not rows:
        return b""
    columns = [pa.array([row[field.name] for row in rows], type=field.type) for field in schema]
    message: bytes = pa.record_batch(columns, schema=schema).serialize().to_pybytes()
    return message


def _items(record: Any, recipe: Recipe, codec: Codec) -> Sequence[Any] | str:
    """The items of a record, or the reason to leave it out; an error names the record."""
    try:
        return _encode(record, recipe, codec)
    except RlhfError as error:
        where = ": ".join(part for part in (record.origin, error.where) if part)
        raise type(error)(
            error.what, do=error.do, where=error.where if record.origin in error.where else where
        ) from error


def _encode(record: Any, recipe: Recipe, codec: Codec) -> Sequence[Any] | str:
    limits = recipe.limits
    item: Any
    if recipe.kind == "documents":
        lengths = [n for n in (recipe.max_tokens, limits.positions) if n is not None]
        return encode.encode_document(record, codec, min(lengths, default=None)) or encode.NO_TARGET
    if recipe.kind == "demonstrations":
        item = encode.encode_demonstration(record, codec, limits, train_on=recipe.train_on)
    elif recipe.kind == "rankings":
        item = encode.encode_ranking(record, codec, limits, ties=recipe.ties, margin=recipe.margin)
    elif recipe.kind == "judged":
        item = _judged(record, codec, limits)
    elif recipe.kind == "labelled":
        item = encode.encode_labelled(record, codec, limits)
    else:
        encoded = encode.encode_prompt(record, codec, limits, reserve=recipe.reserve_tokens)
        if isinstance(encoded, str):
            return encoded
        fields = plain(record.fields or {})
        item = PromptItem(encoded.ids, record.prompt, codec.render(record.prompt), fields)
    return item if isinstance(item, str) else [item]


def _judged(record: Ranking, codec: Codec, limits: Limits) -> Judged | str:
    """A ranking with a strict pair, and what else its line says."""
    group = encode.encode_ranking(record, codec, limits)
    if isinstance(group, str):
        return encode.ALL_TIED if group == encode.NO_STRICT_PAIR else group
    found = [answer.score for answer, _ in encode.ranked_responses(record)]
    scores = tuple(score for score in found if score is not None)
    whole = len(scores) == len(found)
    return Judged(group, scores if whole else None, record.source, record.labeler)


def prompt_number(prompt: PromptLike) -> int:
    """A number that equal prompts share."""
    return text_number(prompt_text(prompt))


def text_number(text: str) -> int:
    """8 bytes of a text's hash."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
