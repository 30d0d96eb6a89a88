"""What may differ between a run and its continuation, and what is told of a difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from stages.config import StageConfig
from stages.config.shared import Optimisation
from stages.errors import CheckpointError
from stages.runtime.optim import learning_rate_at

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
    "reward.timeout",
    "reward.concurrency",
    "reward.retries",
)
"""Keys that change what is told or how far the run goes, not what it computes."""
LENGTHS = ("max_steps", "epochs", "total_episodes")
"""Keys of ``train`` that say how far a run goes."""
MAPPINGS = ("data.columns",)
"""Keys whose value is a mapping of the user's own words: one value, not a section."""
TEXT = {"vocabulary_hash": "the tokenizer's vocabulary", "template_hash": "the chat template"}


def require_same_meaning(stored: dict[str, Any], config: StageConfig) -> None:
    """A continuation asks for the same run.

    Args:
        stored: the resolved config of the run so far, as JSON.
        config: the config of the continuation.

    Raises:
        CheckpointError: a key that alters the run has another value; it is named.
    """
    asked = _numbered(config.model_dump(mode="json"))
    stored = _numbered(stored)
    for leaf in [*_flat(asked), *_gone(stored, asked)]:
        key = _known(asked, _known(stored, leaf))
        before, value = _at(stored, key), _at(asked, key)
        unknown = leaf.removeprefix(key).strip(".").split(".")[0]
        # A key that the run did not know yet; an item of a list more or less is no such key.
        new = bool(unknown) and isinstance(before, dict) and not unknown.isdecimal()
        if new or _of_any_item(leaf).startswith(HARMLESS) or before == value:
            continue
        raise CheckpointError(
            f"was {json.dumps(before)} when the run was started and is {json.dumps(value)} now",
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


def require_same_text(before: Mapping[str, str], now: Mapping[str, str], *, model: str) -> None:
    """A continuation reads text as the run has read it so far.

    The config names a template's file and a model's folder, not what is in them.

    Args:
        before: the ``text`` of ``run.json``; empty where the run has not come so far.
        now: that of the continuation.
        model: where the tokenizer is from.

    Raises:
        CheckpointError: vocabulary or template have changed.
    """
    for name, what in TEXT.items():
        if name in before and before[name] != now.get(name):
            raise CheckpointError(
                f"{what} has changed since the run was started",
                where=model,
                do="put the earlier files back, or start anew with --overwrite",
            )


def as_long_as_before(config: StageConfig, stored: dict[str, Any]) -> StageConfig:
    """The config with the length that the run was to have so far.

    Args:
        config: of the continuation.
        stored: the resolved config of the run so far, as JSON.
    """
    train = stored.get("train", {})
    lengths = {name: train[name] for name in LENGTHS if name in train}
    return config.model_copy(update={"train": config.train.model_copy(update=lengths)})


def of_new_length(train: Optimisation, step: int, *, before: int, now: int) -> str | None:
    """What is told where a continuation goes further, or less far, than the run was to go.

    Args:
        train: its schedule and peak.
        step: optimiser steps done.
        before: optimiser steps that the run was to have.
        now: optimiser steps that it is to have.

    Returns:
        The text, with the next learning rate under both lengths where they differ; None where
        nothing changes.
    """
    if before == now or step >= now:
        return None
    text = f"the run was to have {before} steps and is to have {now} now"
    old, new = (
        learning_rate_at(train, step, total, peak=train.learning_rate) for total in (before, now)
    )
    if old == new:
        return text
    return (
        f"{text}: its {train.schedule} schedule follows the new length, and the learning rate of "
        f"step {step + 1} is {new:.4g}, where it would have been {old:.4g}"
    )


def of_new_world(before: int, now: int) -> str | None:
    """What is told where a continuation has another number of processes; None where it has not."""
    if before == now:
        return None
    return (
        f"the run goes on with {_processes(now)}, where it had {_processes(before)}: the order of "
        "the data and the noise of sampled answers stay, dropout masks and rounding do not"
    )


def _processes(n: int) -> str:
    return f"{n} process" if n == 1 else f"{n} processes"


def _known(values: Any, key: str) -> str:
    """The longest beginning of a dotted key that is there: a section may have been null."""
    known: list[str] = []
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            break
        known.append(name)
        values = values[name]
    return ".".join(known)


def _of_any_item(key: str) -> str:
    """A key without the numbers of the items of lists in it."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def _at(values: Any, key: str) -> Any:
    for name in key.split(".") if key else ():
        values = values[name]
    return values


def _flat(values: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of plain values."""
    if not isinstance(values, dict) or prefix in MAPPINGS:
        yield prefix
        return
    for key, value in values.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else key)


def _gone(stored: Any, asked: Any) -> Iterator[str]:
    """The keys of items of lists, such as terms of the reward, that are there no more."""
    return (key for key in _flat(stored) if key != _of_any_item(key) and _known(asked, key) != key)


def _numbered(values: Any) -> Any:
    """The values with each list of sections as a section of its items, by their numbers."""
    if isinstance(values, list) and values and isinstance(values[0], dict):
        values = {str(n): item for n, item in enumerate(values)}
    if not isinstance(values, dict):
        return values
    return {key: _numbered(value) for key, value in values.items()}
