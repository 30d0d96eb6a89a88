"""Tokenised records in a memory-mapped Arrow file, kept in the user's cache folder by content.

The folder's name is the hash of all that decides its contents, so nothing stale is ever found. It
is written beside its place and renamed when complete; a damaged one is built again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from stages.errors import ResourceError

_DATA, _ABOUT = "records.arrow", "about.json"
_NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}

Write = Callable[[], tuple[Generator[bytes, None, None], Callable[[], dict[str, Any]]]]


def open_or_build(
    key: str, schema: pa.Schema, output: Path | None, write: Write
) -> tuple[list[pa.RecordBatch], dict[str, Any]]:
    """The batches and the report stored under ``key``; built by ``write`` where they are not.

    Args:
        key: hash of everything that decides the contents.
        schema: the columns.
        output: the run folder, used where the cache folder cannot be written.
        write: returns the batches to store, as Arrow messages, and, after they are used up, the
            report on them.
    """
    places = _places(output)
    for place in places:
        found = _read(place / key)
        if found is not None:
            return found
    for place in places:
        folder = _folder_in(place)
        if folder is None:
            continue
        try:
            return _build(folder, place / key, schema, write)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
    raise ResourceError(
        "no folder can hold the tokenised records",
        where=", ".join(map(str, places)),
        do="free some disk space, or let RLHF_CACHE name a folder that can be written",
    )


def _places(output: Path | None) -> list[Path]:
    own = os.environ.get("RLHF_CACHE")
    home = Path(own).expanduser() if own else Path.home() / ".cache" / "rlhf"
    return [home / "data", *([output / "cache"] if output else [])]


def _folder_in(place: Path) -> Path | None:
    """A new folder to write into, or None where the place can hold none, for whatever reason."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".tmp-", dir=place))
    except OSError:
        return None


def _build(
    folder: Path, final: Path, schema: pa.Schema, write: Write
) -> tuple[list[pa.RecordBatch], dict[str, Any]]:
    try:
        messages, report = write()
        with closing(messages):
            _write(folder / _DATA, schema, messages)
        about = {"report": report(), "hash": _hash(folder / _DATA)}
        (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        _publish(folder, final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = _read(final)
    assert found is not None, "the cache that was just written cannot be read"
    return found


def _publish(folder: Path, final: Path) -> None:
    """Move a complete folder to its place; one that another process put there is as good."""
    if final.exists() and _read(final) is None:
        shutil.rmtree(final)
    with suppress(OSError):
        folder.rename(final)


def _write(path: Path, schema: pa.Schema, messages: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for message in messages:
                if message:
                    writer.write_batch(pa.ipc.read_record_batch(message, schema))
        file.flush()
        os.fsync(file.fileno())


def _read(folder: Path) -> tuple[list[pa.RecordBatch], dict[str, Any]] | None:
    """The stored batches, or None where they are missing, incomplete or damaged."""
    try:
        about: dict[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        if about["hash"] != _hash(folder / _DATA):
            return None
        reader = pa.ipc.open_file(pa.memory_map(str(folder / _DATA)))
        return [reader.get_batch(n) for n in range(reader.num_record_batches)], about["report"]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def _hash(path: Path) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()
