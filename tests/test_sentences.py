"""What to do about an error is told in one style: from a small letter on, without a full stop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for package in ("stages", "rlhf_cli") for path in (ROOT / package).rglob("*.py")]


def told(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, beginning and end of every sentence given as ``do``, as far as they are constants."""
    for node in ast.walk(tree):
        given = []
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "do"]
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "do" for target in node.targets
        ):
            given.append(node.value)
        for value in given:
            parts = value.values if isinstance(value, ast.JoinedStr) else [value]
            first, last = (
                str(part.value) if isinstance(part, ast.Constant) else "x"
                for part in (parts[0], parts[-1])
            )
            yield value.lineno, first, last


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_to_do_begins_small_and_ends_without_a_full_stop(path: Path) -> None:
    for line, first, last in told(ast.parse(path.read_text(encoding="utf-8"))):
        assert first[:1] == first[:1].lower(), f"{path}:{line}: {first}"
        assert not last.endswith("."), f"{path}:{line}: {last}"


def test_a_sentence_of_another_style_would_be_seen() -> None:
    code = "raise DataError('x', do='Mend it.')\ndo = f'Give {n}.'"
    found = {(first[:1], last[-1:]) for _, first, last in told(ast.parse(code))}
    assert found == {("M", "."), ("G", ".")}
