"""``--num-processes N``: start N processes of this tool as one world, and speak for all of them.

The main process inherits the terminal, what the others write is kept aside. Each process gets the
signals that this one gets, once each, and is waited for while it saves; when this one is
killed, they end. When one fails, the others are ended and the exit code is that of the first that
failed: ``torch.distributed.run`` would turn every code into 1 and add a traceback of its own.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import IO

from rlhf_cli import failure
from rlhf_cli.world import Member, start
from stages.errors import ConfigError, ResourceError, RlhfError

FLAG = "--num-processes"
FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}
"""Which signal the processes get for one that arrives here."""
PATIENCE = 3.0
"""Seconds the others have to end by themselves after one has failed, before SIGTERM."""
GRACE = 30.0
"""Seconds between SIGTERM (or a second interrupt) and SIGKILL; saving takes some of them."""
SHOWN_BYTES = 20_000
"""As much of a failed process's stderr is shown, from its end."""


class ProcessDied(RlhfError):
    """A signal that nobody sent from here ended a process of the world."""

    kind = "crash"

    def __init__(self, signum: int, *, what: str) -> None:
        super().__init__(what, do="run again with --num-processes 1 to see whether it repeats")
        self.exit_code = 128 + signum


@dataclass
class _World:
    """The processes, in the order of their ranks, and what has happened to them so far."""

    members: list[Member]
    ended: queue.SimpleQueue[tuple[int, int]] = field(default_factory=queue.SimpleQueue)
    first_failed: Member | None = None
    signals: list[signal.Signals] = field(default_factory=list)
    terminate_at: float = float("inf")
    kill_at: float = float("inf")
    killed: bool = False


def launch(
    argv: Sequence[str],
    processes: int,
    *,
    as_json: bool = False,
    command: Sequence[str] = (sys.executable, "-m", "rlhf_cli"),
) -> int:
    """Run ``command`` with ``argv`` in N processes and wait for all of them.

    Args:
        argv: the arguments of this command line; the flag of this launcher is taken out.
        processes: N, the size of the world.
        as_json: the one object on stdout is the main process's, or that of the first that failed.
        command: the program; a test puts another in its place.

    Returns:
        0, or the exit code of the first process that failed.

    Raises:
        ResourceError: the kernel killed a process.
        ProcessDied: a process ended by another signal, such as a segmentation fault.
    """
    lifeline, held = os.pipe()
    try:
        members = start(
            [*command, *without_flag(argv)], processes, as_json=as_json, lifeline=lifeline
        )
        os.close(lifeline)
        world = _World(members)
        with _forwarding(world):
            _wait(world)
    finally:
        os.close(held)
    return _outcome(world, as_json=as_json)


def check_world(processes: int | None, *, config: str) -> bool:
    """Whether this process is to launch others.

    Args:
        processes: what the flag says, None without it.
        config: the config's path; standard input (``-``) can be read by one process only.

    Raises:
        ConfigError: the number is no number of processes, or another launcher chose one already.
    """
    if processes is None:
        return False
    if processes < 1:
        raise ConfigError(
            f"cannot start {processes} processes",
            do="give 1 or more",
            where=f"command line: {FLAG}",
        )
    present = os.environ.get("WORLD_SIZE")
    if present is not None:
        raise ConfigError(
            f"this process is already one of {present} that another launcher started",
            do=f"leave {FLAG} out and set the number there",
            where=f"command line: {FLAG}",
        )
    if processes > 1 and config == "-":
        raise ConfigError(
            "several processes cannot read one standard input",
            do="put the config into a file",
            where=f"command line: {FLAG}",
        )
    return processes > 1


def without_flag(argv: Sequence[str]) -> list[str]:
    """The arguments without ``--num-processes N`` in either of its spellings."""
    kept: list[str] = []
    skip_value = False
    for argument in argv:
        if skip_value:
            skip_value = False
        elif argument == FLAG:
            skip_value = True
        elif not argument.startswith(f"{FLAG}="):
            kept.append(argument)
    return kept


