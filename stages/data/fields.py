"""Checked access to the fields of a row: the value in its type, or a DataError with its place."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from stages.data.records import Message, Row, Turns
from stages.errors import DataError

ROLES = ("system", "user", "assistant")
_TOOLS = ("tool", "function", "ipython", "observation", "function_call")


def wrong(what: str, where: str, do: str = "correct this field") -> NoReturn:
    """Refuse a field."""
    raise DataError(what, where=where, do=do)


def get(row: Row, field: str) -> Any:
    """The field's value; missing is an error."""
    if field not in row.fields:
        wrong("the field is missing", row.at(field), f"every record of this file needs {field!r}")
    return row.fields[field]


def text(value: object, where: str) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        wrong(f"must be a string, not {_kind(value)}", where)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            wrong("half of a surrogate pair, which is no character", where)
    return value


def optional_text(value: object, where: str) -> str | None:
    """A string or None."""
    return None if value is None else text(value, where)


def number(value: object, where: str) -> float | None:
    """A finite number or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong(f"must be a number or null, not {_kind(value)}", where)
    if not math.isfinite(value):
        wrong("must be a finite number", where)
    return float(value)


def rank(value: object, where: str, *, first: int = 1) -> int | None:
    """A whole number counted from ``first`` = best, as a rank counted from 1, or None."""
    given = number(value, where)
    if given is None:
        return None
    if given != int(given) or given < first:
        wrong(f"must be a whole number from {first} = best, not {value}", where)
    return int(given) - first + 1


def mapping(value: object, where: str) -> dict:
    """An object."""
    if not isinstance(value, dict):
        wrong(f"must be an object, not {_kind(value)}", where)
    return value


def items(value: object, where: str) -> list:
    """A list."""
    if not isinstance(value, list | tuple):
        wrong(f"must be a list, not {_kind(value)}", where)
    return list(value)


def prompt(value: object, where: str) -> str | Turns:
    """A prompt: a string, or messages that leave the next turn to the assistant."""
    if isinstance(value, str):
        return text(value, where)
    given = turns(value, where)
    if given[-1].role == "assistant":
        wrong("the prompt ends with an answer", where, "end the prompt with a user turn")
    return given


def turns(value: object, where: str) -> Turns:
    """A list of one or more ``{"role", "content"}`` messages."""
    given = items(value, where)
    if not given:
        wrong("no messages", where)
    return tuple(_turn(turn, f"{where}[{n}]") for n, turn in enumerate(given))


def _turn(value: object, where: str) -> Message:
    given = mapping(value, where)
    role = text(given.get("role"), f"{where}.role")
    check_role(role, f"{where}.role")
    if given.get("tool_calls") or given.get("function_call"):
        refuse_tools(f"{where}.tool_calls")
    return Message(role, _content(given.get("content"), f"{where}.content"))


def _content(value: object, where: str) -> str:
    """A string, or the joined ``{"type": "text"}`` parts of a list."""
    if not isinstance(value, list):
        return text(value, where)
    parts = [mapping(part, f"{where}[{n}]") for n, part in enumerate(value)]
    for n, part in enumerate(parts):
        if part.get("type") != "text":
            wrong(f"only text can be read, not {part.get('type')!r}", f"{where}[{n}].type")
    return "".join(text(part.get("text"), f"{where}[{n}].text") for n, part in enumerate(parts))


def check_role(role: str, where: str) -> None:
    """Refuse roles other than system, user and assistant."""
    if role in _TOOLS:
        refuse_tools(where)
    if role not in ROLES:
        wrong(f"unknown role {role!r}", where, f"roles are {', '.join(ROLES)}")


def refuse_tools(where: str) -> NoReturn:
    """Refuse tool calls."""
    do = "leave out conversations with tool calls"
    wrong("tool calls and their results cannot be trained on", where, do)


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "true or false", dict: "an object", list: "a list"}
    names |= {str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
