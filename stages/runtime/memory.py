"""A failed allocation, in the many words of the libraries below us: what it was for, what to lower.

Free of torch, so that the command line can ask as well.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from traceback import walk_tb
from typing import TYPE_CHECKING

from stages.errors import ResourceError, RlhfError

if TYPE_CHECKING:
    from stages.config import StageConfig

WORDS = ("allocate memory", "out of memory", "bad_alloc", f"(os error {errno.ENOMEM})")
PARTS = {
    "stages.data": "reading the data",
    "stages.models.load": "loading a model",
    "stages.models.source": "loading a model",
    "stages.models.configured": "loading a model",
    "stages.models.save": "saving a model",
    "stages.runtime.checkpoint": "the training state on disk",
    "stages.runtime.optim": "an optimiser step",
    "stages.rollout": "sampling and scoring answers",
    "stages.update": "an optimiser step",
    "stages.online": "an optimiser step",
    "stages.advantage": "estimating advantages",
    "stages.criticless": "estimating advantages",
    "stages.normaliser": "normalising scores",
}
"""What the parts of the library do, where one of them is at work."""


def is_short(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, is a failed allocation."""
    return any(_is_failed_allocation(link) for link in _chain(error))


def explain(error: BaseException, config: StageConfig, step: int) -> ResourceError:
    """The error for a person: what was being done, with which budget, and the key to lower.

    Args:
        error: the failed allocation.
        config: of the stage that it happened in.
        step: optimiser steps done.
    """
    first = next(link for link in _chain(error) if _is_failed_allocation(link))
    from stages.config import OnlineConfig

    budget = config.train.tokens_per_micro_batch
    keys = f"train.tokens_per_micro_batch (now {budget}; the result stays the same up to rounding)"
    if isinstance(config, OnlineConfig):
        keys += f" or rollout.batch_size (now {config.rollout.batch_size})"
    return ResourceError(
        f"out of memory in {what_for(error)}, with micro-batches of {budget} tokens"
        f"{_reason(first)}",
        where=f"{config.stage}, after step {step}",
        do=f"lower {keys}, then run the same command again with --resume",
    )


def what_for(error: BaseException) -> str:
    """What was being done, from the innermost part of the library that was at work."""
    names = [
        frame.f_globals.get("__name__", "")
        for link in reversed(list(_chain(error)))
        for frame, _ in walk_tb(link.__traceback__)
    ]
    for name in reversed(names):
        for part, doing in PARTS.items():
            if name == part or name.startswith(f"{part}."):
                return doing
    return "a forward or backward pass"


def _is_failed_allocation(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    ours = isinstance(error, RlhfError)  # which may quote anything
    return not ours and any(word in str(error).lower() for word in WORDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _reason(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return f": {line}" if line else ""
