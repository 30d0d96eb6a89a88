"""Checked access to the fields of a row: the value in its type, or a DataError with its place.

A cell of a table is text, whatever it means: where a number or a list belongs, it is read as one.
A list or an object written as text, as JSON or as Python prints it, is read likewise.
"""

from __future__ import annotations

import ast
import json
import math
from decimal import Decimal
from typing import Any, NoReturn

from stages.data.json_text import GivenTwice, unique
from stages.data.records import Cell, Message, Row, Turns
from stages.errors import DataError

ROLES = ("system", "user", "assistant")
WORST_RANK = 2**31 - 1  # what 32 bits hold, wherever a rank is kept
_TOOLS = ("tool", "function", "ipython", "observation", "function_call")
_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "developer": "system",
}
"""What other data sets call the three roles."""
_parsed = json.JSONDecoder(object_pairs_hook=unique).decode


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
        do = "correct this field (a text stands in quotes), or delete this record"
        wrong(f"must be a string, not {_kind(value)}", where, do)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            wrong("half of a surrogate pair, which is no character", where)
    return value if type(value) is str else str(value)


def optional_text(value: object, where: str) -> str | None:
    """A string or None."""
    return None if _is_absent(value) else text(value, where)


def name(value: object) -> str | None:
    """A name or number that identifies something, as text."""
    return None if _is_absent(value) else str(value)


def number(value: object, where: str) -> float | None:
    """A finite number or None."""
    if _is_absent(value):
        return None
    if isinstance(value, Cell):
        value = _number_in(value, where)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        wrong(f"must be a number or null, not {_kind(value)}", where)
    try:
        found = float(value)
    except OverflowError:
        wrong("must be a number below 1.8e308, the largest that a float holds", where)
    if not math.isfinite(found):
        wrong("must be a finite number", where)
    return found


def rank(value: object, where: str, *, first: int = 1) -> int | None:
    """A whole number counted from ``first`` = best, as a rank counted from 1, or None."""
    given = number(value, where)
    if given is None:
        return None
    if given != int(given) or given < first:
        wrong(f"must be a whole number from {first} = best, not {value}", where)
    if given > WORST_RANK:
        wrong(f"must be {WORST_RANK} at most, not {value}", where)
    return int(given) - first + 1


def choice(value: object, where: str) -> int:
    """0 or 1."""
    given = _number_in(value, where) if isinstance(value, Cell) else value
    if isinstance(given, bool) or given not in (0, 1):
        wrong(f"must be 0 or 1, not {value!r}", where)
    return int(given)


def flag(value: object) -> bool:
    """Whether something is said to be so; a table writes it as a word or a number."""
    return value.lower() in ("true", "1", "1.0") if isinstance(value, Cell) else bool(value)


def mapping(value: object, where: str) -> dict[str, Any]:
    """An object."""
    given = unfolded(value)
    if not isinstance(given, dict):
        wrong(f"must be an object, not {_kind(value)}", where, _unreadable(value))
    return given


def items(value: object, where: str) -> list[Any]:
    """A list."""
    given = unfolded(value)
    if not isinstance(given, list | tuple):
        wrong(f"must be a list, not {_kind(value)}", where, _unreadable(value))
    return list(given)


def unfolded(value: object) -> object:
    """The list or object that a text holds, each key once; every other value as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for parse in (_parsed, ast.literal_eval):
        try:
            found = parse(value)
        except GivenTwice:
            return value
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list | dict) else value
    return value


def conversation(value: object) -> object:
    """The messages that a text holds; every other value, a text that holds none too, as it is."""
    found = unfolded(value)
    if isinstance(found, list) and found and all(isinstance(turn, dict) for turn in found):
        return found if all({"role", "from"} & turn.keys() for turn in found) else value
    return value


def prompt(value: object, where: str) -> str | Turns:
    """A prompt: a string, or messages that leave the next turn to the assistant."""
    value = conversation(value)
    if isinstance(value, str):
        return text(value, where)
    given = turns(value, where)
    if given[-1].role == "assistant":
        wrong("the prompt ends with an answer", where, "end the prompt with a user turn")
    return given


def turns(value: object, where: str) -> Turns:
    """A list of one or more ``{"role", "content"}`` or ``{"from", "value"}`` turns, or one turn."""
    if isinstance(value, dict) and {"role", "from"} & value.keys():
        return (_turn(value, where),)
    given = items(value, where)
    if not given:
        wrong("no messages", where)
    return tuple(_turn(turn, f"{where}[{n}]") for n, turn in enumerate(given))


def _turn(value: object, where: str) -> Message:
    given = mapping(value, where)
    speaker = "from" if given.get("from") is not None else "role"
    written = text(given.get(speaker), f"{where}.{speaker}")
    role = _ALIASES.get(written.lower(), written.lower())
    if role not in ROLES:
        _refuse_role(written, f"{where}.{speaker}")
    if given.get("tool_calls") or given.get("function_call"):
        _refuse_tools(f"{where}.tool_calls")
    words = "value" if given.get("value") is not None else "content"
    return Message(role, _content(given.get(words), f"{where}.{words}"))


def _content(value: object, where: str) -> str:
    """A string, or the joined ``{"type": "text"}`` parts of a list."""
    if not isinstance(value, list):
        return text(value, where)
    parts = [mapping(part, f"{where}[{n}]") for n, part in enumerate(value)]
    for n, part in enumerate(parts):
        if part.get("type") != "text":
            wrong(f"only text can be read, not {part.get('type')!r}", f"{where}[{n}].type")
    return "".join(text(part.get("text"), f"{where}[{n}].text") for n, part in enumerate(parts))


def _refuse_role(role: str, where: str) -> NoReturn:
    if role.lower() in _TOOLS:
        _refuse_tools(where)
    wrong(f"unknown role {role!r}", where, f"roles are {', '.join(ROLES)}")


def _refuse_tools(where: str) -> NoReturn:
    do = "leave out conversations with tool calls"
    wrong("tool calls and their results cannot be trained on", where, do)


def _is_absent(value: object) -> bool:
    """A null, or an empty cell of a table."""
    return value is None or (isinstance(value, Cell) and not value)


def _number_in(cell: Cell, where: str) -> float:
    try:
        return float(cell)
    except ValueError:
        wrong(f"must be a number, not {str(cell)!r}", where)


def _unreadable(value: object) -> str:
    table = "write lists and objects in a table's cells as JSON, each key once"
    return table if isinstance(value, Cell) else "correct this field"


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    names = {type(None): "null", dict: "an object", list: "a list", str: "a string"}
    names |= {Cell: "a text", int: "a number", float: "a number"}
    names |= {Decimal: "a number"}
    return names.get(type(value), type(value).__name__)
