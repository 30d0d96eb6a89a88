"""``metrics.jsonl``: one object per logged row, and the means it is made of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.runtime.disk import replace, writing

Row = dict[str, Any]


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


def cut_back(path: Path, step: int, iteration: int) -> None:
    """Keep the rows up to a training state; a torn last line goes as well.

    An iteration of ppo that a checkpoint holds unfinished is logged at the checkpoint's own step.
    """
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _until(line, step, iteration)]
    if kept != lines:
        replace(path, b"".join(kept))


def _until(line: bytes, step: int, iteration: int) -> bool:
    try:
        row = json.loads(line)
        known = int(row["step"]) <= step and int(row.get("iteration", 0)) <= iteration
        return line.endswith(b"\n") and known
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False
