"""The kinds of stored items: how a record becomes one, and its columns on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from stages.batch import Example, Group
from stages.data.encode import best_response
from stages.data.formats import CONVERSATIONS
from stages.data.records import (
    Demonstration,
    Document,
    Labelled,
    Prompt,
    PromptLike,
    Ranking,
    Record,
    Response,
    Useless,
    from_json,
    to_json,
)
from stages.errors import DataError

NO_ANSWER = "no answer"
_IDS = pa.list_(pa.int32())
_COMMON = [("origin", pa.string()), ("key", pa.uint64()), ("length", pa.int32())]


class PromptItem(NamedTuple):
    """A prompt to be answered.

    Attributes:
        ids: as the model reads it.
        prompt: as written.
        text: the text of ``ids``.
        record: the fields of its line as plain values, where they are kept; else the prompt alone.
        origin: ``file:line``.
    """

    ids: np.ndarray
    prompt: PromptLike
    text: str
    record: Mapping[str, Any] = MappingProxyType({})
    origin: str = ""


class Judged(NamedTuple):
    """A ranking with what else its line says: a score per ranked answer, where it is from, by whom.

    ``scores`` is None unless every ranked answer has one.
    """

    group: Group
    scores: tuple[float, ...] | None
    source: str | None
    labeler: str | None


class Kind(NamedTuple):
    """Columns of a kind of item, and the way to and from a row of them."""

    schema: pa.Schema
    to_row: Callable[[Any], dict[str, Any]]
    from_row: Callable[[pa.RecordBatch, int], Any]


def _schema(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([*_COMMON, *columns])


def _array(batch: pa.RecordBatch, column: str, n: int) -> np.ndarray:
    values: np.ndarray = batch.column(column)[n].values.to_numpy(zero_copy_only=False)
    return values


def _example_row(item: Example) -> dict[str, Any]:
    return {"length": len(item.ids), "ids": item.ids, "targets": item.targets}


def _example(batch: pa.RecordBatch, n: int) -> Example:
    return Example(_array(batch, "ids", n), _array(batch, "targets", n))


def _group_row(item: Group) -> dict[str, Any]:
    return {
        "length": len(item.prompt) + sum(map(len, item.answers)),
        "prompt": item.prompt,
        "answers": list(item.answers),
        "ranks": list(item.ranks),
        "margins": None if item.margins is None else item.margins.ravel(),
    }


def _group(batch: pa.RecordBatch, n: int) -> Group:
    answers = tuple(ids.values.to_numpy(zero_copy_only=False) for ids in batch.column("answers")[n])
    margins = batch.column("margins")[n]
    table = None
    if margins.is_valid:
        table = margins.values.to_numpy(zero_copy_only=False).reshape(len(answers), -1)
    ranks = tuple(batch.column("ranks")[n].as_py())
    return Group(_array(batch, "prompt", n), answers, ranks, table)


def _judged_row(item: Judged) -> dict[str, Any]:
    told = {"scores": item.scores, "source": item.source, "labeler": item.labeler}
    return {**_group_row(item.group), **told}


def _judged(batch: pa.RecordBatch, n: int) -> Judged:
    scores = batch.column("scores")[n].as_py()
    told = (batch.column(name)[n].as_py() for name in ("source", "labeler"))
    return Judged(_group(batch, n), None if scores is None else tuple(scores), *told)


def _prompt_row(item: PromptItem) -> dict[str, Any]:
    written = json.dumps(to_json(item.prompt), ensure_ascii=False)
    beside = {name: value for name, value in item.record.items() if name != "prompt"}
    return {
        "length": len(item.ids),
        "ids": item.ids,
        "prompt": written,
        "text": item.text,
        "record": json.dumps(beside) if beside else None,
    }


def _prompt(batch: pa.RecordBatch, n: int) -> PromptItem:
    written = json.loads(batch.column("prompt")[n].as_py())
    beside = json.loads(batch.column("record")[n].as_py() or "{}")
    return PromptItem(
        ids=_array(batch, "ids", n),
        prompt=from_json(written),
        text=batch.column("text")[n].as_py(),
        record={"prompt": written, **beside},
        origin=batch.column("origin")[n].as_py(),
    )


def plain(value: object) -> Any:
    """A field of a row as JSON can hold it: what JSON does not know becomes text, NaN null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)


