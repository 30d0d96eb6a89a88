"""What may differ between a run and its continuation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stages.config import StageConfig
from stages.errors import CheckpointError

HARMLESS = (
    "log.",
    "checkpoint.every",
    "checkpoint.keep",
    "evaluate.every",
    "train.epochs",
    "train.max_steps",
    "train.total_episodes",
    "train.tokens_per_micro_batch",
    "train.gradient_checkpointing",
    "trust_remote_code",
    "output",
    "kl.warn_above",
    "kl.stop_above",
)
"""Keys that change what is told or how far the run goes, not what it computes."""


def require_same_meaning(stored: dict[str, Any], config: StageConfig) -> None:
    """A continuation asks for the same run.

    Args:
        stored: the resolved config of the run so far, as JSON.
        config: the config of the continuation.

    Raises:
        CheckpointError: a key that alters the run has another value; it is named.
    """
    asked = config.model_dump(mode="json")
    for leaf, _ in _flat(asked):
        key = _known(stored, leaf)
        before, value = _at(stored, key), _at(asked, key)
        new = key != leaf and isinstance(before, dict)  # a key that the run did not know yet
        if new or leaf.startswith(HARMLESS) or before == value:
            continue
        raise CheckpointError(
            f"{key} was {before!r} when the run was started and is {value!r} now",
            where=f"{config.output}: {key}",
            do=f"set {key} back, or start anew with --overwrite",
        )


def require_same_data(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """A continuation reads the files that the run has read so far, byte for byte.

    The order of an epoch is drawn from the number of records: with others, what an epoch has left
    would not be what it has not shown yet.

    Args:
        before: the ``data`` rows of ``run.json``; none where the run has not come so far.
        now: those of the continuation.

    Raises:
        CheckpointError: a file has changed, is new or is gone; it is named.
    """
    old, new = ({(row["role"], row["file"]): row["hash"] for row in rows} for rows in (before, now))
    for key in [*old, *new] if old else []:
        if old.get(key) != new.get(key):
            how = "is new" if key not in old else "is gone" if key not in new else "has changed"
            raise CheckpointError(
                f"this data file {how} since the run was started",
                where=key[1],
                do="put the earlier data back, or start anew with --overwrite",
            )


def _known(values: Any, key: str) -> str:
    """The longest beginning of a dotted key that is there: a section may have been null."""
    known: list[str] = []
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            break
        known.append(name)
        values = values[name]
    return ".".join(known)


def _at(values: Any, key: str) -> Any:
    for name in key.split(".") if key else ():
        values = values[name]
    return values


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else key)
