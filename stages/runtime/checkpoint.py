"""Training state on disk: ``checkpoints/step-000500/``, complete or not there at all.

A checkpoint is written into ``.tmp-…``, flushed to the disk, renamed into place, and marked by
``COMPLETE`` last. A kill at any moment leaves the previous one as it was.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.errors import CheckpointError
from stages.models.manifest import digest, read
from stages.runtime.disk import delete, flush, staged, writing

MARK = "COMPLETE"
MANIFEST = "manifest.json"
STATE = "state.json"
Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Saved:
    """A training state: named groups of tensors (a file each) and everything that is no tensor.

    ``seconds`` in the state is the time it was taken at, not part of what it is.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(folder: Path, step: int, saved: Saved) -> Path:
    """Write a checkpoint; a complete one of the same step and state is kept as it is.

    Args:
        folder: the run's ``checkpoints`` folder.
        step: optimiser steps done.
        saved: what to write.

    Returns:
        The finished checkpoint.

    Raises:
        ResourceError: the disk refuses; what was saved before is whole.
    """
    target = folder / f"step-{step:06d}"
    if (target / MARK).is_file() and _holds(target, saved.state):
        return target
    with writing(target):
        folder.mkdir(exist_ok=True)
    with staged(target) as temporary:
        _fill(temporary, saved)
        _put(temporary, target)
    return target


def _fill(folder: Path, saved: Saved) -> None:
    """Write all files, the manifest last, and have them reach the disk."""
    facts: Facts = {}
    for name, group in saved.tensors.items():
        file = folder / f"{name}.safetensors"
        facts[file.name] = _write_tensors(file, group)
    text = json.dumps(saved.state, allow_nan=False).encode("utf-8")
    (folder / STATE).write_bytes(text)
    facts[STATE] = {"bytes": len(text), "xxh3_128": xxhash.xxh3_128_hexdigest(text)}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    flush([*(folder / name for name in facts), folder / MANIFEST, folder])


def _write_tensors(file: Path, group: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a group of tensors; size and hash are those of the values in memory.

    safetensors streams them to the file without a copy and tells no hash. The file is its header,
    then the tensors' bytes in the header's order: so the header is read back, and the hash goes on
    over the memory that was written. Bytes that the disk changed are found when they are loaded.

    Raises:
        OSError: the file is shorter or longer than its tensors, or its header is broken.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in group.items()}
    save_file(tensors, file)
    try:
        header, order = _read_header(file)
        parts = [_bytes_of(tensors.pop(name)) for name in order]
    except (ValueError, KeyError) as error:
        raise OSError(errno.EIO, "the header was not written as it is", str(file)) from error
    size = len(header) + sum(len(part) for part in parts)
    if tensors or file.stat().st_size != size:
        raise OSError(errno.EIO, "the tensors were not written as they are", str(file))
    state = xxhash.xxh3_128(header)
    for part in parts:
        state.update(part)
    return {"bytes": size, "xxh3_128": state.hexdigest()}


def _read_header(file: Path) -> tuple[bytes, list[str]]:
    """The bytes before the tensors, and the tensors' names in the order of their bytes."""
    with file.open("rb") as opened:
        length = opened.read(8)
        text = opened.read(int.from_bytes(length, "little"))
    layout = json.loads(text)
    layout.pop("__metadata__", None)
    return length + text, sorted(layout, key=lambda name: layout[name]["data_offsets"])


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _put(temporary: Path, target: Path) -> None:
    """Rename into place and mark; one of the same step stays in reach until the new one is whole.

    ``mend`` brings it back after a kill in between.
    """
    old = target.with_name(f".old-{target.name}")
    if (target / MARK).is_file():
        delete(old)
        os.replace(target, old)
    else:
        delete(target)
    os.replace(temporary, target)
    (target / MARK).touch()
    flush([target / MARK, target, target.parent])
    delete(old)


def _holds(path: Path, state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was made at this very state, whenever that was."""
    try:
        found = json.loads((path / STATE).read_text(encoding="utf-8"))
        asked = json.loads(json.dumps(state, allow_nan=False))
        return {**found, "seconds": None} == {**asked, "seconds": None}
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def mend(folder: Path) -> None:
    """Finish a replacement that a kill interrupted; of both checkpoints a complete one stays."""
    for old in folder.glob(".old-step-*"):
        target = old.with_name(old.name.removeprefix(".old-"))
        if (old / MARK).is_file() and not (target / MARK).is_file():
            delete(target)
            os.replace(old, target)
        delete(old)


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
        CheckpointError: a file is missing, truncated, changed or foreign; it is named.
    """
    manifest = _read_manifest(path)
    for name, facts in manifest.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            raise _damaged(file, "is missing or truncated")
        if digest(file) != facts["xxh3_128"]:
            raise _damaged(file, "is not what was written")
    names = [name for name in manifest if name.endswith(".safetensors")]
    for file in sorted(path.glob("*.safetensors")):
        if file.name not in names:
            raise _damaged(file, "is no part of this checkpoint")
    try:
        tensors = {name.removesuffix(".safetensors"): load_file(path / name) for name in names}
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    return Saved(tensors, state)


def rotate(folder: Path, *, keep: int, protect: Iterable[int]) -> None:
    """Delete the oldest complete checkpoints beyond ``keep``, and what a kill left half written.

    The newest is never deleted, nor are those whose steps are protected.

    Raises:
        ResourceError: the disk refuses.
    """
    with writing(folder):
        mend(folder)
        for leftover in folder.glob(".tmp-step-*"):
            delete(leftover)
        found = sorted((p for p in folder.glob("step-*") if step_of(p) >= 0), key=step_of)
        complete = [path for path in found if (path / MARK).is_file()]
        spared = {*protect, *(step_of(path) for path in complete[-max(1, keep) :])}
        for path in found:
            if path not in complete or step_of(path) not in spared:
                _drop(path)


def _drop(path: Path) -> None:
    """Delete a checkpoint; under another name it is none, whatever happens meanwhile."""
    if path.is_symlink():
        path.unlink()
        return
    gone = path.with_name(f".tmp-{path.name}")
    os.replace(path, gone)
    shutil.rmtree(gone)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, -1 for a name of another kind."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _read_manifest(path: Path) -> Facts:
    try:
        manifest = read(path / MANIFEST)
    except CheckpointError as error:
        raise _damaged(path / MANIFEST, error.what) from error
    if STATE not in manifest:
        raise _damaged(path / MANIFEST, f"does not list {STATE}")
    return manifest


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(path),
        do="delete this checkpoint folder and resume from the one before it",
    )
