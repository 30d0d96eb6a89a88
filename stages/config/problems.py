"""What is wrong with a config, in words: the key, its value, and what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stages.config.base import Path, Section, dotted
from stages.errors import ConfigError

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of names to names",
    "model_type": "a section of keys",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_NOT_FINITE = {"Infinity": ".inf", "-Infinity": "-.inf", "NaN": ".nan"}
_VERY_LIKE = 0.8  # of 1, as difflib measures it
_YAML_1_1_TRUTH = {"yes": "true", "on": "true", "no": "false", "off": "false"}


class Problem(NamedTuple):
    """One thing that is wrong: the key, what to say about it, and which place to point at."""

    path: Path
    message: str
    at: Literal["key", "value", "section"]


class InvalidConfig(ConfigError):
    """A config with everything that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        lines = [f"{dotted(p.path)}: {p.message}" if p.path else p.message for p in problems]
        super().__init__("\n".join(lines), do="correct the config and run the command again")
        self.problems = problems


def problems_of(
    error: ValidationError, config: type[Section], stages: Mapping[str, type[Section]]
) -> list[Problem]:
    """Every finding of pydantic as a problem in our words.

    A required key that is only mistyped is one problem, not an unknown and a missing one.

    Args:
        error: what pydantic found.
        config: the config class that was to be filled.
        stages: every stage's class by its word: a key may be unknown here and belong to another.
    """
    problems = [_problem(details, config, stages) for details in error.errors()]
    mistyped = {_meant(problem.path, config) for problem in problems if problem.at == "key"}
    return [p for p in problems if p.at != "section" or p.path not in mistyped]


def suggestion(word: str, known: list[str]) -> str:
    """``" (did you mean …?)"`` where a known word is close, otherwise nothing."""
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def shown(value: object) -> str:
    """A value as one writes it, shortened."""
    if isinstance(value, Mapping):
        return "a section of keys"
    if isinstance(value, list | tuple):
        return "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = _NOT_FINITE.get(text, text)
    return text if len(text) <= 60 else f"{text[:57]}…"


def section_at(config: type[Section], path: Path) -> type[Section] | None:
    """The class of the section at a path, or None where there is no such section.

    A part such as ``<http>`` chooses among the sections of a union the one of that ``type``.
    """
    found: list[type[Section]] = [config]
    for part in path:
        if isinstance(part, str) and part.startswith("<"):
            found = [s for s in found if _type_of(s) == part[1:-1]] or found
        elif isinstance(part, str):
            field = found[0].model_fields.get(part) if found else None
            found = list(_sections_in(field.annotation)) if field else []
    return found[0] if found else None


def _type_of(section: type[Section]) -> object:
    field = section.model_fields.get("type")
    return get_args(field.annotation)[0] if field else None


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The section classes in an annotation, those of a union in their order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def _problem(
    details: ErrorDetails, config: type[Section], stages: Mapping[str, type[Section]]
) -> Problem:
    path = _keys(details["loc"])
    if details["type"] == "extra_forbidden":
        return Problem(path, _unknown_key(details["loc"], config, stages), "key")
    if details["type"] == "missing" and isinstance(path[-1], int):
        return Problem(path[:-1], f"the list needs more than {path[-1]} of its values", "value")
    if details["type"] == "missing":
        return Problem(path, _missing_key(details["loc"], config), "section")
    if details["type"] == "disagreement":
        context = details["ctx"]
        key = (int(part) if part.isdecimal() else part for part in context["key"].split("."))
        return Problem((*path, *key), context["message"], "value")
    return Problem(path, _wrong_value(details), "value")


def _keys(path: Path) -> Path:
    """A path without the parts, such as ``<number>``, for the member of a union."""
    return tuple(part for part in path if not (isinstance(part, str) and part.startswith("<")))