_RANKED = (
    ("prompt", _IDS),
    ("answers", pa.list_(_IDS)),
    ("ranks", _IDS),
    ("margins", pa.list_(pa.float64())),
)
_TOLD = (("scores", pa.list_(pa.float64())), ("source", pa.string()), ("labeler", pa.string()))
_GROUPS = Kind(_schema(*_RANKED), _group_row, _group)
_EXAMPLES = Kind(_schema(("ids", _IDS), ("targets", _IDS)), _example_row, _example)
KINDS: dict[str, Kind] = {
    "demonstrations": _EXAMPLES,
    "documents": _EXAMPLES,
    "rankings": _GROUPS,
    "labelled": _GROUPS,
    "judged": Kind(_schema(*_RANKED, *_TOLD), _judged_row, _judged),
    "prompts": Kind(
        _schema(
            ("ids", _IDS), ("prompt", pa.string()), ("text", pa.string()), ("record", pa.string())
        ),
        _prompt_row,
        _prompt,
    ),
}


def as_kind(record: Record, kind: str, format_name: str) -> Record:
    """The record as a demonstration, ranking, labelled answers, prompt or document.

    Raises:
        DataError: the file holds records of another kind.
    """
    if isinstance(record, Useless):
        return record
    if kind == "labelled":
        return record if isinstance(record, Labelled | Ranking) else _refuse(record, kind)
    if isinstance(record, Labelled):
        return _refuse(record, "rankings" if kind == "judged" else kind)
    if kind == "prompts":
        prompt = record.text if isinstance(record, Document) else record.prompt
        return Prompt(prompt, record.origin)
    if kind in ("rankings", "judged"):
        return record if isinstance(record, Ranking) else _refuse(record, "rankings")
    if isinstance(record, Prompt):
        unanswered = Useless(NO_ANSWER, record.origin)
        return unanswered if format_name in CONVERSATIONS else _refuse(record, kind)
    if isinstance(record, Ranking):
        best = best_response(record)
        if best is None:
            return Useless("no ranked answer", record.origin)
        return Demonstration(record.prompt, best, record.origin)
    if isinstance(record, Document) and kind == "demonstrations":
        return Demonstration("", Response(record.text), record.origin)
    return record


def _refuse(record: Record, kind: str) -> Record:
    names = {
        Demonstration: "a demonstration (a prompt with one answer)",
        Prompt: "a prompt without an answer",
        Document: "a bare text",
        Labelled: "an answer with a label, true or false",
    }
    needs: dict[str, str] = {
        "rankings": "give prompts with two or more ranked responses; demonstrations train sft",
        "demonstrations": "give prompts with a response each",
        "documents": "give texts, or prompts with a response each",
        "labelled": "give lines with prompt, response and label, or rankings",
        "prompts": "drop the label column",
    }
    needed = "labelled answers" if kind == "labelled" else kind
    what = f"this is {names[type(record)]}, where {needed} are needed"
    do = needs[kind]
    if isinstance(record, Labelled):
        do = f"{do}; labelled answers train kto"
    raise DataError(what, where=record.origin, do=do)


def lengths_of(item: Example | Group | Judged | PromptItem) -> tuple[int, Sequence[int]]:
    """Tokens of the prompt and of each answer; an example's answer starts at its first target."""
    if isinstance(item, Judged):
        item = item.group
    if isinstance(item, Group):
        return len(item.prompt), [len(answer) for answer in item.answers]
    if isinstance(item, PromptItem):
        return len(item.ids), []
    return len(item.ids) - len(item.targets), [len(item.targets)]
