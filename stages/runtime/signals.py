"""The first Ctrl-C or SIGTERM asks for a stop after the current step; the second leaves at once.

Where there is no step to finish, the first one ends the work too, by an exception. It is a
``KeyboardInterrupt``: no ``except Exception`` of a library takes it for a failure of its own.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SOON = 0.02  # seconds, in which a finaliser is over

_replaced: list[dict[int, Any]] = []
"""The handlers in whose place ours stand, the outermost first."""


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
        if may_handle():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._ask)
            _replaced.append(self._previous)
        self._heard = _heard(self._forget)
        self._heard.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.__exit__(None, None, None)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._previous in _replaced:
            _replaced.remove(self._previous)

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

    def _forget(self) -> None:
        self.signum = 0


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what goes on here as Ctrl-C does: what was begun is cleared away first."""

    def end(signum: int, _: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)  # a second one would cut the clearing short
        raise Stopped(signum)

    if not may_handle():
        yield
        return
    previous = signal.signal(signal.SIGTERM, end)
    _replaced.append({signal.SIGTERM: previous})
    try:
        with _heard(lambda: signal.signal(signal.SIGTERM, end)):
            yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        _replaced.pop()


@contextmanager
def _heard(forget: Callable[[], object]) -> Iterator[None]:
    """A stop that is raised in a finaliser, where Python drops it, is asked for again soon.

    Args:
        forget: makes the handler take the signal for the first one again.
    """
    before = sys.unraisablehook

    def hook(lost: Any) -> None:
        if not isinstance(lost.exc_value, Stopped):
            before(lost)
            return
        forget()
        again = threading.Timer(SOON, _thread.interrupt_main, (lost.exc_value.signum,))
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def may_handle() -> bool:
    """Whether signal handlers can be set here: Python has them in the main thread alone."""
    return threading.current_thread() is threading.main_thread()


_masks: list[set[int | signal.Signals]] = []


def _hold() -> None:
    """A signal that comes while a process forks waits until the child has let go of handlers."""
    ours = {signum for previous in _replaced for signum in previous}
    _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ours))


def _let_pass() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _let_go() -> None:
    """A process that is forked off answers signals as it would without ours.

    The pools of a user's reward end their workers by SIGTERM, and wait for ever for one that
    takes it for a wish.
    """
    for previous in reversed(_replaced):
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    _replaced.clear()
    _let_pass()


os.register_at_fork(before=_hold, after_in_parent=_let_pass, after_in_child=_let_go)
