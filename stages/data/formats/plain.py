"""Single-turn demonstrations and bare text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.data import fields as f
from stages.data.formats import asked, chat
from stages.data.records import Demonstration, Document, Record, Response, Row


def is_completion(fields: Mapping[str, Any]) -> bool:
    """TRL's two columns, or OpenRLHF's."""
    return {"prompt", "completion"} <= fields.keys() or (
        {"input", "output"} <= fields.keys() and "instruction" not in fields
    )


def prompt_completion(row: Row) -> Record:
    """A prompt and its completion, both strings or both lists of messages."""
    ours = "completion" in row.fields or "input" not in row.fields
    asking, answering = ("prompt", "completion") if ours else ("input", "output")
    completion = f.conversation(f.get(row, answering))
    before = f.prompt(f.get(row, asking), row.at(asking))
    if isinstance(completion, str):
        answer = Response(f.text(completion, row.at(answering)))
        return Demonstration(asked.in_turns(row, before), answer, row.origin)
    if isinstance(before, str):
        f.wrong("must be messages where the completion is", row.at(asking))
    return chat.answered(before + f.turns(completion, row.at(answering)), row.origin)


def alpaca(row: Row) -> Demonstration:
    """``instruction``, an optional ``input`` below it, and ``output``."""
    return _instruction(row, context="input", answer="output")


def dolly(row: Row) -> Demonstration:
    """``instruction``, an optional ``context`` below it, and ``response``."""
    return _instruction(row, context="context", answer="response")


def _instruction(row: Row, context: str, answer: str) -> Demonstration:
    response = Response(f.text(f.get(row, answer), row.at(answer)))
    return Demonstration(asked.instruction(row, "instruction", context), response, row.origin)


def text(row: Row) -> Document:
    """``text`` alone."""
    return Document(f.text(f.get(row, "text"), row.at("text")), row.origin)
