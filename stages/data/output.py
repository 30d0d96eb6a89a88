"""A new file of records, which is there only when it is complete."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from stages.data.files import STDIN
from stages.errors import ConfigError


@contextmanager
def opened(path: Path, *sources: str, force: bool) -> Iterator[TextIO]:
    """A new file, compressed where its name ends in ``.gz``, that is there only when complete.

    A link stays one: the file that it leads to is written.

    Args:
        path: of the new file.
        sources: files and folders that are read for it, and never replaced; ``-`` is what
            standard input reads.
        force: whether a file that is there already may go.

    Raises:
        ConfigError: it is there already, belongs to what is read, is no regular file, or cannot
            be written.
    """
    target = Path(os.path.realpath(path))
    _require_writable(path, target, sources, force=force)
    try:
        number, name = tempfile.mkstemp(prefix=".tmp-", dir=target.parent)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    try:
        os.close(number)
        with (gzip.open if path.suffix == ".gz" else open)(name, "wt", encoding="utf-8") as out:
            yield out
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except OSError as error:  # a full disk does not say which file it was
        error.filename = error.filename or str(path)
        raise
    finally:
        Path(name).unlink(missing_ok=True)


def _require_writable(path: Path, target: Path, sources: Sequence[str], *, force: bool) -> None:
    """What stands in the place of the new file is nothing, or a file that is meant to go."""
    where = f"--output {path}"
    if target.is_symlink():
        raise _unwritable(path, "a link that leads to itself")
    if target.is_dir():
        do = "give the name of a file in it"
        raise ConfigError("is a folder", where=where, do=do)
    if target.exists() and not target.is_file():
        do = "give --output -, and lead standard output there"
        raise ConfigError("is a device or a pipe, which no file replaces", where=where, do=do)
    for source in sources:
        do = "give the new file another name"
        if target.exists() and _is_read(target, source):
            raise ConfigError("is a file that is read", where=where, do=do)
        if Path(source).is_dir() and _lies_in(target, Path(source)):
            raise ConfigError(f"lies in {source}, which is read", where=where, do=do)
    if target.exists() and not force:
        do = "give another name, or replace it with --force"
        raise ConfigError("is there already", where=where, do=do)


def _is_read(target: Path, source: str) -> bool:
    with suppress(OSError):  # no source, or a standard input that is closed
        read = os.fstat(0) if source == STDIN else os.stat(source)
        return os.path.samestat(target.stat(), read)
    return False


def _lies_in(target: Path, folder: Path) -> bool:
    """Whether it is below the folder, or below what a link in the folder leads to."""
    links = (path for path in folder.rglob("*") if path.is_symlink())
    return any(target.is_relative_to(os.path.realpath(path)) for path in (folder, *links))


def _unwritable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(
        f"cannot be written ({why})",
        where=f"--output {path}",
        do="give a file in a folder that exists and that this user may write into",
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
