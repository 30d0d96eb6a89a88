"""The data formats: which columns give each away, and the records its rows are read into.

A format is one row of ``FORMATS``; its reader stands in the file of its family. Formats are tried
in this order, the most telling columns first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from stages.data.formats import canonical, chat, judged, labelled, pairs, plain, trees
from stages.data.records import Record, Row
from stages.errors import ConfigError, DataError

Fields = Mapping[str, Any]
Converter = Callable[[Iterable[Row], bool], Iterator[Record]]


class Format(NamedTuple):
    """How a format is recognised, what it holds, and how it is read.

    ``holds`` is rankings, demonstrations, labelled answers, prompts or documents;
    ``convert(rows, as_messages)`` yields the records.
    """

    name: str
    holds: str
    columns: str
    recognise: Callable[[Fields], bool]
    convert: Converter


def _each(convert: Callable[[Row], Record]) -> Converter:
    """A format whose rows stand for themselves."""
    return lambda rows, as_messages: (convert(row) for row in rows)


def _dialogue(convert: Callable[[Row, bool], Record]) -> Converter:
    """A format with whole dialogues in one string, read as turns with ``as_messages``."""
    return lambda rows, as_messages: (convert(row, as_messages) for row in rows)


def _has(*columns: str) -> Callable[[Fields], bool]:
    return lambda fields: all(column in fields for column in columns)


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format("oasst", "rankings", "prompt with replies", trees.is_tree, trees.read_trees),
        Format(
            "oasst_flat",
            "rankings",
            "message_id, parent_id, text, role",
            _has("message_id", "parent_id", "text", "role"),
            trees.read_flat,
        ),
        Format(
            "labelled",
            "labelled answers",
            "prompt, response or completion, label",
            labelled.is_labelled,
            _each(labelled.read),
        ),
        Format(
            "canonical",
            "demonstrations",
            "prompt, response or responses",
            canonical.is_canonical,
            _each(canonical.read),
        ),
        Format(
            "nectar",
            "rankings",
            "prompt, answers",
            _has("prompt", "answers"),
            _dialogue(judged.nectar),
        ),
        Format(
            "ultrafeedback",
            "rankings",
            "instruction, completions",
            _has("instruction", "completions"),
            _each(judged.ultrafeedback),
        ),
        Format(
            "distilabel",
            "rankings",
            "instruction, generations, ratings",
            judged.is_distilabel,
            _each(judged.distilabel),
        ),
        Format(
            "summarize_from_feedback",
            "rankings",
            "info, summaries, choice",
            _has("info", "summaries", "choice"),
            _each(judged.summarize_from_feedback),
        ),
        Format(
            "arena",
            "rankings",
            "conversation_a, conversation_b, winner",
            judged.is_arena,
            _each(judged.arena),
        ),
        Format(
            "shp",
            "rankings",
            "history, human_ref_A, human_ref_B, labels",
            _has("history", "human_ref_A", "human_ref_B", "labels"),
            lambda rows, as_messages: judged.shp(rows),
        ),
        Format(
            "webgpt",
            "rankings",
            "question, answer_0, answer_1, score_0, score_1",
            _has("question", "answer_0", "answer_1", "score_0", "score_1"),
            _each(judged.webgpt),
        ),
        Format("hh", "rankings", "chosen, rejected (dialogues)", pairs.is_hh, _dialogue(pairs.hh)),
        Format(
            "pairs",
            "rankings",
            "chosen, rejected, perhaps prompt",
            _has("chosen", "rejected"),
            _dialogue(pairs.read),
        ),
        Format(
            "messages",
            "demonstrations",
            "messages",
            lambda fields: "messages" in fields or "conversation" in fields,
            _each(chat.messages),
        ),
        Format(
            "sharegpt",
            "demonstrations",
            "conversations",
            _has("conversations"),
            _each(chat.sharegpt),
        ),
        Format(
            "prompt_completion",
            "demonstrations",
            "prompt, completion",
            plain.is_completion,
            _each(plain.prompt_completion),
        ),
        Format(
            "alpaca",
            "demonstrations",
            "instruction, output, perhaps input",
            _has("instruction", "output"),
            _each(plain.alpaca),
        ),
        Format(
            "dolly",
            "demonstrations",
            "instruction, response, perhaps context",
            _has("instruction", "response"),
            _each(plain.dolly),
        ),
        Format(
            "prompts",
            "prompts",
            "prompt",
            lambda fields: "prompt" in fields or list(fields) == ["input"],
            _each(canonical.prompt_only),
        ),
        Format("text", "documents", "text", _has("text"), _each(plain.text)),
    )
}


CONVERSATIONS = ("messages", "sharegpt")
"""The formats in which a record without an answer is one that has lost it."""

_FOREIGN = {
    "prompt": ("question", "query", "instruction", "problem", "input", "context"),
    "response": ("answer", "output", "completion", "solution", "target"),
    "chosen": ("chosen_response", "response_chosen", "preferred"),
    "rejected": ("rejected_response", "response_rejected", "dispreferred"),
}
"""What the columns of a prompt and its answers are called where no format is recognised."""


def choose(name: str, fields: Fields, where: str) -> Format:
    """The format of a file, by ``data.format`` or by the columns of its first row.

    Raises:
        DataError: no format has these columns, or they belong to labels that no stage reads.
    """
    if name != "auto":
        if name not in FORMATS:
            what = f"unknown format {name!r}"
            raise ConfigError(what, where="data.format", do=f"use auto, {', '.join(FORMATS)}")
        return FORMATS[name]
    _refuse(fields, where)
    for entry in FORMATS.values():
        if entry.recognise(fields):
            return entry
    raise DataError(
        f"no known format has the columns {', '.join(map(str, fields)) or '(none)'}",
        where=where,
        do=f"{_renaming(fields)}; docs/data-formats.md lists the columns of each format",
    )


def _renaming(fields: Fields) -> str:
    """How the columns could be renamed, where their names are telling."""
    found: dict[str, str] = {}
    for ours, names in _FOREIGN.items():
        known = [name for name in names if name in fields and ours not in fields]
        found |= {known[0]: ours} if known else {}
    if not found:
        return "rename columns with data.columns"
    pairs = ", ".join(f"{theirs}: {ours}" for theirs, ours in found.items())
    return f"rename columns with data.columns, perhaps {{{pairs}}}"


def _refuse(fields: Fields, where: str) -> None:
    if "completions" in fields and "labels" in fields:
        raise DataError(
            "these are labels of single steps (process supervision)",
            where=where,
            do="rank whole answers instead: prompt and responses with ranks",
        )


def convert(rows: Iterator[Row], name: str, as_messages: bool) -> tuple[Format, Iterator[Record]]:
    """Recognise the format by the first row and read all rows."""
    first = next(rows)
    entry = choose(name, first.fields, first.origin)
    return entry, entry.convert(chain([first], rows), as_messages)
