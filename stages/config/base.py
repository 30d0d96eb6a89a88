"""What every config section is: closed, frozen, finite, documented; and how it becomes YAML.

Numbers are taken as people write them (``1e-5`` for a number, ``1e2`` for a whole one). A truth
value is not a number, and a number in quotes is text: both are refused, not converted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

Path = tuple[str | int, ...]

_LARGEST = 2**53  # the largest range of whole numbers that JSON carries exactly
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_NEEDS_ESCAPE = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")


def _whole(value: object) -> object:
    """A float without a fractional part as an integer, so that ``1e2`` counts as 100."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _from_home(value: str) -> str:
    """A path with its ``~``, which no shell replaces in YAML or behind ``KEY=``, made complete."""
    return os.path.expanduser(value)


Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Place = Annotated[Text, AfterValidator(_from_home)]
Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=_LARGEST), BeforeValidator(_whole)]
Whole = Annotated[int, Strict(), Field(ge=0, le=_LARGEST), BeforeValidator(_whole)]
Number = Annotated[float, Strict()]
Positive = Annotated[float, Strict(), Field(gt=0)]
NonNegative = Annotated[float, Strict(), Field(ge=0)]
Share = Annotated[float, Strict(), Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Strict(), Field(ge=0, lt=1)]
ShareAboveZero = Annotated[float, Strict(), Field(gt=0, le=1)]


class Section(BaseModel):
    """A group of keys that admits no others and does not change after it was read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Leaf(NamedTuple):
    """One value of a resolved config and where it stands."""

    path: Path
    value: Any


def kind(value: object) -> str:
    """The kind of a value, by which a key that takes several kinds chooses among them."""
    if isinstance(value, Mapping | BaseModel):
        return "<section>"
    if isinstance(value, list | tuple):
        return "<list>"
    if isinstance(value, str):
        return "<text>"
    return "<number>" if isinstance(value, int | float) and not isinstance(value, bool) else "<>"


def disagreement(key: str, message: str) -> PydanticCustomError:
    """Two keys that exclude each other; ``key``, relative to the section, is the one to look at."""
    # YAML can write half of a surrogate pair, which pydantic cannot put into its message.
    told = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return PydanticCustomError("disagreement", "{message}", {"message": told, "key": key})


def leaves(config: Section) -> Iterator[Leaf]:
    """Every value of a config in the order of its keys; a list of plain values is one value."""
    yield from _leaves(config.model_dump(), ())


def _leaves(value: Any, path: Path) -> Iterator[Leaf]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif _is_list_of_sections(value):
        for n, inner in enumerate(value):
            yield from _leaves(inner, (*path, n))
    else:
        yield Leaf(path, value)


def _is_list_of_sections(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)


def dotted(path: Path) -> str:
    """A path as it is written in an override: ``train.adam_betas.0``."""
    return ".".join(str(part) for part in path)


def to_yaml(config: Section, comments: Mapping[str, str] | None = None) -> str:
    """The whole config as YAML 1.2 in blocks, which reads back to an equal config.

    Args:
        config: a resolved config.
        comments: dotted key → what stands behind its value as a comment.
    """
    lines: list[str] = []
    opened: Path = ()
    for path, value in leaves(config):
        section = path[:-1]
        first = section[:1] if section[-1:] and isinstance(section[-1], int) else ()
        for depth in range(_shared(opened, section), len(section)):
            if not isinstance(section[depth], int):
                lines.append(f"{'  ' * depth}{_scalar(section[depth])}:")
        comment = (comments or {}).get(dotted(path))
        indent = "  " * len(section)
        if first and opened != section:
            indent = f"{indent[:-2]}- "  # the first key of an item of a list
        line = f"{indent}{_scalar(path[-1])}: {_flow(value)}"
        lines.append(f"{line}  # {comment}" if comment else line)
        opened = section
    return "\n".join(lines) + "\n"


def _shared(left: Path, right: Path) -> int:
    """How many leading sections two paths have in common."""
    pairs = zip(left, right, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _flow(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """A JSON scalar, without quotes where no YAML reader takes the word for anything but text."""
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
            return value
        quoted = json.dumps(value, ensure_ascii=False)
        return _NEEDS_ESCAPE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
    text = json.dumps(value)
    # Readers of YAML 1.1 take 1e-05 for text and 1.0e-05 for a number; YAML 1.2 accepts both.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
