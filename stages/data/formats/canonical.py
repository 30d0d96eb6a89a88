"""Our own lines: a prompt with its ranked responses, with one response, or alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.data import fields as f
from stages.data.records import Demonstration, Prompt, Ranking, Record, Response, Row


def is_canonical(fields: Mapping[str, Any]) -> bool:
    """A prompt with ``responses``, or with ``response`` and no pair of answers beside it."""
    paired = "chosen" in fields and "rejected" in fields
    return "prompt" in fields and ("responses" in fields or ("response" in fields and not paired))


def read(row: Row) -> Record:
    """One line, whichever of the three records it is; a table has null in the others' columns."""
    if row.fields.get("responses") is not None:
        return _ranking(row)
    if row.fields.get("response") is not None:
        return _demonstration(row)
    return _without_answer(row)


def prompt_only(row: Row) -> Prompt:
    """The prompt of a line."""
    field = "prompt" if "prompt" in row.fields or "input" not in row.fields else "input"
    return Prompt(f.prompt(f.get(row, field), row.at(field)), row.origin)


def _without_answer(row: Row) -> Record:
    """A prompt; but a null where the file's other answers stand is a mistake."""
    given = [name for name in ("response", "responses") if name in row.fields]
    if len(given) == 1:
        kind = f.text if given == ["response"] else f.items
        kind(row.fields[given[0]], row.at(given[0]))
    return prompt_only(row)


def _demonstration(row: Row) -> Demonstration:
    text = f.text(f.get(row, "response"), row.at("response"))
    flags = _flags(row.fields.get("flags"), row.at("flags"))
    return Demonstration(prompt_only(row).prompt, Response(text, flags=flags), row.origin)


def _ranking(row: Row) -> Ranking:
    given = f.items(row.fields["responses"], row.at("responses"))
    return Ranking(
        prompt=prompt_only(row).prompt,
        responses=tuple(_response(r, row.at(f"responses[{n}]")) for n, r in enumerate(given)),
        origin=row.origin,
        id=f.name(row.fields.get("id")),
        source=f.optional_text(row.fields.get("source"), row.at("source")),
        labeler=f.name(row.fields.get("labeler")),
        margin=f.number(row.fields.get("margin"), row.at("margin")),
    )


def _response(value: object, where: str) -> Response:
    given = f.mapping(value, where)
    if "text" not in given:
        f.wrong("the field is missing", f"{where}.text", "every response needs a text")
    return Response(
        text=f.text(given["text"], f"{where}.text"),
        rank=f.rank(given.get("rank"), f"{where}.rank"),
        score=f.number(given.get("score"), f"{where}.score"),
        ids=_ids(given.get("ids"), f"{where}.ids"),
        vocabulary=f.optional_text(given.get("vocabulary"), f"{where}.vocabulary"),
        flags=_flags(given.get("flags"), f"{where}.flags"),
        model=f.name(given.get("model")),
    )


def _ids(value: object, where: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    given = f.items(value, where)
    for n, token in enumerate(given):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            f.wrong(f"must be a token id, not {token!r}", f"{where}[{n}]")
    return tuple(given)


def _flags(value: object, where: str) -> tuple[str, ...]:
    given = [] if not value else f.items(value, where)
    return tuple(f.text(flag, f"{where}[{n}]") for n, flag in enumerate(given))
