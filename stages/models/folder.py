"""What a model folder says about itself: ``rlhf.json`` beside a plain Hugging Face model.

A folder of another tool has none; then its ``config.json`` must do.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard, get_args

from stages.errors import CheckpointError
from stages.models.network import Kind

NAME = "rlhf.json"
VERSION = 1


@dataclass(frozen=True)
class Identity:
    """The facts about a model that the next stage relies on.

    Attributes:
        kind: policy, reward or critic.
        stage: the stage that made it.
        template_hash: of the chat template and how prompts and answers are joined.
        vocabulary_hash: of the tokenizer's vocabulary.
        as_messages: whether plain prompts were made one user turn.
        stop_ids: tokens that end an answer.
        pad_id: the pad token, which is no stop token.
        mean, std: ``score = (head output - mean) / std``; reward and critic.
        normalised_on: what ``mean`` and ``std`` were measured on; reward.
        parent: ``{"path", "hash"}`` of the model it was made from.
        version: of this file's layout.
    """

    kind: Kind
    stage: str
    template_hash: str
    vocabulary_hash: str
    as_messages: bool
    stop_ids: tuple[int, ...]
    pad_id: int
    mean: float = 0.0
    std: float = 1.0
    normalised_on: str | None = None
    parent: dict[str, str] = field(default_factory=dict)
    version: int = VERSION


def write_identity(folder: Path, identity: Identity) -> None:
    """Write ``rlhf.json``."""
    text = json.dumps(asdict(identity), indent=2, allow_nan=False)
    (folder / NAME).write_text(text + "\n", encoding="utf-8")


def read_identity(folder: Path) -> Identity | None:
    """What the folder says about itself, or None where another tool made it.

    Raises:
        CheckpointError: the file is there and cannot be used.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values.get("version", VERSION)
        if version <= VERSION:
            return _identity(values, rows=_rows(folder))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot be read as the description of a model ({error})",
            where=str(path),
            do="run the stage that made this folder again",
        ) from None
    raise CheckpointError(
        f"was written in layout {version}, this version reads up to {VERSION}",
        where=str(path),
        do="use a newer version of rlhf",
    )


def _identity(values: dict[str, Any], *, rows: float) -> Identity:
    known = fields(Identity)
    needed = {f.name for f in known if f.default is MISSING and f.default_factory is MISSING}
    if lacking := sorted(needed - values.keys()):
        raise ValueError(f"it lacks {', '.join(lacking)}")
    if unknown := sorted(values.keys() - {f.name for f in known}):
        raise ValueError(f"it has an unknown {', '.join(unknown)}")
    for name, value in values.items():
        wanted, fits = _FACTS[name]
        if not fits(value):
            raise ValueError(f"{name} is {json.dumps(value)[:80]}, not {wanted}")
    found = Identity(**{**values, "stop_ids": tuple(values["stop_ids"])})
    if max(found.pad_id, *found.stop_ids, 0) >= rows:
        raise ValueError(f"pad_id or stop_ids name a token beyond the {rows} of the model")
    return found


def _rows(folder: Path) -> float:
    """The model's vocabulary size, infinite where its config does not tell."""
    try:
        config = read_config(folder)
    except CheckpointError:  # it is told where the config itself is read
        return math.inf
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if _is_id(size) else math.inf


def is_number(value: object) -> bool:
    """A finite number, and no truth value."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": ("policy, reward or critic", lambda value: value in get_args(Kind)),
    "stage": ("a text", _is_text),
    "template_hash": ("a text", _is_text),
    "vocabulary_hash": ("a text", _is_text),
    "as_messages": ("true or false", lambda value: isinstance(value, bool)),
    "stop_ids": (
        "a list of ids",
        lambda value: isinstance(value, list) and all(map(_is_id, value)),
    ),
    "pad_id": ("an id", _is_id),
    "mean": ("a finite number", is_number),
    "std": ("a positive finite number", lambda value: is_number(value) and value > 0),
    "normalised_on": ("a text or null", lambda value: value is None or _is_text(value)),
    "parent": ("an object", lambda value: isinstance(value, dict)),
    "version": ("a number", _is_id),
}
"""What each fact must be, in words and as a test."""


def model_folder(source: str) -> Path:
    """The folder with the weights: ``source`` itself, or ``model/`` inside a run folder."""
    path = Path(source)
    inner = path / "model"
    own = os.path.isfile(path / "config.json")
    return inner if not own and os.path.isdir(inner) else path


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        reason = "is not a JSON object"
    except FileNotFoundError:
        reason = "is missing: this is not a model folder"
    except (OSError, ValueError, RecursionError) as error:
        reason = f"cannot be read ({error})"
    raise CheckpointError(
        reason, where=str(path), do="name the run folder of an earlier stage, or a model folder"
    )