@contextmanager
def _forwarding(world: _World) -> Iterator[None]:
    """Hand each signal on to all processes once, as long as the block runs."""

    def forward(signum: int, frame: FrameType | None) -> None:
        arrived = signal.Signals(signum)
        world.signals.append(arrived)
        _send(world, FORWARDED[arrived])
        if len(world.signals) > 1:
            world.kill_at = min(world.kill_at, time.monotonic() + GRACE)

    if current_thread() is not main_thread():
        yield
        return
    before: Mapping[signal.Signals, object] = {s: signal.signal(s, forward) for s in FORWARDED}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]


def _wait(world: _World) -> None:
    """Until every process has ended, in whatever way.

    One thread per process waits for its end, so that the order of the ends is the true one.
    """
    for member in world.members:
        Thread(target=_announce_end, args=(world, member), daemon=True).start()
    while any(member.code is None for member in world.members):
        try:
            rank, code = world.ended.get(timeout=0.1)
        except queue.Empty:
            _end_the_others(world)
        else:
            world.members[rank].code = code
            _note_failure(world, world.members[rank])


def _announce_end(world: _World, member: Member) -> None:
    world.ended.put((member.rank, member.process.wait()))


def _note_failure(world: _World, member: Member) -> None:
    first = world.first_failed
    if member.code == 0:
        return
    if first is not None:
        # One that lost another in the middle of a sum may be done dying before that one is.
        of_its_own = world.terminate_at < float("inf") and member.code != failure.BUG
        if first.code == failure.BUG and of_its_own:
            world.first_failed = member
        return
    world.first_failed = member
    if not world.signals:
        # After a signal the others are saving, and one more would make them leave at once.
        world.terminate_at = time.monotonic() + PATIENCE
        world.kill_at = world.terminate_at + GRACE


def _end_the_others(world: _World) -> None:
    now = time.monotonic()
    if now >= world.terminate_at:
        world.terminate_at = float("inf")
        _send(world, signal.SIGTERM)
    if now >= world.kill_at:
        # One that ended before has ended for another reason.
        world.killed = world.killed or world.first_failed is None
        _send(world, signal.SIGKILL)


def _send(world: _World, signum: signal.Signals) -> None:
    for member in world.members:
        member.process.send_signal(signum)  # does nothing to a process that has ended


def _outcome(world: _World, *, as_json: bool) -> int:
    first = world.first_failed
    if first is None or first.code is None:
        _replay(world.members[0].out, sys.stdout)
        return 0
    main_said_it = world.members[0].code == first.code
    if not main_said_it:
        _replay(first.err, sys.stderr)
    if first.code < 0:
        raise _death(world, first, signal.Signals(-first.code))
    if as_json:
        _replay(first.out, sys.stdout)
    return first.code


def _replay(kept: IO[bytes] | None, stream: IO[str]) -> None:
    """Write the end of what a process wrote; nothing where it wrote to the terminal itself."""
    if kept is None:
        return
    size = kept.seek(0, os.SEEK_END)
    kept.seek(max(0, size - SHOWN_BYTES))
    stream.write(kept.read().decode("utf-8", errors="replace"))
    stream.flush()


def _death(world: _World, member: Member, signum: signal.Signals) -> RlhfError:
    """The error for a process that a signal ended before it could say anything."""
    name = f"process {member.rank} of {len(world.members)}"
    if signum in map(FORWARDED.get, world.signals):
        return ProcessDied(signum, what=f"{signum.name} ended {name} before it could save")
    if signum == signal.SIGKILL and world.killed:
        return ProcessDied(signum, what=f"{name} did not end in time after a signal and was killed")
    if signum == signal.SIGKILL:
        return ResourceError(
            f"{name} was killed (SIGKILL), most likely by the kernel for want of memory",
            do="lower train.tokens_per_micro_batch or the number of processes and use --resume: "
            "the last checkpoint is whole",
        )
    return ProcessDied(signum, what=f"{name} was ended by {signum.name}")
