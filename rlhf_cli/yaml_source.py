"""YAML 1.2 as plain values, with the place of every key and value.

Built on the node tree, not on loaded objects: scalars become null, truth values, numbers and text
by the rules of YAML 1.2 and nothing else (no dates, no sexagesimals, no ``on``, no objects).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from stages.config.base import Path

_MOST_VALUES = 10_000  # far more than a config has; a few aliases can ask for billions
_TOO_MANY = f"more than {_MOST_VALUES:,} values"
_DEEPEST = 32  # sections and lists within each other; a config has four
_NULL, _BOOL, _INT, _FLOAT, *_TEXTS = (
    f"tag:yaml.org,2002:{name}"
    for name in ("null", "bool", "int", "float", "str", "timestamp", "merge")
)
_MERGE = "tag:yaml.org,2002:merge"
_BASES = {"0x": 16, "0o": 8, "0b": 2}


class Mark(NamedTuple):
    """A place in a file, both numbers counted from 1."""

    line: int
    column: int


class Place(NamedTuple):
    """Where a key stands and where its value does; the same mark twice for an item of a list."""

    key: Mark
    value: Mark


class Document(NamedTuple):
    """The values of one YAML document and where each of them stands."""

    value: Any
    places: dict[Path, Place]


class NotYaml(Exception):
    """The text is not YAML that a config can be made of; ``mark`` is where."""

    def __init__(self, message: str, mark: Mark) -> None:
        super().__init__(message)
        self.mark = mark


class _BoundedComposer(Composer):
    """Refuses while it reads what no config is, before it has cost time or memory."""

    _depth = 0
    _values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One node and all within it."""
        self._depth += 1
        self._values += index is not None  # what has none is a key, or the whole
        if self._depth > _DEEPEST or self._values > _MOST_VALUES:
            what = "nested too deeply" if self._depth > _DEEPEST else _TOO_MANY
            raise NotYaml(what, _mark(self.parser.peek_event().start_mark))
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_yaml(text: str) -> Document:
    """One YAML 1.2 document; an empty text is null.

    Raises:
        NotYaml: broken syntax, a key given twice, a tag, nesting without end, or too much of it.
    """
    places: dict[Path, Place] = {}
    try:
        reader = YAML(typ="rt", pure=True)
        reader.Composer = _BoundedComposer
        root = reader.compose(text)
        value = None if root is None else _value(root, (), places, ())
    except MarkedYAMLError as error:
        raise NotYaml(_syntax(error), _mark(error.problem_mark or error.context_mark)) from None
    except YAMLError as error:
        raise NotYaml(
            "a control character", _mark_at(text, getattr(error, "position", 0))
        ) from None
    except RecursionError:
        raise NotYaml("nested too deeply", Mark(1, 1)) from None
    return Document(value, places)


def _syntax(error: MarkedYAMLError) -> str:
    parts = [part for part in (error.context, error.problem) if part]
    return f"not valid YAML: {', '.join(str(part) for part in parts)}"


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1) if mark else Mark(1, 1)


def _mark_at(text: str, position: int) -> Mark:
    before = text[:position]
    return Mark(before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)


def _value(node: Node, path: Path, places: dict[Path, Place], above: tuple[int, ...]) -> Any:
    """The plain value of a node; ``above`` are the nodes that contain it."""
    if id(node) in above:
        raise NotYaml("an alias that contains itself", _mark(node.start_mark))
    if len(places) > _MOST_VALUES:
        raise NotYaml(_TOO_MANY, _mark(node.start_mark))
    within = (*above, id(node))
    if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping(node, path, places, within)
    if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        return _list(node, path, places, within)
    if isinstance(node, ScalarNode):
        return _scalar(node)
    raise NotYaml(f"the tag {node.tag}, which a config has no use for", _mark(node.start_mark))


def _mapping(
    node: MappingNode, path: Path, places: dict[Path, Place], within: tuple[int, ...]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        at = _mark(key_node.start_mark)
        if not isinstance(key_node, ScalarNode):
            raise NotYaml("a key that is not a word", at)
        if key_node.tag == _MERGE:
            raise NotYaml(f"{key_node.value}: merge keys are not taken, write the keys out", at)
        key = str(key_node.value)
        inner = (*path, key)
        if key in values:
            raise NotYaml(f"{key}: given twice, first in line {places[inner].key.line}", at)
        # A value left out is placed by the parser where the next key begins.
        left_out = isinstance(value_node, ScalarNode) and not (value_node.value or value_node.style)
        places[inner] = Place(at, at if left_out else _mark(value_node.start_mark))
        values[key] = _value(value_node, inner, places, within)
    return values


def _list(
    node: SequenceNode, path: Path, places: dict[Path, Place], within: tuple[int, ...]
) -> list[Any]:
    values = []
    for index, item in enumerate(node.value):
        inner = (*path, index)
        at = _mark(item.start_mark)
        places[inner] = Place(at, at)
        values.append(_value(item, inner, places, within))
    return values


def _scalar(node: ScalarNode) -> Any:
    text = str(node.value)
    if node.tag == _NULL:
        return None
    if node.tag in _TEXTS:
        return _joined(text)
    if node.tag not in _READERS:
        raise NotYaml(f"the tag {node.tag}, which a config has no use for", _mark(node.start_mark))
    try:
        return _READERS[node.tag](text)
    except (ValueError, KeyError):
        return text


def _joined(text: str) -> str:
    """The text with each pair of surrogates, as JSON escapes write them, as its one character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _integer(text: str) -> int:
    digits = text.lower().lstrip("+-").replace("_", "")
    size = int(digits[2:], _BASES[digits[:2]]) if digits[:2] in _BASES else int(digits)
    return -size if text.startswith("-") else size


def _real(text: str) -> float:
    return float(text.lower().replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_READERS: dict[str, Callable[[str], Any]] = {_BOOL: _truth, _INT: _integer, _FLOAT: _real}
