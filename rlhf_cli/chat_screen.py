"""How answers are shown while they come: as plain text, in two columns, or as JSON.

The text of a model is untrusted: it passes through ``clean`` and is never read as markup.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from rlhf_cli.console import clean, is_live_terminal

if TYPE_CHECKING:
    from rich.table import Table

    from stages.chat import Reply

KEPT = "\n\t"
"""Control characters of an answer that only lay it out."""
COLUMNS_FROM = 100
"""Characters of a terminal from which on two answers stand side by side."""


class Screen(Protocol):
    """Shows the answers to one turn, one after the other."""

    def begin(self, policy: str) -> None:
        """An answer of this policy comes."""

    def piece(self, text: str) -> None:
        """More of the answer."""

    def end(self, reply: Reply) -> None:
        """The answer is complete."""


class PlainScreen:
    """Text as it comes, and a line below it where there is something to say of it.

    Args:
        out: where it goes.
        named: whether the policy's name stands above its answer.
        remarks: whether a person reads along, who is told how an answer ended.
    """

    def __init__(self, out: TextIO, *, named: bool, remarks: bool) -> None:
        self.out, self.named, self.remarks = out, named, remarks
        self.last = ""

    def begin(self, policy: str) -> None:
        """The name above the answer."""
        self.last = ""
        if self.named:
            self.out.write(f"{clean(policy)}:\n")

    def piece(self, text: str) -> None:
        """The text, made harmless, at once."""
        if text:
            self.out.write(clean(text, keep=KEPT))
            self.out.flush()
            self.last = text[-1]

    def end(self, reply: Reply) -> None:
        """The end of the line, the score, and for a person how the answer ended."""
        remark = remark_of(reply, endings=self.remarks)
        below = f"{remark}\n" if remark else ""
        self.out.write("\n" * (self.last != "\n") + below + "\n" * self.remarks)
        self.out.flush()


class JsonScreen:
    """One object a line for each answer, in ASCII, so that no character in it can steer."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def begin(self, policy: str) -> None:
        """Nothing yet."""

    def piece(self, text: str) -> None:
        """Nothing yet."""

    def end(self, reply: Reply) -> None:
        """The answer and what it answers."""
        from stages.data.records import to_json

        line = {
            "policy": reply.policy,
            "prompt": to_json(reply.prompt),
            "response": reply.response,
            "response_ids": reply.ids.tolist(),
            "ended": reply.ended,
            "score": reply.score,
        }
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()


class ColumnsScreen:
    """Two answers side by side, redrawn in place until both are there."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.texts: list[str] = []

    def begin(self, policy: str) -> None:
        """The next column."""
        self.texts.append("")

    def piece(self, text: str) -> None:
        """The text, made harmless."""
        self.texts[-1] += clean(text, keep=KEPT)

    def end(self, reply: Reply) -> None:
        """What there is to say of the answer, below it."""
        if remark := remark_of(reply, endings=True):
            self.texts[-1] += f"\n\n{remark}"

    def __rich__(self) -> Table:
        """The columns as they are now."""
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True, show_lines=False)
        for name in self.names:
            table.add_column(Text(clean(name)), ratio=1, overflow="fold")
        cells = [*self.texts, *[""] * len(self.names)][: len(self.names)]
        table.add_row(*(Text(cell) for cell in cells))
        return table


@contextmanager
def screen_for(
    policies: Sequence[str], out: TextIO, *, as_json: bool, person: bool
) -> Iterator[Screen]:
    """The screen that fits one turn, the number of its answers, and where they are shown."""
    if as_json:
        yield JsonScreen(out)
        return
    if len(policies) == 1 or not is_live_terminal(out):
        yield PlainScreen(out, named=len(policies) > 1, remarks=person)
        return
    from rich.live import Live

    from rlhf_cli.live import console_on

    console = console_on(out)
    if console.width < COLUMNS_FROM:
        yield PlainScreen(out, named=True, remarks=person)
        return
    columns = ColumnsScreen(policies)
    with Live(columns, console=console, redirect_stdout=False, redirect_stderr=False):
        yield columns


def remark_of(reply: Reply, *, endings: bool) -> str:
    """Such as ``[score 0.8312 · cut]``; empty where there is nothing to say."""
    said = [] if reply.score is None else [f"score {reply.score:.4f}"]
    if endings and not reply.ended:
        said.append("interrupted" if reply.interrupted else "cut at the limit")
    return f"[{' · '.join(said)}]" if said else ""
