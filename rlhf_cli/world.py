"""The processes of a world: how each of them is started, and how it knows who started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

LAUNCHED = "RLHF_LAUNCHED"
"""Environment variable by which a process knows that this launcher started it."""
LIFELINE = "RLHF_LIFELINE"
"""Environment variable with the number of a pipe's end, which closes when the launcher is gone."""


@dataclass
class Member:
    """One process of the world, and the files that keep what it writes where nobody sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    out: IO[bytes] | None
    err: IO[bytes] | None
    code: int | None = None


def start(command: Sequence[str], processes: int, *, as_json: bool, lifeline: int) -> list[Member]:
    """Start the processes; the lifeline is the end of a pipe that all of them are given."""
    shared = _environment(processes) | {LIFELINE: str(lifeline)}
    members = []
    for rank in range(processes):
        speaks = rank == 0
        out = None if speaks and not as_json else tempfile.TemporaryFile()  # noqa: SIM115
        err = None if speaks else tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=None if speaks else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(lifeline,),
            # Out of the terminal's group: Ctrl-C would reach the processes twice, once from the
            # terminal and once from here, and the second means "leave at once".
            start_new_session=True,
        )
        members.append(Member(rank, process, out, err))
    return members


def _environment(processes: int) -> dict[str, str]:
    """What the processes of one world share; the names are those of ``torchrun``."""
    shared = dict(os.environ)
    shared.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // processes)))
    package = Path(__file__).resolve().parents[1]
    if Path.cwd().resolve() != package:
        # ``python -m`` would look for our modules in the user's folder first.
        shared["PYTHONSAFEPATH"] = "1"
    shared |= {
        LAUNCHED: "1",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    return shared


def _cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def follow_launcher() -> None:
    """End this process when the one that launched it is gone, even by a signal it cannot catch.

    The launcher alone holds the other end of a pipe, and the system closes it with the launcher.
    """
    lifeline = os.environ.pop(LIFELINE, None)  # not for the processes that this one starts
    if lifeline is not None:
        Thread(target=_end_with, args=(int(lifeline),), daemon=True).start()


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written
    os._exit(128 + signal.SIGHUP)
