"""The live display of a terminal: a bar per phase, the figures that matter, tables of samples."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, ConsoleDimensions
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rlhf_cli.console import MuteReporter, clean, figures, shorten

if TYPE_CHECKING:
    from types import TracebackType

NARROWEST, WIDEST = 20, 1000
"""Columns between which a terminal may say how wide it is; below, tables are no longer tables."""
FIGURES_SHOWN = 4
"""As many figures as fit beside a bar."""


class _Console(Console):
    """A console of a width that can be drawn in, whatever the environment or the terminal say."""

    @property  # type: ignore[misc]  # rich may set it, nobody here does
    def size(self) -> ConsoleDimensions:
        """COLUMNS where it is a number, else the terminal's columns, within bounds."""
        told = os.environ.get("COLUMNS", "")
        columns = int(told) if re.fullmatch("[0-9]{1,9}", told) else 0
        own = super().size
        width = min(max(columns or own.width, NARROWEST), WIDEST)
        return ConsoleDimensions(width, own.height)


def _without_sizes() -> dict[str, str]:
    """The environment without what rich would take for a size as it stands, 0 and ² included."""
    sizes = ("COLUMNS", "LINES")
    return {name: value for name, value in os.environ.items() if name not in sizes}


def console_on(stream: TextIO) -> Console:
    """A console that shows untrusted text as it stands, in any terminal."""
    return _Console(
        file=stream, markup=False, highlight=False, emoji=False, _environ=_without_sizes()
    )


class TerminalReporter(MuteReporter):
    """Bars that are redrawn in place; everything else scrolls by above them."""

    def __init__(self, stream: TextIO) -> None:
        self.console = console_on(stream)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}", markup=False),
            TextColumn("{task.fields[figures]}", markup=False, style="cyan"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=4,
        )
        self.tasks: list[TaskID] = []
        self.latest: list[dict[str, float]] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state of the bars and give the cursor back."""
        self.progress.stop()

    def note(self, text: str) -> None:
        """A line above the bars."""
        self.console.print(Text(clean(text)))

    def warn(self, text: str) -> None:
        """A yellow line above the bars."""
        self.console.print(Text(f"warning: {clean(text)}", style="yellow"))

    def begin(self, what: str, *, total: int | None, unit: str, done: int = 0) -> None:
        """A new bar, below those of the phases it is part of."""
        task = self.progress.add_task(
            clean(what), total=total, completed=done, unit=clean(unit), figures=""
        )
        self.tasks.append(task)
        self.latest.append({})
        self.progress.start()

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """Move the innermost bar; its figures stay until newer ones come."""
        if self.tasks:
            self.latest[-1].update(metrics or {})
            shown = _in_short(self.latest[-1])
            self.progress.update(self.tasks[-1], completed=done, figures=shown)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table above the bars; its cells are shown as they are, not as markup."""
        table = Table(title=Text(clean(title)))
        for column in columns:
            table.add_column(Text(clean(column)))
        for row in rows:
            table.add_row(*(Text(shorten(clean(cell))) for cell in row))
        self.console.print(table)

    def end(self) -> None:
        """The innermost bar goes; the last frame of the outermost one stays on the screen."""
        if not self.tasks:
            return
        task = self.tasks.pop()
        self.latest.pop()
        if not self.tasks:
            self.progress.stop()
        self.progress.remove_task(task)


def _in_short(metrics: Mapping[str, float]) -> str:
    """Such as ``loss 2.31 · kl 0.4``: the group of a metric is clear from the bar's name."""
    chosen = figures(metrics)
    speed = [figure for figure in chosen if figure[0] == "tokens/s"]
    others = [figure for figure in chosen if figure not in speed][: FIGURES_SHOWN - len(speed)]
    return " · ".join(f"{_short_name(name)} {value}" for name, value in others + speed)


def _short_name(name: str) -> str:
    group, _, rest = name.partition("/")
    if group == "loss":
        return "loss"
    return name if group in ("eval", "tokens") else rest
