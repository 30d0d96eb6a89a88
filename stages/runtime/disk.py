"""Writing so that a file is whole or the one before it, and what is told when the disk refuses."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from stages.errors import ResourceError

FULL = (errno.ENOSPC, errno.EDQUOT)
REASONS = {
    **dict.fromkeys(FULL, "the disk is full"),
    errno.EFBIG: "the limit on the size of a file is reached",
}
RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say which file or folder was being written when the disk refused.

    Raises:
        ResourceError: the disk is full, or fails in another way.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = number_of(error)
        if number is None:
            raise
        first = "free some space" if number in FULL else "mend what keeps it from being written"
        raise ResourceError(
            f"could not be written: {REASONS.get(number) or os.strerror(number)}",
            where=str(path),
            do=f"{first}, then run the same command again with --resume; what was saved before "
            "is whole",
        ) from error


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` to fill and rename; what is left of it after a failure goes.

    Raises:
        ResourceError: the disk refuses.
    """
    temporary = target.with_name(f".tmp-{target.name}")
    with writing(target):
        delete(temporary)
        temporary.mkdir()
        try:
            yield temporary
        except Exception:
            delete(temporary)  # a full disk needs the space
            raise


def number_of(error: BaseException) -> int | None:
    """The number of an operating system's error; safetensors tells it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    told = RUST_ERROR.search(str(error))
    return int(told[1]) if told else None


def flush(paths: Iterable[Path]) -> None:
    """Have files and folders reach the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step."""
    replace(path, text.encode("utf-8"))


def replace(path: Path, data: bytes) -> None:
    """Replace a file's content in one step; where that fails the file is the one before.

    Raises:
        ResourceError: the disk refuses.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    with writing(path):
        try:
            delete(temporary)  # a link would lead out of the folder
            temporary.write_bytes(data)
            flush([temporary])
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                delete(temporary)
            raise


def delete(path: Path) -> None:
    """Delete a file, a folder, or a link without what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink(missing_ok=True)
