"""The disk as a place where anything may fail: every file operation passes through one seam.

``watch`` puts itself before the functions of ``os`` that change a disk, before ``open`` with its
writes and closes, and before safetensors' writer, counts the calls, and lets one of them fail or
end the process. Which calls there are is counted, not listed: a test asks for all of them.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors import torch as safetensors_torch

from stages.runtime import checkpoint

CHANGES = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "fsync", "truncate", "open")
Act = Callable[[], None]
Work = Callable[[], Any]


@dataclass
class Disk:
    """What happened to the files below a folder, and what is to happen.

    Attributes:
        below: other files are left alone.
        at: the number of the call that goes wrong, none for -1.
        act: what goes wrong: it raises or ends the process.
        after: whether the call is done first, or half done where it writes.
        log: the calls so far.
    """

    below: Path
    at: int = -1
    act: Act = lambda: None
    after: bool = False
    log: list[str] = field(default_factory=list)

    def call(
        self, name: str, work: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        """Do one operation, or let it go wrong."""
        self.log.append(name)
        if len(self.log) - 1 != self.at:
            return work()
        try:
            return (half or work)() if self.after else None
        finally:
            self.act()

    def holds(self, place: Any) -> bool:
        """Whether a path lies in the watched folder; numbers (descriptors) do."""
        if isinstance(place, int):
            return True
        path = os.path.abspath(os.fspath(place))
        return path.startswith(f"{self.below}{os.sep}") or path == str(self.below)


class Written:
    """A file open for writing, whose writes and close are operations of the disk."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        return self._disk.call("write", lambda: self._file.write(data), half)

    def close(self) -> None:
        self._disk.call("close", self._file.close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def watch(disk: Disk) -> Iterator[Disk]:
    """Let every change of the disk below a folder pass by ``disk.call``."""
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, made(getattr(owner, name)))

    for name in CHANGES:
        put(os, name, lambda real, name=name: _operation(disk, name, real))
    for owner in (builtins, io):
        put(owner, "open", lambda real: _opening(disk, real))
    for owner in (checkpoint, safetensors_torch):
        put(owner, "save_file", lambda real: _saving(disk, real))
    try:
        yield disk
    finally:
        for owner, name, real in reversed(kept):
            setattr(owner, name, real)


def _operation(disk: Disk, name: str, real: Any) -> Any:
    def run(place: Any, *rest: Any, **options: Any) -> Any:
        reads = name == "open" and not (rest and rest[0] & (os.O_WRONLY | os.O_RDWR))
        if reads or not (options.get("dir_fd") is not None or disk.holds(place)):
            return real(place, *rest, **options)
        return disk.call(name, lambda: real(place, *rest, **options))

    return run


def _opening(disk: Disk, real: Any) -> Any:
    def run(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or not disk.holds(file):
            return real(file, mode, *rest, **options)
        return Written(disk.call("open", lambda: real(file, mode, *rest, **options)), disk)

    return run


def _saving(disk: Disk, real: Any) -> Any:
    def run(tensors: Any, filename: Any, *rest: Any, **options: Any) -> Any:
        def half() -> None:
            real(tensors, filename, *rest, **options)
            os.truncate(filename, Path(filename).stat().st_size // 2)

        return disk.call("save_file", lambda: real(tensors, filename, *rest, **options), half)

    return run


def failing(number: int) -> Act:
    """An error of the operating system, in the words of Python."""

    def act() -> None:
        raise OSError(number, os.strerror(number))

    return act


def failing_in_rust(number: int) -> Act:
    """The same in the words of safetensors."""

    def act() -> None:
        text = f"I/O error: {os.strerror(number)} (os error {number})"
        raise SafetensorError(f"Error while serializing: {text}")

    return act


def killed() -> None:
    """What SIGKILL is to a process: nothing after it runs."""
    os._exit(9)


def operations(folder: Path, work: Callable[[], Any]) -> list[str]:
    """The operations of a piece of work, in order."""
    with watch(Disk(folder)) as disk:
        work()
    return disk.log


def in_a_child(disk: Disk, work: Callable[[], Any]) -> int:
    """Do the work in a forked process and return its exit code: 9 where it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with watch(disk):
                work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
