"""Code of the user's in this process: what it changes of the process does not outlast it.

What it prints goes to standard error, since standard output may hold a result that is read by a
program.

The current folder is where relative paths of the config lead, so that a reward which changes it
would have the next checkpoint written elsewhere; without gradients no step can be taken; another
number of threads changes the rounding, and another handler lets no signal stop the run.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NoReturn

import torch

from stages.runtime.signals import may_handle


@contextmanager
def as_found() -> Iterator[None]:
    """Folder, signal handlers, streams and settings of torch are again what they were."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with ExitStack() as after:
        after.callback(torch.set_default_dtype, dtype)
        after.callback(_set_threads, threads)
        after.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        if may_handle():
            for signum in (signal.SIGINT, signal.SIGTERM):
                after.callback(signal.signal, signum, signal.getsignal(signum))
        after.callback(os.chdir, os.getcwd())
        after.callback(setattr, os, "_exit", os._exit)
        os._exit = _leaves_only_a_fork(os._exit, os.getpid())  # type: ignore[assignment]
        after.enter_context(_stdout_is_stderr())
        after.callback(_end_unless, os.getpid())
        yield


class _Lent:
    """A stream of this process in the hands of code that may close it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        """Leave it open."""


@contextmanager
def _nothing_to_read() -> Iterator[None]:
    """Standard input is empty: what stands there is the command's, such as the turns of a chat."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Standard output leads to standard error, for Python and for what it starts."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed: then there is nothing to corrupt
        kept = None
    lent: Any = _Lent(sys.stderr)
    try:
        with redirect_stdout(lent), redirect_stderr(lent), _nothing_to_read():
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _leaves_only_a_fork(leave: Callable[[int], NoReturn], owner: int) -> Callable[[int], NoReturn]:
    """``os._exit`` that ends a process which the code forked off, and raises in this one."""

    def leaving(code: int) -> NoReturn:
        if os.getpid() == owner:
            raise SystemExit(code)
        leave(code)

    return leaving


def _set_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _end_unless(pid: int) -> None:
    """A process that the code forked off and let return would do all that follows a second time."""
    if os.getpid() != pid:
        os._exit(0)
