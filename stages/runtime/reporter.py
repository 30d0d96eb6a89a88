"""How a stage speaks: a small protocol that the terminal implements, and the silent default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Reporter(Protocol):
    """What a stage tells about itself while it works; only the main process speaks."""

    def note(self, text: str) -> None:
        """One line of information, such as what was recognised or which fallback was taken."""

    def warn(self, text: str) -> None:
        """One line about something that is probably not what the user wants."""

    def begin(self, what: str, *, total: int | None, unit: str, done: int = 0) -> None:
        """A phase starts: ``what`` (such as "sft"), counted in ``unit`` up to ``total``."""

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """``done`` units of the phase are finished; ``metrics`` is the row just logged, if any."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A small table, such as sampled answers with their scores. Cells are untrusted text."""

    def end(self) -> None:
        """The phase is over."""


class SilentReporter:
    """Says nothing: for tests, for library use and for processes other than the main one."""

    def note(self, text: str) -> None:
        """Nothing."""

    def warn(self, text: str) -> None:
        """Nothing."""

    def begin(self, what: str, *, total: int | None, unit: str, done: int = 0) -> None:
        """Nothing."""

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """Nothing."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""
