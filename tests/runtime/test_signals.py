"""Signals that come at bad moments."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from stages.runtime.signals import Stopped, StopRequest, ended_by_sigterm


class Gone:
    """Its end is the moment at which the signal comes."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass


def work() -> None:
    Gone()
    time.sleep(2)


@pytest.mark.parametrize(
    "listening", [lambda: StopRequest(patient=False), ended_by_sigterm], ids=["stage", "command"]
)
def test_a_stop_that_comes_in_a_finaliser_ends_the_work_without_a_traceback(
    listening: Any, capfd: Any
) -> None:
    with pytest.raises(Stopped) as caught, listening():
        work()
    assert caught.value.signum == signal.SIGTERM
    assert capfd.readouterr().err == ""


def test_other_failures_of_finalisers_are_reported_as_ever(monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr("sys.unraisablehook", seen.append)

    class Broken:
        def __del__(self) -> None:
            raise ValueError("broken")

    with StopRequest():
        Broken()
    assert [type(one.exc_value) for one in seen] == [ValueError]
