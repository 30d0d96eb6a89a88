"""OpenAssistant: trees of messages whose sibling answers people ranked, nested or flat.

Rank 0 is the best. A group deep in the tree has the whole path from the root as its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stages.data import fields as f
from stages.data.records import Message, Ranking, Record, Response, Row, Turns, Useless

_ROLES = {"prompter": "user", "assistant": "assistant"}


def is_tree(fields: Mapping[str, Any]) -> bool:
    """A root message under ``prompt`` that holds its replies."""
    root = fields.get("prompt")
    return isinstance(root, dict) and "replies" in root


def read_trees(rows: Iterable[Row], as_messages: bool) -> Iterator[Record]:
    """The ranked groups of nested trees, one tree a row."""
    for row in rows:
        yield from _groups(f.get(row, "prompt"), (), row.at("prompt"), row.origin)


def read_flat(rows: Iterable[Row], as_messages: bool) -> Iterator[Record]:
    """The ranked groups of one message a row. All messages are held until their trees are whole."""
    replies: dict[str, list[dict[str, Any]]] = {}
    roots: list[tuple[dict[str, Any], Row]] = []
    known: set[str] = set()
    first: dict[str, str] = {}
    for row in rows:
        name = f.text(f.get(row, "message_id"), row.at("message_id"))
        parent = f.optional_text(f.get(row, "parent_id"), row.at("parent_id"))
        known.add(name)
        node = {**row.fields, "replies": replies.setdefault(name, [])}
        if parent is None:
            roots.append((node, row))
        else:
            replies.setdefault(parent, []).append(node)
            first.setdefault(parent, row.origin)
    for root, row in roots:
        yield from _groups(root, (), row.origin, row.origin)
    for parent, origin in first.items():
        if parent not in known:
            yield Useless("the message that these reply to is missing", origin)


def _groups(value: object, path: Turns, where: str, origin: str) -> Iterator[Ranking]:
    """Every message of the user below this node with two or more ranked answers."""
    pending = [(value, path, where)]
    while pending:
        value, path, where = pending.pop()
        node = f.mapping(value, where)
        turn = _turn(node, where)
        replies = f.items(node.get("replies") or [], f"{where}.replies")
        places = [f"{where}.replies[{n}]" for n in range(len(replies))]
        below = (*path, turn)
        if turn.role == "user":
            answers = [_answer(*pair) for pair in zip(replies, places, strict=True)]
            kept = tuple(answer for answer in answers if answer is not None)
            if sum(answer.rank is not None for answer in kept) > 1:
                yield Ranking(below, kept, origin, id=f.name(node.get("message_id")))
        nodes = zip(replies, places, strict=True)
        pending += reversed([(reply, below, place) for reply, place in nodes])


def _turn(node: dict[str, Any], where: str) -> Message:
    role = f.text(node.get("role"), f"{where}.role")
    if role not in _ROLES:
        f.wrong(f"unknown role {role!r}", f"{where}.role", "roles are prompter and assistant")
    return Message(_ROLES[role], f.text(node.get("text"), f"{where}.text"))


def _answer(value: object, where: str) -> Response | None:
    node = f.mapping(value, where)
    turn = _turn(node, where)
    if turn.role != "assistant" or f.flag(node.get("deleted")):
        return None
    rank = f.rank(node.get("rank"), f"{where}.rank", first=0)
    return Response(turn.content, rank, model=f.name(node.get("model_name")))
