"""The other end of ``workers``: a process that answers one request after the other."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from stages.errors import RlhfError


def main() -> None:
    """Answer until the other side closes the pipe or ends this process."""
    # Ctrl-C reaches the whole group; the process that reads decides what becomes of the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the results
    try:
        function, *fixed = pickle.load(requests)
    except Exception:
        _send(results, ("unready", traceback.format_exc()))
        return
    _send(results, ("ready", None))
    while True:
        try:
            chunk = pickle.load(requests)
        except EOFError:
            return
        _send(results, _answer(function, fixed, chunk))


def _answer(function: Callable[..., Any], fixed: list[Any], chunk: Any) -> tuple[str, Any]:
    try:
        return "done", function(*fixed, chunk)
    except RlhfError as error:
        return "refused", (type(error), error.what, error.do, error.where)
    except Exception:
        return "bug", traceback.format_exc()


def _send(results: BinaryIO, message: tuple[str, Any]) -> None:
    pickle.dump(message, results, protocol=pickle.HIGHEST_PROTOCOL)
    results.flush()
