"""JSON by the line, or one array of any length in bounded memory; each value with its place."""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Iterator
from typing import BinaryIO, NoReturn

from stages.errors import DataError

_BLOCK = 1 << 20  # bytes of an array that are read at a time
_CUT = 16  # an error this near to the end of what was read may come from the cut
_BLANK = " \t\n\r"


def parse_line(line: str, where: str) -> object:
    """The one value of a line."""
    try:
        value, stop = decode(line, len(line) - len(line.lstrip(" \t")))
    except json.JSONDecodeError as error:
        what = f"column {error.colno}: broken JSON: {error.msg}"
        raise DataError(what, where=where, do=_repair(line)) from error
    except (RecursionError, ValueError) as error:
        refuse(error, where)
    if line[stop:].strip():
        what = f"column {stop + 1}: more text follows the object"
        raise DataError(what, where=where, do="write one JSON object per line")
    return value


def _repair(line: str) -> str:
    if line.strip() == "{":
        return "write each record on one line (JSON Lines), or all of them in one array"
    return "repair or delete this line"


def refuse(error: Exception, where: str) -> NoReturn:
    """Name what is no broken JSON and yet no record."""
    if isinstance(error, RecursionError):
        raise DataError("too deeply nested", where=where, do="flatten this record") from error
    if isinstance(error, GivenTwice):
        raise DataError(str(error), where=where, do="keep one of its two values") from error
    what = str(error)
    if not isinstance(error, _NotFinite):
        what = f"a whole number of more than {sys.get_int_max_str_digits()} digits"
    raise DataError(what, where=where, do="use finite numbers or null") from error


def elements(stream: BinaryIO, name: str) -> Iterator[tuple[object, str]]:
    """The elements of a stream that is one JSON array, each with ``file:line`` where it starts."""
    text = _Window(stream, name)
    text.skip_blank()
    text.at += 1  # the opening bracket
    ended = ""
    while text.next_character() != "]":
        if ended:
            if text.next_character() != ",":
                text.broken("a comma or the closing bracket is missing", ended)
            text.at += 1
            text.skip_blank()
        where = text.place()
        value = text.value()
        ended = text.place()
        yield value, where
    text.at += 1
    if text.next_character():
        text.broken("text follows the closing bracket")


class _Window:
    """The part of a long text that is being read.

    Attributes:
        text: what is in memory.
        at: the next character.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.text, self.at = "", 0
        self._stream, self._name = stream, name
        self._line, self._counted = 1, 0  # the line of character number _counted
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def grow(self) -> bool:
        """Read on, at least as much as is waiting; False at the end."""
        data = self._stream.read(max(_BLOCK, len(self.text) - self.at))
        self._count()
        rest, self._counted = self.text[self.at :], 0
        try:
            self.text, self.at = rest + self._decoder.decode(data, final=not data), 0
        except UnicodeDecodeError as error:
            line = self._line + rest.count("\n") + data.count(b"\n", 0, error.start)
            what = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
            where = f"{self._name}:{line}"
            raise DataError(what, where=where, do="save the file as UTF-8") from error
        return bool(data)

    def skip_blank(self) -> None:
        """Go on to the next character that is not blank."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in _BLANK:
                self.at += 1
            if self.at < len(self.text) or not self.grow():
                return

    def next_character(self) -> str:
        """The next character that is not blank; empty at the end."""
        self.skip_blank()
        return self.text[self.at : self.at + 1]

    def place(self, position: int | None = None) -> str:
        """``file:line`` of a position, or of the next character."""
        self._count()
        further = 0 if position is None else self.text.count("\n", self.at, position)
        return f"{self._name}:{self._line + further}"

    def _count(self) -> None:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at

    def value(self) -> object:
        """The value that starts here, read on until it is complete."""
        while True:
            try:
                value, stop = decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if not (self._may_be_cut(error) and self.grow()):
                    what = f"column {error.colno}: broken JSON: {error.msg}"
                    self.broken(what, self.place(error.pos))
            except (RecursionError, ValueError) as error:
                refuse(error, self.place())
            else:
                self.at = stop
                return value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated") or error.pos > len(self.text) - _CUT

    def broken(self, what: str, where: str = "") -> NoReturn:
        """Refuse the array."""
        do = "repair the JSON of this file"
        raise DataError(what, where=where or self.place(), do=do)


class _NotFinite(ValueError):
    """A number that no float holds; Python's own ValueError is for integers of many digits."""


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFinite(f"{digits} is not a finite number")
    return number


class GivenTwice(ValueError):
    """A key that an object holds twice: which of the values is meant, nobody can say."""


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of its pairs.

    Raises:
        GivenTwice: two of them have the same key.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for n, key in enumerate(keys) if key in keys[:n])
        raise GivenTwice(f"the key {key!r} is given twice")
    return found


decode = json.JSONDecoder(
    parse_float=_finite, parse_constant=_finite, object_pairs_hook=unique
).raw_decode
