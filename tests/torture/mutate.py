"""Ways to spoil a valid file: values that nobody expects, and bytes that belong nowhere."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 10**30, -(2**63), 0.5, 1e309, float("nan"), -0.0, "", " ", "\0",
    "\x1b[31mred", "[bold]x", "\ud800", "\u2028", "\ufeff", "N/A", "1e-5", "null", "a" * 3000,
    [], {}, [[]], [None], [{}], {"": None}, {"a": {"b": []}}, ["a", 1], "\\", "../x", "hub:x/y",
    "user", "assistant", "system", "tool", [{"role": "user", "content": "a"}],
    [{"role": "assistant", "content": None}], [{"role": 3, "content": []}], {"text": "a"},
    [{"text": "a", "rank": "1"}, {"text": "b", "rank": None}],
)  # fmt: skip
KEYS = ("prompt", "response", "responses", "text", "rank", "score", "chosen", "rejected",
        "messages", "role", "content", "id", "", "\x1b[2J", "prompt_id", "conversations",
        "x" * 300)  # fmt: skip
BYTES = (
    b"\x00", b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\n\n", b'"', b"{", b"}", b"[",
    b"]", b",", b":", b"\\", b"\xe2\x80\xa8", b"\x1b[31m", b"NaN", b"1e999", b"- ", b"#", b"&a ",
    b"*a", b"!!python/object:x ", b"\t", b"'", b"|", b"%", b"\xed\xa0\x80", b"9" * 5000,
    b"[" * 2000, b'{"a":' * 2000,
)  # fmt: skip


def value(good: Any, chance: random.Random) -> Any:
    """A copy of a JSON value with one to three places changed."""
    spoilt = copy.deepcopy(good)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(spoilt))
        if not places:
            return chance.choice(VALUES)
        _change(*chance.choice(places), chance)
    return spoilt


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with a key or position in it."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if _is_list(node) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


def _is_list(node: Any) -> bool:
    return isinstance(node, list)


def _change(node: Any, key: Any, chance: random.Random) -> None:
    how = chance.randrange(6)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, dict):
        node[chance.choice(KEYS)] = node.pop(key)
    elif how == 2 and isinstance(node, list):
        node.insert(key, copy.deepcopy(node[key]))
    elif how == 3 and isinstance(node, dict):
        node[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
    elif how == 4:
        node[key] = [node[key]] if chance.random() < 0.5 else {"value": node[key]}
    else:
        node[key] = copy.deepcopy(chance.choice(VALUES))


def data(good: bytes, chance: random.Random) -> bytes:
    """A copy of a file with one to three places changed."""
    spoilt = good
    for _ in range(chance.randint(1, 3)):
        start = chance.randint(0, len(spoilt))
        end = min(len(spoilt), start + chance.choice((0, 0, 1, 2, 8, 100)))
        middle = chance.choice(
            (b"", chance.choice(BYTES), spoilt[end : end + 30], spoilt[start:end] * 2)
        )
        spoilt = spoilt[:start] + middle + spoilt[end:]
    return spoilt


def as_json(spoilt: Any) -> str:
    """The value as JSON, with NaN and lone surrogates as they come."""
    return json.dumps(spoilt, ensure_ascii=True)
