"""Conversations: ``messages`` with role and content, and ShareGPT's ``conversations``."""

from __future__ import annotations

from stages.data import fields as f
from stages.data.records import (
    Demonstration,
    Message,
    Prompt,
    Record,
    Response,
    Row,
    Turns,
    Useless,
)


def messages(row: Row) -> Record:
    """One conversation; its last assistant turn is the answer, all turns before it the prompt."""
    field = next((name for name in ("messages", "conversation") if name in row.fields), "messages")
    return answered(f.turns(f.get(row, field), row.at(field)), row.origin)


def sharegpt(row: Row) -> Record:
    """``{"from", "value"}`` turns, and an optional ``system`` text beside them."""
    turns = f.turns(f.get(row, "conversations"), row.at("conversations"))
    system = f.optional_text(row.fields.get("system"), row.at("system"))
    return answered((Message("system", system), *turns) if system else turns, row.origin)


def answered(turns: Turns, origin: str) -> Record:
    """Split a conversation at its last assistant turn; without one it is only a prompt."""
    answers = [n for n, turn in enumerate(turns) if turn.role == "assistant"]
    if not answers:
        return Prompt(turns, origin)
    last = answers[-1]
    if last == 0:
        return Useless("no turn before the answer", origin)
    return Demonstration(turns[:last], Response(turns[last].content), origin)
