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

_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}


def messages(row: Row) -> Record:
    """One conversation; its last assistant turn is the answer, all turns before it the prompt."""
    return answered(f.turns(f.get(row, "messages"), row.at("messages")), row.origin)


def sharegpt(row: Row) -> Record:
    """``{"from", "value"}`` turns, and an optional ``system`` text beside them."""
    where = row.at("conversations")
    given = f.items(f.get(row, "conversations"), where)
    turns = tuple(_sharegpt_turn(turn, f"{where}[{n}]") for n, turn in enumerate(given))
    system = f.optional_text(row.fields.get("system"), row.at("system"))
    return answered((Message("system", system), *turns) if system else turns, row.origin)


def _sharegpt_turn(value: object, where: str) -> Message:
    turn = f.mapping(value, where)
    speaker = "from" if "from" in turn else "role"
    role = f.text(turn.get(speaker), f"{where}.{speaker}")
    if role not in _SHAREGPT:
        f.check_role(role, f"{where}.{speaker}")
    words = "value" if "value" in turn else "content"
    return Message(_SHAREGPT[role], f.text(turn.get(words), f"{where}.{words}"))


def answered(turns: Turns, origin: str) -> Record:
    """Split a conversation at its last assistant turn; without one it is only a prompt."""
    answers = [n for n, turn in enumerate(turns) if turn.role == "assistant"]
    if not answers:
        return Prompt(turns, origin)
    last = answers[-1]
    if last == 0:
        return Useless("no turn before the answer", origin)
    return Demonstration(turns[:last], Response(turns[last].content), origin)
