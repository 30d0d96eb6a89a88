"""What a person or a program is told when a command fails, and the exit code that goes with it."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import TextIO

from rlhf_cli.console import clean, is_main_process
from rlhf_cli.world import LAUNCHED
from stages.errors import RlhfError
from stages.runtime import memory

BUG = 1
USAGE = 2
RESOURCE = 6
SIGPIPE_CODE = 141
FULL = (errno.ENOSPC, errno.EDQUOT)
DISK = {
    **dict.fromkeys(FULL, "free some space"),
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EIO: "look after the disk, which reports an error",
    errno.EROFS: "let the file system be written to",
}
"""What a disk may answer instead of writing, and what to do about it."""


@dataclass(frozen=True)
class Failure:
    """One failed command: the fields of the JSON object, and the exit code."""

    exit: int
    kind: str
    where: str
    what: str
    do: str

    @property
    def is_bug(self) -> bool:
        """A bug keeps its traceback; everything else is one sentence."""
        return self.kind == "bug"


def report(error: BaseException, *, as_json: bool, debug: bool, resumes: bool = True) -> int:
    """Print a failure: for a person on stderr and, with ``--json``, as one object on stdout.

    Every process of a world says why it failed (a launcher shows the first), but the object comes
    from the main process, or from each where our launcher chooses one. ``resumes`` says whether the
    command has ``--resume``.
    """
    failure = explain(error, resumes=resumes)
    try:
        if failure.is_bug or debug:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            print(clean(trace, keep="\n\t"), end="", file=sys.stderr)
        print(as_text(failure), file=sys.stderr, flush=True)
    except OSError:  # where stderr leads is full or gone; the exit code still tells
        _let_go_of(sys.stderr)
    if as_json and (is_main_process() or LAUNCHED in os.environ):
        try:
            print(as_object(failure), flush=True)
        except OSError:  # where stdout leads is full or gone; the exit code still tells
            _let_go_of(sys.stdout)
    return failure.exit


def explain(error: BaseException, *, resumes: bool = True) -> Failure:
    """What happened, where, and what to do about it."""
    if isinstance(error, RlhfError):
        return Failure(error.exit_code, error.kind, error.where, error.what, error.do)
    if isinstance(error, KeyboardInterrupt):
        return Failure(
            128 + getattr(error, "signum", signal.SIGINT),
            "interrupted",
            "",
            "interrupted",
            "run the same command again",
        )
    if callable(getattr(error, "format_message", None)):
        return _usage(error)
    return _resource(error, resumes=resumes) or _lost_peer(error) or _bug(error)


def as_text(failure: Failure) -> str:
    """The two lines for a person; text of the user's files cannot steer the terminal."""
    place = f"{failure.where}: " if failure.where else ""
    rank = "" if is_main_process() else f"[process {os.environ['RANK']}] "
    lines = f"{rank}error: {place}{failure.what}\n{rank}what to do: {failure.do}"
    return clean(lines, keep="\n")


def as_object(failure: Failure) -> str:
    """The JSON object of a failed command."""
    error = {
        "kind": failure.kind,
        "where": failure.where,
        "what": failure.what,
        "do": failure.do,
    }
    return json.dumps({"status": "failed", "exit": failure.exit, "error": error})


def reader_left() -> int:
    """The reader of stdout (such as ``head``) has gone: end quietly, like a tool of Unix."""
    _let_go_of(sys.stdout)
    return SIGPIPE_CODE


def _let_go_of(stream: TextIO) -> None:
    # Python flushes it once more at its end; into the closed pipe this would be an error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _usage(error: BaseException) -> Failure:
    """An error of the command line itself, raised by Typer, which has no public class for them."""
    message = str(error.format_message()).strip()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "rlhf"
    is_help = message.startswith("Usage:")  # what a group of commands says without a command
    what = "missing command" if is_help else message[:1].lower() + message[1:].rstrip(".")
    return Failure(USAGE, "config", "command line", what, f"see {command} --help")


def _resource(error: BaseException, *, resumes: bool) -> Failure | None:
    """Out of memory or disk, in the many words of the libraries below us."""
    if memory.is_short(error):
        return _out_of_memory(error)
    number = error.errno if isinstance(error, OSError) else _number_in(str(error))
    if number not in DISK:
        return None
    where = getattr(error, "filename", None) or ""
    do = f"{DISK[number]}, then run the same command again" + " with --resume" * resumes
    what = "the disk is full" if number in FULL else os.strerror(number)
    return Failure(RESOURCE, "resource", str(where), what, do)


def _number_in(text: str) -> int:
    """The number of a disk's error that a library tells in words only, 0 for none."""
    return next((number for number in DISK if os.strerror(number) in text), 0)


def _out_of_memory(error: BaseException) -> Failure:
    first_line = str(error).strip().partition("\n")[0]
    what = f"out of memory: {first_line}" if first_line else "out of memory"
    do = (
        "lower train.tokens_per_micro_batch (the result stays the same) and use --resume; "
        "outside of training, take shorter texts or fewer of them at a time"
    )
    return Failure(RESOURCE, "resource", "", what, do)


def _lost_peer(error: BaseException) -> Failure | None:
    """Another process of the world ended: its own message tells why, ours would only hide it."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    text = str(error)
    lost = type(error).__name__ in ("DistBackendError", "DistNetworkError") or (
        "gloo" in text or "Connection closed by peer" in text
    )
    if not lost:
        return None
    do = "look at the message of the process that ended first"
    return Failure(BUG, "peer", "", "another process of this run has ended", do)


def _bug(error: BaseException) -> Failure:
    what = f"{type(error).__name__}: {error}"
    do = "report it with the traceback: this is a bug in rlhf"
    return Failure(BUG, "bug", "", what, do)
