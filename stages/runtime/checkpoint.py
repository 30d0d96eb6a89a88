"""Training state on disk: ``checkpoints/step-000500/``, complete or not there at all.

A checkpoint is written into ``.tmp-…``, flushed to the disk, renamed into place, and marked by
``COMPLETE`` last. A kill at any moment leaves the previous one as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.errors import CheckpointError

MARK = "COMPLETE"
MANIFEST = "manifest.json"
STATE = "state.json"
BLOCK = 1 << 22


@dataclass(frozen=True)
class Saved:
    """A training state: named groups of tensors (a file each) and everything that is no tensor."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(folder: Path, step: int, saved: Saved) -> Path:
    """Write a checkpoint; a complete one of the same step holds the same state and is kept.

    Args:
        folder: the run's ``checkpoints`` folder.
        step: optimiser steps done.
        saved: what to write.

    Returns:
        The finished checkpoint.
    """
    folder.mkdir(exist_ok=True)
    target, temporary = folder / f"step-{step:06d}", folder / f".tmp-step-{step:06d}"
    if (target / MARK).is_file():
        return target
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name, group in saved.tensors.items():
        contiguous = {key: value.detach().cpu().contiguous() for key, value in group.items()}
        save_file(contiguous, temporary / f"{name}.safetensors")
    (temporary / STATE).write_text(json.dumps(saved.state, allow_nan=False), encoding="utf-8")
    files = sorted(path for path in temporary.iterdir())
    manifest = {f.name: {"bytes": f.stat().st_size, "xxh3_128": digest(f)} for f in files}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    flush([*files, temporary / MANIFEST, temporary])
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    (target / MARK).touch()
    flush([target / MARK, target, folder])
    return target


def newest(folder: Path, tell: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint, or None; incomplete ones are passed over with a notice."""
    for path in sorted(folder.glob("step-*"), key=step_of, reverse=True):
        if (path / MARK).is_file():
            return path
        tell(f"checkpoint {path.name} is incomplete and is passed over")
    return None


def load(path: Path) -> Saved:
    """Read a checkpoint and check every file against the manifest.

    Raises:
        CheckpointError: a file is missing, truncated or changed; it is named.
    """
    manifest = _read_json(path / MANIFEST)
    for name, facts in manifest.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            raise _damaged(file, "is missing or truncated")
        if digest(file) != facts["xxh3_128"]:
            raise _damaged(file, "is not what was written")
    names = [name for name in manifest if name.endswith(".safetensors")]
    try:
        tensors = {name.removesuffix(".safetensors"): load_file(path / name) for name in names}
    except SafetensorError as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    return Saved(tensors, _read_json(path / STATE))


def rotate(folder: Path, *, keep: int, protect: Iterable[int]) -> None:
    """Delete the oldest complete checkpoints beyond ``keep``, and what a kill left half written.

    The newest is never deleted, nor are those whose steps are protected.
    """
    for leftover in folder.glob(".tmp-step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    complete = sorted((p for p in folder.glob("step-*") if (p / MARK).is_file()), key=step_of)
    spared = {*protect, *(step_of(path) for path in complete[-max(1, keep) :])}
    for path in complete:
        if step_of(path) not in spared:
            # Without its mark it is no checkpoint any more, whatever happens while it is deleted.
            (path / MARK).unlink()
            shutil.rmtree(path)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, -1 for a name of another kind."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def digest(path: Path) -> str:
    """xxh3-128 of a file, in hex."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            state.update(block)
    return state.hexdigest()


def flush(paths: Iterable[Path]) -> None:
    """Have files and folders reach the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    return values


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(path),
        do="delete this checkpoint folder and resume from the one before it",
    )
