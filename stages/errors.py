"""Every error that a user can cause, and the exit code each one ends with.

    RlhfError
    ├── ConfigError      2   usage or config
    ├── DataError        3   a data file
    ├── CheckpointError  4   a model folder or a checkpoint
    ├── TrainingError    5   a guard stopped the run; its state is saved
    ├── ResourceError    6   out of memory or disk
    ├── GateError        7   a required metric was not reached; the model is saved
    └── Interrupted      130 or 143   a signal stopped the run; its state is saved

An error is raised where its cause is known and caught in one place, ``rlhf_cli/app.py``. Anything
else that reaches that place is a bug: it keeps its traceback and ends with exit code 1.
"""

from __future__ import annotations

import signal
from typing import ClassVar


class RlhfError(Exception):
    """What went wrong, where, and what to do about it.

    Args:
        what: one sentence: what is wrong, with both values where two disagree.
        do: one sentence: what the user can do.
        where: the place, as ``file:line:column: key`` or ``file:line``; empty where there is none.
    """

    kind: ClassVar[str]
    exit_code: int

    def __init__(self, what: str, *, do: str, where: str = "") -> None:
        super().__init__(f"{where}: {what}" if where else what)
        self.what = what
        self.do = do
        self.where = where


class ConfigError(RlhfError):
    """The command line or the config is wrong."""

    kind = "config"
    exit_code = 2


class DataError(RlhfError):
    """A data file is missing, broken, of another kind, or has nothing left to learn from."""

    kind = "data"
    exit_code = 3


class CheckpointError(RlhfError):
    """A model folder or checkpoint is missing, incomplete, damaged or of the wrong kind."""

    kind = "checkpoint"
    exit_code = 4


class TrainingError(RlhfError):
    """A guard stopped the run (non-finite numbers, KL limit); its state is saved."""

    kind = "training"
    exit_code = 5


class ResourceError(RlhfError):
    """The machine ran out of memory or disk."""

    kind = "resource"
    exit_code = 6


class GateError(RlhfError):
    """A ``--require`` gate failed; the model is saved."""

    kind = "gate"
    exit_code = 7


class Interrupted(RlhfError):
    """A signal stopped the run after its state was saved; exit code 128 + signal number."""

    kind = "interrupted"

    def __init__(self, signum: int, *, what: str, do: str) -> None:
        super().__init__(what, do=do)
        self.exit_code = 128 + signum
        self.signal_name = signal.Signals(signum).name
