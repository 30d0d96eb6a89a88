"""``metrics.jsonl``: one object per logged row, and the means it is made of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.runtime.disk import flush, replace, writing

Row = dict[str, Any]
DAMAGED = ".damaged"
"""What the name of a log is followed by in the name of the file with its damaged lines."""


@dataclass
class Window:
    """The mean of each metric since the last logged row; undefined values are left out."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of one step."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self.sums[name] = self.sums.get(name, 0.0) + value
                self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """The mean of each metric so far."""
        return {name: total / self.counts[name] for name, total in self.sums.items()}

    def take(self) -> dict[str, float]:
        """The means, and start anew."""
        means = self.means()
        self.sums, self.counts = {}, {}
        return means


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row to a JSON-lines file.

    Raises:
        ResourceError: the disk refuses; part of the row may be there, which ``cut_back`` removes.
    """
    line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    with writing(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(line)


def cut_back(path: Path, step: int, iteration: int) -> list[int]:
    """Keep the rows up to a training state; a torn last line goes as well.

    An iteration of ppo that a checkpoint holds unfinished is logged at the checkpoint's own step.
    A whole line that is no row is set aside, into a file beside it: nobody can say what it held.

    Returns:
        The lines that were set aside, counted from 1.

    Raises:
        ResourceError: the disk refuses; the file is as it was.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines = file.readlines()  # they end at line feeds alone
    states = [_state(line) for line in lines if line.endswith(b"\n")]
    damaged = [n for n, state in enumerate(states) if state is None and lines[n].strip()]
    kept = [n for n, state in enumerate(states) if state and _within(state, step, iteration)]
    if damaged:
        aside = path.with_name(path.name + DAMAGED)
        with writing(aside), aside.open("ab") as file:
            file.writelines(lines[n] for n in damaged)
        flush([aside])
    if len(kept) < len(lines):
        replace(path, b"".join(lines[n] for n in kept))
    return [n + 1 for n in damaged]


def _within(state: tuple[int, int], step: int, iteration: int) -> bool:
    return state[0] <= step and state[1] <= iteration


def _state(line: bytes) -> tuple[int, int] | None:
    """Step and iteration of a row, or None where it is no row."""
    try:
        row = json.loads(line)
        return int(row["step"]), int(row.get("iteration", 0))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
