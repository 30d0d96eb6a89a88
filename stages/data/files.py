"""Files on disk and on the hub as rows: one dict with its place at a time, in bounded memory."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from stages.data.records import Row
from stages.errors import DataError

HUB = "hub:"
_BOM = b"\xef\xbb\xbf"
_READ = "use JSON Lines (.jsonl), JSON, CSV, Parquet or text files"


def find(source: str | Path | Sequence[str | Path]) -> list[str]:
    """The files that a path, a glob or a list of them names, each once, sorted within a glob."""
    given = [source] if isinstance(source, str | Path) else list(source)
    names = [name for entry in given for name in _matches(str(entry))]
    if not names:
        raise DataError("no data file is named", do="give a path, a glob or a hub data set")
    return list(dict.fromkeys(names))


def _matches(entry: str) -> list[str]:
    if entry.startswith(HUB):
        return [entry]
    path = Path(entry).expanduser()
    if path.is_dir():
        raise DataError(
            "this is a folder, not a data file", where=entry, do=f"name its files: {entry}/*.jsonl"
        )
    if path.exists():
        return [str(path)]
    found = sorted(n for n in glob.glob(str(path), recursive=True) if Path(n).is_file())
    if not found:
        what = "no file matches" if glob.has_magic(entry) else "the data file does not exist"
        raise DataError(what, where=entry, do="check the path; relative ones start here")
    return found


def digest(name: str) -> str:
    """The hash of a file's bytes, or the fingerprint of a hub data set."""
    if name.startswith(HUB):
        return str(_hub(name)._fingerprint)
    state = blake2b(digest_size=16)
    with _open_raw(name) as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def rows(name: str) -> Iterator[Row]:
    """The rows of one file, in order. Text lines become ``{"text": line}``.

    Raises:
        DataError: the file is missing, unreadable, empty or broken; names file, line and column.
    """
    reader = _reader(name)
    empty = True
    for row in reader(name):
        empty = False
        yield row
    if empty:
        raise DataError("the file holds no record", where=name, do="put at least one record in it")


def _reader(name: str) -> Any:
    if name.startswith(HUB):
        return _hub_rows
    suffix = Path(name.removesuffix(".gz")).suffix.lower()
    table = {".txt": _text, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    return table.get(suffix, _json)


def _open_raw(name: str) -> BinaryIO:
    try:
        return open(name, "rb")
    except OSError as error:
        do = "check the path and its permissions"
        raise DataError(f"cannot read the file: {error.strerror}", where=name, do=do) from error


def _lines(name: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, without their ends."""
    for number, line in _raw_lines(name):
        if line.strip():
            yield number, line.rstrip("\r\n")


def _raw_lines(name: str) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends, split at line feeds only: U+2028 may stand in a string."""
    with _open_raw(name) as raw:
        stream: Any = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
        try:
            for number, line in enumerate(stream, start=1):
                data = line.removeprefix(_BOM) if number == 1 else line
                yield number, _decode(data, f"{name}:{number}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"the compressed file is damaged: {error}", where=name, do="compress it again"
            ) from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} of the line (0x{data[error.start]:02x}) is not UTF-8"
        raise DataError(what, where=where, do="save the file as UTF-8") from error


def _text(name: str) -> Iterator[Row]:
    for number, line in _lines(name):
        yield Row({"text": line}, f"{name}:{number}")


def _json(name: str) -> Iterator[Row]:
    for n, (number, line) in enumerate(_lines(name)):
        if n == 0 and line.lstrip().startswith("["):
            yield from _array(name)
            return
        yield _row(_parse(line, f"{name}:{number}"), f"{name}:{number}")


def _row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        what = f"a record must be an object, not {type(value).__name__}"
        raise DataError(what, where=where, do="write one JSON object per line")
    return Row(value, where)


def _array(name: str) -> Iterator[Row]:
    """The objects of a file that is one JSON array, each with the line it starts on."""
    text = "".join(line for _, line in _raw_lines(name))
    position, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("[") + 1)
    for n in count():
        start = _skip(text, position, " \t\n\r")
        if text[start : start + 1] == "]":
            return _nothing_after(text, start + 1, name)
        if n and text[start : start + 1] == ",":
            start = _skip(text, start + 1, " \t\n\r")
        elif n:
            _broken(name, line, "a comma or the closing bracket is missing")
        line += text.count("\n", position, start)
        value, stop = _parse_at(text, start, f"{name}:{line}")
        yield _row(value, f"{name}:{line}")
        line += text.count("\n", start, stop)
        position = stop
    return None


def _skip(text: str, position: int, blank: str) -> int:
    while position < len(text) and text[position] in blank:
        position += 1
    return position


def _nothing_after(text: str, position: int, name: str) -> None:
    rest = _skip(text, position, " \t\n\r")
    if rest < len(text):
        line = 1 + text.count("\n", 0, rest)
        _broken(name, line, "text follows the closing bracket")


def _broken(name: str, line: int, what: str) -> NoReturn:
    raise DataError(what, where=f"{name}:{line}", do="repair the JSON of this file")


def _parse(line: str, where: str) -> object:
    value, stop = _parse_at(line, _skip(line, 0, " \t"), where)
    if line[stop:].strip():
        what = f"column {stop + 1}: more text follows the object"
        raise DataError(what, where=where, do="write one JSON object per line")
    return value


def _parse_at(text: str, position: int, where: str) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        what = f"column {error.colno}: broken JSON: {error.msg}"
        raise DataError(what, where=where, do="repair or delete this line") from error
    except RecursionError as error:
        raise DataError("too deeply nested", where=where, do="flatten this record") from error
    except ValueError as error:
        raise DataError(str(error), where=where, do="use finite numbers or null") from error


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is not a finite number")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _csv(name: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if ".tsv" in Path(name).suffixes else ","
    reader = csv.reader((line for _, line in _raw_lines(name)), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        line = reader.line_num + 1
        for cells in reader:
            if cells:
                yield Row(_cells(header, cells, f"{name}:{line}"), f"{name}:{line}")
            line = reader.line_num + 1
    except csv.Error as error:
        where = f"{name}:{reader.line_num}"
        raise DataError(f"broken CSV: {error}", where=where, do="repair this line") from error


def _cells(header: list[str], cells: list[str], where: str) -> dict[str, str]:
    if len(header) != len(cells):
        what = f"{len(cells)} cells where the header has {len(header)}"
        raise DataError(what, where=where, do="quote cells that hold the delimiter")
    return dict(zip(header, cells, strict=True))


def _parquet(name: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        numbers = count(1)
        with pq.ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=512):
                for fields in batch.to_pylist():
                    yield Row(fields, f"{name}:{next(numbers)}")
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"not a readable Parquet file: {error}", where=name, do="write the file again"
        ) from error


def _hub_rows(name: str) -> Iterator[Row]:
    for number, fields in enumerate(_hub(name), start=1):
        yield Row(fields, f"{name}:{number}")


def _hub(name: str) -> Any:
    """The data set of ``hub:org/name[:config][@split]``; the split is ``train`` unless given."""
    path, _, split = name.removeprefix(HUB).partition("@")
    repository, _, config = path.partition(":")
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(repository, config or None, split=split or "train")
    except Exception as error:  # the hub client raises a family of its own for each cause
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        do = "check name, configuration, split and network: hub:org/name[:config][@split]"
        raise DataError(f"cannot load the data set: {reason}", where=name, do=do) from error
