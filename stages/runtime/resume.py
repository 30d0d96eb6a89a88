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
    before = dict(_flat(stored))
    for key, value in _flat(config.model_dump(mode="json")):
        if key.startswith(HARMLESS) or key not in before or before[key] == value:
            continue
        raise CheckpointError(
            f"{key} was {before[key]!r} when the run was started and is {value!r} now",
            where=f"{config.output}: {key}",
            do=f"set {key} back, or start anew with --overwrite",
        )


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else key)
