"""Files on disk and on the hub as rows: one dict with its place at a time, in bounded memory."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from stages.data import json_text
from stages.data.records import Cell, Row
from stages.errors import DataError

HUB, STDIN = "hub:", "-"
_BOM, _GZIP, _PARQUET = b"\xef\xbb\xbf", b"\x1f\x8b", b"PAR1"
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


def rows(name: str, columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """The rows of one file, in order. Text lines become ``{"text": line}``.

    Args:
        name: a file, a hub data set, or ``-`` for standard input.
        columns: foreign names → ours.

    Raises:
        DataError: the file is missing, unreadable, empty or broken; names file, line and column.
    """
    reader = _reader(name)
    empty = True
    for row in reader(name):
        if empty and columns:
            _require(columns, row)
        empty = False
        yield _renamed(row, columns) if columns else row
    if empty:
        raise DataError("the file holds no record", where=name, do="put at least one record in it")


def _require(columns: Mapping[str, str], row: Row) -> None:
    """A foreign name that the first row lacks is a mistake."""
    missing = [column for column in columns if column not in row.fields]
    if missing:
        found = ", ".join(map(str, row.fields))
        what = f"there is no column {missing[0]!r} to be renamed: the columns are {found}"
        do = "write the file's own names on the left: {theirs: ours}"
        raise DataError(what, where=row.origin, do=do)


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    fields = {columns.get(key, key): value for key, value in row.fields.items()}
    if len(fields) < len(row.fields):
        _require_unlike([columns.get(key, key) for key in row.fields], row.origin)
    return Row(fields, row.origin)


def _reader(name: str) -> Any:
    if name.startswith(HUB):
        return _hub_rows
    suffix = Path(name.removesuffix(".gz")).suffix.lower()
    table = {".txt": _text, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}
    return table.get(suffix, _json)


def _open_raw(name: str) -> io.BufferedReader:
    try:
        return open(name, "rb")
    except OSError as error:
        do = "check the path and its permissions"
        raise DataError(f"cannot read the file: {error.strerror}", where=name, do=do) from error


@contextmanager
def _opened(name: str) -> Iterator[io.BufferedReader]:
    """A file or standard input, behind its byte-order mark, decompressed where it is compressed."""
    with _standard_input() if name == STDIN else _open_raw(name) as raw:
        zipped = name.endswith(".gz") or raw.peek(2)[:2] == _GZIP
        try:
            stream: io.BufferedReader = raw
            if zipped:
                stream = io.BufferedReader(gzip.GzipFile(fileobj=raw))
            if stream.peek(3)[:3] == _BOM:
                stream.read(3)
            yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"the compressed file is damaged: {error}", where=name, do="compress it again"
            ) from error


@contextmanager
def _standard_input() -> Iterator[io.BufferedReader]:
    """Standard input, which stays open."""
    stream: Any = sys.stdin.buffer
    yield stream if hasattr(stream, "peek") else io.BufferedReader(stream)


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, without their ends, each with its place."""
    for where, line in _raw_lines(stream, name):
        if line.strip():
            yield where, line.rstrip("\r\n")


def _raw_lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, str]]:
    """Lines with their ends, split at line feeds only: U+2028 may stand in a string."""
    shown = "standard input" if name == STDIN else name
    for number, line in enumerate(stream, start=1):
        where = f"{shown}:{number}"
        yield where, _decode(line, where)


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} of the line (0x{data[error.start]:02x}) is not UTF-8"
        raise DataError(what, where=where, do="save the file as UTF-8") from error


def _text(name: str) -> Iterator[Row]:
    with _opened(name) as stream:
        for where, line in _lines(stream, name):
            yield Row({"text": line}, where)


def _json(name: str) -> Iterator[Row]:
    """JSON Lines, or the objects of one array."""
    with _opened(name) as stream:
        head = stream.peek(1).lstrip()[:4]
        if head == _PARQUET:
            what = "this is a Parquet file"
            raise DataError(what, where=name, do="give its name the ending .parquet")
        if head[:1] == b"[":
            for value, where in json_text.elements(stream, name):
                yield _row(value, where)
            return
        for where, line in _lines(stream, name):
            yield _row(json_text.parse_line(line, where), where)


def _row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        what = f"a record must be an object, not {type(value).__name__}"
        raise DataError(what, where=where, do="write one JSON object per line")
    return Row(value, where)


def _csv(name: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if ".tsv" in Path(name).suffixes else ","
    with _opened(name) as stream:
        lines = (line for _, line in _raw_lines(stream, name))
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = [column.strip() for column in next(reader, [])]
            _require_unlike(header, f"{name}:1")
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield Row(_cells(header, cells, f"{name}:{line}"), f"{name}:{line}")
                line = reader.line_num + 1
        except csv.Error as error:
            where = f"{name}:{reader.line_num}"
            raise DataError(f"broken CSV: {error}", where=where, do="repair this line") from error


def _require_unlike(columns: Sequence[str], where: str) -> None:
    """A record holds one value of a name; columns without one may be many."""
    for column, times in Counter(filter(None, columns)).items():
        if times > 1:
            what = f"{'two' if times == 2 else times} columns are called {column!r}"
            raise DataError(what, where=where, do="give each column a name of its own")


def _cells(header: list[str], cells: list[str], where: str) -> dict[str, Cell]:
    if len(header) != len(cells):
        what = f"{len(cells)} cells where the header has {len(header)}"
        raise DataError(what, where=where, do="quote cells that hold the delimiter")
    return dict(zip(header, map(Cell, cells), strict=True))


def _parquet(name: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        numbers = count(1)
        with pq.ParquetFile(name) as file:
            columns = [field.name for field in file.schema_arrow if not _is_beside(field.type)]
            _require_unlike(columns, name)
            for batch in file.iter_batches(batch_size=512, columns=columns):
                for fields in batch.to_pylist():
                    yield Row(fields, f"{name}:{next(numbers)}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"not a readable Parquet file: {error}", where=name, do="write the file again"
        ) from error


def _is_beside(kind: Any) -> bool:
    """Times and bytes: no format has them, and Python cannot hold each of them."""
    import pyarrow as pa

    known = pa.types
    return bool(known.is_temporal(kind) or known.is_binary(kind) or known.is_large_binary(kind))


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
