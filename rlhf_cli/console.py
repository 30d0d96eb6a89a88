"""How a stage's progress reaches a person: a live bar on a terminal, plain lines elsewhere.

Everything here goes to stderr; results go to stdout and are printed by the commands. Text that
comes from data or models is untrusted: it may hold control sequences and rich markup, so it passes
through ``clean`` and is never parsed as markup.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from stages.runtime.reporter import Reporter, SilentReporter

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

KEY_FIGURES = (
    "loss/sft",
    "loss/ranking",
    "objective/score",
    "objective/kl",
    "reward_model/accuracy",
    "rollout/response_length_mean",
    "rollout/ended",
    "eval/loss",
    "eval/perplexity",
    "eval/accuracy",
    "eval/margin",
    "eval/score",
    "eval/kl",
)
SPEED = "time/tokens_per_second"
CELL_WIDTH = 400
"""Characters of a table's cell that are shown."""


class ConsoleReporter(Reporter, Protocol):
    """A reporter that leaves the terminal as it found it, whatever ends the stage."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_reporter(*, as_json: bool, quiet: bool) -> ConsoleReporter:
    """The reporter that fits this process and where its stderr goes."""
    if not is_main_process():
        return MuteReporter()
    if quiet:
        return QuietReporter(sys.stderr)
    if as_json or not is_live_terminal(sys.stderr):
        return PlainReporter(sys.stderr)
    from rlhf_cli.live import TerminalReporter

    return TerminalReporter(sys.stderr)


def is_main_process() -> bool:
    """Whether this process speaks for its world; a process outside of any world does."""
    return os.environ.get("RANK", "0") == "0"


def is_live_terminal(stream: TextIO) -> bool:
    """Whether lines may be redrawn: a real terminal whose user has not asked for plain text."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return stream.isatty() and not plain


def silence_libraries(*, debug: bool) -> None:
    """Switch off the bars, adverts and telemetry of the libraries; before they are imported."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if not sys.warnoptions:  # neither python -W nor PYTHONWARNINGS asks for them
            warnings.simplefilter("ignore")


def clean(text: str, *, keep: str = "") -> str:
    """Make control and formatting characters visible, so that text cannot steer a terminal.

    Args:
        text: untrusted text.
        keep: characters that stay as they are, such as a newline.

    Returns:
        The text with, for example, an escape character written as ``\\x1b``.
    """
    return "".join(c if c in keep or _is_harmless(c) else _escape(c) for c in text)


def shorten(text: str, width: int = CELL_WIDTH) -> str:
    """The first ``width`` characters, with a mark where something is missing."""
    return text if len(text) <= width else text[: width - 1] + "…"


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The few numbers of a row that matter while one watches, in their fixed order."""
    chosen = [(name, f"{metrics[name]:.4g}") for name in KEY_FIGURES if name in metrics]
    if SPEED in metrics:
        chosen.append(("tokens/s", f"{metrics[SPEED]:.0f}"))
    return chosen


def duration(seconds: float) -> str:
    """Seconds as people say them: 42s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _is_harmless(character: str) -> bool:
    """Not a control (Cc), formatting (Cf: bidi overrides among them), surrogate or separator."""
    joins_letters = character in "\u200c\u200d"
    return joins_letters or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class MuteReporter(SilentReporter):
    """For the processes of a world that do not speak."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to restore."""


class QuietReporter(MuteReporter):
    """Warnings only."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def warn(self, text: str) -> None:
        """One line that starts with ``warning:``."""
        self._line(f"warning: {clean(text)}")

    def _line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class PlainReporter(QuietReporter):
    """One line per event, without control characters: for files, pipes and dumb terminals."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.phases: list[_Phase] = []

    def note(self, text: str) -> None:
        """The text as one line."""
        self._line(clean(text))

    def begin(self, what: str, *, total: int | None, unit: str, done: int = 0) -> None:
        """A line that names the phase and its extent."""
        phase = _Phase(clean(what), total, clean(unit), done)
        self.phases.append(phase)
        extent = "" if total is None else f": {total} {phase.unit}"
        resumed = f", {done} done before" if done else ""
        self._line(f"{phase.what}{extent}{resumed}")

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        """A line for each logged row; nothing in between."""
        if metrics and self.phases:
            phase = self.phases[-1]
            shown = "".join(f"  {name} {value}" for name, value in figures(metrics))
            self._line(f"{phase.position(done)}{shown}{phase.remaining(done)}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The title, then a block of ``column: cell`` lines per row."""
        self._line(clean(title))
        for row in rows:
            cells = [f"{c}: {shorten(clean(cell))}" for c, cell in zip(columns, row, strict=True)]
            self._line("  - " + "\n    ".join(cells))

    def end(self) -> None:
        """The innermost phase is over."""
        if self.phases:
            self.phases.pop()


class _Phase:
    """A phase of a stage and the clock that runs since it began."""

    def __init__(self, what: str, total: int | None, unit: str, done: int) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.begun_at = done
        self.start = time.monotonic()

    def position(self, done: int) -> str:
        """Such as ``sft: 10/400 steps``."""
        extent = "" if self.total is None else f"/{self.total}"
        return f"{self.what}: {done}{extent} {self.unit}"

    def remaining(self, done: int) -> str:
        """The time the rest will take at the speed so far, where there is a rest."""
        finished = done - self.begun_at
        if self.total is None or finished <= 0 or done >= self.total:
            return ""
        per_unit = (time.monotonic() - self.start) / finished
        return f"  eta {duration(per_unit * (self.total - done))}"
