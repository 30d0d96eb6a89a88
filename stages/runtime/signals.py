"""The first Ctrl-C or SIGTERM asks for a stop after the current step; the second leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class StopRequest:
    """Whether a stop was asked for; a context that holds the signal handlers.

    Args:
        leave: what the second signal does; it is told the signal's number.
    """

    def __init__(
        self, leave: Callable[[int], None] = lambda signum: os._exit(128 + signum)
    ) -> None:
        self.signum = 0
        self.leave = leave
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _ask(self, signum: int, _: FrameType | None) -> None:
        if self.signum:
            self.leave(signum)
        self.signum = signum
