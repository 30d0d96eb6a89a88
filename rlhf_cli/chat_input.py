"""What a person, or a pipe, says: one turn a line, or several lines that belong together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple, TextIO

from stages.errors import DataError
from stages.runtime.signals import Stopped

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
BOM = b"\xef\xbb\xbf"

ReadLine = Callable[[str], str | None]
"""Takes the mark to show before a line, and gives the line without its end, or None at the end."""


class Entry(NamedTuple):
    """Something said; a ``command`` begins with a slash and stood in no quotes."""

    text: str
    command: bool


def entries(read: ReadLine) -> Iterator[Entry]:
    """Everything that is said, blank lines left out.

    A line that ends in a backslash goes on with the next; ``\"\"\"`` begins and ends a text. Ctrl-C
    within such a text drops what was begun; before it, and for SIGTERM, it is the reader's to say.
    """
    while (line := read(PROMPT)) is not None:
        try:
            entry = _whole(line, read)
        except Stopped:
            raise
        except KeyboardInterrupt:
            continue
        if entry.text.strip():
            yield entry


def _whole(line: str, read: ReadLine) -> Entry:
    if line.lstrip().startswith(QUOTES):
        return Entry(_quoted(line.lstrip().removeprefix(QUOTES), read), command=False)
    lines = [line]
    while lines[-1].endswith("\\"):
        following = read(MORE)
        lines[-1] = lines[-1][:-1]
        if following is None:
            break
        lines.append(following)
    return Entry("\n".join(lines), command=line.startswith("/"))


def _quoted(first: str, read: ReadLine) -> str:
    """The lines up to the closing quotes, or up to the end of the input."""
    lines: list[str] = []
    line: str | None = first
    while line is not None and not line.rstrip().endswith(QUOTES):
        lines.append(line)
        line = read(MORE)
    if line is not None:
        lines.append(line.rstrip().removesuffix(QUOTES))
    inner = lines[1:] if lines and not lines[0] else lines
    return "\n".join(inner[:-1] if inner and not inner[-1] else inner)


def from_pipe(stream: BinaryIO) -> ReadLine:
    """Lines of UTF-8, whatever the locale; nothing is shown before them."""
    number = 0

    def read(_: str) -> str | None:
        nonlocal number
        number += 1
        line = stream.readline()
        if not line:
            return None
        try:
            return (line.removeprefix(BOM) if number == 1 else line).decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise DataError(
                "is not UTF-8", where=f"stdin:{number}", do="save the text as UTF-8"
            ) from None

    return read


def from_terminal(stdout: TextIO, stderr: TextIO) -> ReadLine:
    """Lines that a person types, with editing and history where Python has readline.

    The mark goes to stderr where stdout is no terminal, so that stdout holds the answers alone.
    """
    edits = stdout.isatty()
    if edits:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (``input`` uses it once it is there)

    def read(mark: str) -> str | None:
        if not edits:
            print(mark, end="", file=stderr, flush=True)
        try:
            line = input(mark if edits else "")
        except EOFError:
            print(file=stderr)
            return None
        return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    return read


def reader() -> tuple[ReadLine, bool]:
    """The reader of standard input, and whether a person types there."""
    if sys.stdin.isatty():
        return from_terminal(sys.stdout, sys.stderr), True
    return from_pipe(sys.stdin.buffer), False
