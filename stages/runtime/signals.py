"""The first Ctrl-C or SIGTERM asks for a stop after the current step; the second leaves at once.

Where there is no step to finish, the first one ends the work too, by an exception. It is a
``KeyboardInterrupt``: no ``except Exception`` of a library takes it for a failure of its own.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal ended what was going on."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopRequest:
    """Whether a stop was asked for; a context that holds the signal handlers.

    Attributes:
        signum: the signal that came, 0 for none.
        leave: what the second signal does; it is told the signal's number.
        patient: whether a stop waits until it is asked for, or ends at once what goes on.
    """

    def __init__(
        self,
        leave: Callable[[int], None] = lambda signum: os._exit(128 + signum),
        *,
        patient: bool = True,
    ) -> None:
        self.signum = 0
        self.leave = leave
        self.patient = patient
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if _may_handle():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What goes on here is not cut short; a stop that was asked for meanwhile follows it."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient = before
        if self.signum and not self.patient:
            raise Stopped(self.signum)

    def _ask(self, signum: int, _: FrameType | None) -> None:
        if self.signum:
            self.leave(signum)
        self.signum = signum
        if not self.patient:
            raise Stopped(signum)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what goes on here as Ctrl-C does: what was begun is cleared away first."""

    def end(signum: int, _: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)  # a second one would cut the clearing short
        raise Stopped(signum)

    if not _may_handle():
        yield
        return
    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _may_handle() -> bool:
    return threading.current_thread() is threading.main_thread()