def _unknown_key(path: Path, config: type[Section], stages: Mapping[str, type[Section]]) -> str:
    meant = _meant(path, config)
    owners = {word: other for word, other in stages.items() if _is_key(path, other)}
    if owners:
        # What the other stage has beside this key is something else than the key.
        apart = meant is None or any(_is_key(meant, other) for other in owners.values())
        hint = "" if meant is None or apart else f"; did you mean {dotted(meant)}?"
        return f"unknown key (one of {', '.join(owners)} configs only{hint})"
    if meant is None:
        section = section_at(config, path[:-1])
        return f"unknown key (known here: {', '.join(section.model_fields if section else ())})"
    if meant[:-1] == _keys(path)[:-1]:
        return f"unknown key (did you mean {meant[-1]}?)"
    outside = " outside of any section" if len(meant) == 1 else ""
    return f"unknown key (did you mean {dotted(meant)}{outside}?)"


def _meant(path: Path, config: type[Section]) -> Path | None:
    """The key that an unknown one probably means: very like it here, of its name, or like it."""
    name = str(path[-1])
    section = section_at(config, path[:-1])
    here = section.model_fields if section else {}
    if near := get_close_matches(name, here, n=1, cutoff=_VERY_LIKE):
        return _keys((*path[:-1], near[0]))
    if elsewhere := next((p for p in _key_paths(config, ()) if p[-1] == name), None):
        return elsewhere
    near = get_close_matches(name, here, n=1)
    return _keys((*path[:-1], near[0])) if near else None


def _is_key(path: Path, config: type[Section]) -> bool:
    section = section_at(config, path[:-1])
    return section is not None and str(path[-1]) in section.model_fields


def _key_paths(section: type[Section], prefix: Path) -> Iterator[Path]:
    for name, field in section.model_fields.items():
        yield (*prefix, name)
        inner = next(_sections_in(field.annotation), None)
        if inner:
            yield from _key_paths(inner, (*prefix, name))


def _missing_key(path: Path, config: type[Section]) -> str:
    section = section_at(config, path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    meaning = " ".join((field.description or "").split()) if field else ""
    return (
        f"missing key ({meaning[0].lower()}{meaning[1:].rstrip('.')})" if meaning else "missing key"
    )


def _wrong_value(details: ErrorDetails) -> str:
    kind, value = details["type"], details["input"]
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {details['ctx'][name]:g}, got {shown(value)}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {shown(value)}{_hint(kind, value)}"
    if kind == "literal_error":
        return _wrong_word(details)
    return _OTHER[kind](details) if kind in _OTHER else _as_pydantic_says(details)


def _wrong_word(details: ErrorDetails) -> str:
    words = details["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
    choice = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    value = details["input"]
    near = suggestion(value, words) if isinstance(value, str) else ""
    return f"expected {choice}, got {shown(value)}{near}"


def _hint(kind: str, value: object) -> str:
    """How the value would have to be written to be of the right kind, where that is plain."""
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f' (for text write it in quotes: "{shown(value)}")'
    if kind == "bool_type" and isinstance(value, str) and value.lower() in _YAML_1_1_TRUTH:
        return f" (write {_YAML_1_1_TRUTH[value.lower()]})"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return " (write it without quotes and commas)"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


def _as_pydantic_says(details: ErrorDetails) -> str:
    return f"{details['msg']}, got {shown(details['input'])}"


def _escaped(details: ErrorDetails) -> str:
    return json.dumps(details["input"])


def _length(details: ErrorDetails) -> str:
    context = details["ctx"]
    wanted = context.get("max_length") or f"at least {context['min_length']}"
    return f"expected a list of {wanted} values, got {context['actual_length']}"


_OTHER: dict[str, Callable[[ErrorDetails], str]] = {
    "finite_number": lambda details: f"must be a finite number, got {shown(details['input'])}",
    "string_unicode": lambda details: f"must be text of whole characters, got {_escaped(details)}",
    "string_too_short": lambda _: "must not be empty",
    "string_pattern_mismatch": lambda _: "must not contain a NUL character",
    "too_long": _length,
    "too_short": _length,
    "kind": _as_pydantic_says,
    "secret": lambda details: str(details["msg"]),  # without the value
}
