"""A process that has imported everything once and forks a child for each trial.

Nothing here may run an operation of torch before the last fork: a forked child of a process with
threads of torch hangs. So the tiny models are made in a child as well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds; a trial takes about one


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        code: its exit code, negative for a signal.
        value: what its work returned; None where it did not come so far.
        text: what it wrote to stdout and stderr.
    """

    code: int
    value: Any
    text: str


class Child:
    """A forked process that does one piece of work in a folder of its own."""

    def __init__(self, folder: Path, name: str, work: Callable[[], Any]) -> None:
        self._answer = folder / f"{name}.json"
        self._text = folder / f"{name}.txt"
        self.started = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work)

    def _run(self, work: Callable[[], Any]) -> None:
        code = 1
        try:
            os.setsid()
            descriptor = os.open(self._text, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            value = work()
            self._answer.write_text(json.dumps(value), encoding="utf-8")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, signum: int) -> None:
        """A signal to the child; one that has ended is left alone."""
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return

    def wait(self, patience: float = PATIENCE) -> Ended:
        """Wait for the end; a child that hangs is killed and counts as such."""
        ends = time.monotonic() + patience
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > ends:
                self.send(signal.SIGKILL)
                _, status = os.waitpid(self.pid, 0)
                return Ended(-99, None, f"hung for {patience} s\n{self._read()}")
            time.sleep(0.002)
        value = json.loads(self._answer.read_text()) if self._answer.exists() else None
        return Ended(os.waitstatus_to_exitcode(status), value, self._read())

    def _read(self) -> str:
        return self._text.read_text(errors="replace") if self._text.exists() else ""


def forked(folder: Path, name: str, work: Callable[[], Any]) -> Ended:
    """Do a piece of work in a child and wait for it."""
    return Child(folder, name, work).wait()
