"""Single-turn demonstrations and bare text."""

from __future__ import annotations

from stages.data import fields as f
from stages.data.formats import chat
from stages.data.records import Demonstration, Document, Record, Response, Row


def prompt_completion(row: Row) -> Record:
    """``prompt`` and ``completion``, both strings or both lists of messages."""
    completion = f.get(row, "completion")
    prompt = f.get(row, "prompt")
    if isinstance(completion, str):
        answer = Response(f.text(completion, row.at("completion")))
        return Demonstration(f.prompt(prompt, row.at("prompt")), answer, row.origin)
    before = f.prompt(prompt, row.at("prompt"))
    if isinstance(before, str):
        f.wrong("must be messages where the completion is", row.at("prompt"))
    return chat.answered(before + f.turns(completion, row.at("completion")), row.origin)


def alpaca(row: Row) -> Demonstration:
    """``instruction``, an optional ``input`` below it, and ``output``."""
    return _instruction(row, context="input", answer="output")


def dolly(row: Row) -> Demonstration:
    """``instruction``, an optional ``context`` below it, and ``response``."""
    return _instruction(row, context="context", answer="response")


def _instruction(row: Row, context: str, answer: str) -> Demonstration:
    parts = [f.text(f.get(row, "instruction"), row.at("instruction"))]
    parts.append(f.optional_text(row.fields.get(context), row.at(context)) or "")
    response = Response(f.text(f.get(row, answer), row.at(answer)))
    return Demonstration("\n\n".join(part for part in parts if part), response, row.origin)


def text(row: Row) -> Document:
    """``text`` alone."""
    return Document(f.text(f.get(row, "text"), row.at("text")), row.origin)
