"""The run folder: who may write into it, ``run.json``, and finished model folders.

Folders that the next stage reads (``model/``, ``critic/``, …) are written beside their place and
renamed into it, so that each is whole or the one before.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from stages.errors import CheckpointError, ConfigError
from stages.models import manifest
from stages.models.manifest import digest
from stages.runtime import checkpoint
from stages.runtime.disk import FULL, delete, flush, staged, write_text, writing
from stages.runtime.metrics import DAMAGED

LOGS = ("metrics.jsonl", "samples.jsonl")
FILES = ("run.json", "config.yaml", *LOGS, *(name + DAMAGED for name in LOGS), ".lock")
MODELS = ("model", "last", "model_ema", "critic", "adapter", "adapter_critic")
FOLDERS = (*MODELS, "checkpoints", "trackers", "cache")
TRACES = (".lock", "cache")  # what is written before a run has begun
VERSIONS = ("rlhf-cli", "torch", "transformers", "accelerate", "tokenizers", "numpy")


@dataclass(frozen=True)
class Result:
    """What a stage came to: the JSON object that the command prints."""

    stage: str
    status: str
    output: str
    model: str
    step: int
    selected: dict[str, Any] | None
    metrics: dict[str, float]
    seconds: float
    next: str

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock dies with it.

    A run that ends before its first writing (see ``opening.begin``) leaves the place as it was.

    Raises:
        ConfigError: another run holds it, or it cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    new = [folder / name for name in TRACES if not (folder / name).exists()]
    file = _open_lock(folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that just left may have deleted the file between our two calls, and another one may
        # hold a new file of the same name.
        held = os.path.samestat(os.fstat(file.fileno()), (folder / ".lock").stat())
        refused = None if held else "another run is writing into this folder"
    except (BlockingIOError, FileNotFoundError):
        refused = "another run is writing into this folder"
    except OSError as error:  # such as a network file system without locks
        refused = f"the folder cannot be locked for this run ({error.strerror})"
    if refused is not None:
        file.close()
        raise ConfigError(
            refused,
            where=f"output: {folder}",
            do="wait for it, or give output another folder",
        )
    with file:
        try:
            yield
        finally:
            if not (folder / "config.yaml").exists():
                _remove_traces(new, made)


def _remove_traces(new: list[Path], made: list[Path]) -> None:
    for path in new:
        delete(path)
    with suppress(OSError):  # someone else has put something there
        for path in made:
            path.rmdir()


def _open_lock(folder: Path) -> IO[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.fdopen(os.open(folder / ".lock", flags, 0o666), "ab")
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ConfigError(
            f"the folder cannot be written ({error.strerror})",
            where=f"output: {folder}",
            do="give output a folder that this user may write into",
        ) from None


def occupied(folder: Path) -> bool:
    """Whether the folder holds anything besides the lock."""
    return folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir())


def foreign(folder: Path) -> str | None:
    """What a run would write over in a folder that is no run folder; None where there is nothing.

    Without ``run.json`` there is no run: what bears one of our names is someone else's. A model
    folder is no place for a run either: its own weights would be taken for those of the run.
    """
    if (folder / "run.json").is_file():
        return None
    names = ("config.json", *FILES, *FOLDERS)
    ours = [name for name in names if name not in TRACES and os.path.lexists(folder / name)]
    return ours[0] if ours else None


def link(folder: Path) -> Path | None:
    """The first of the tool's own names in a folder that is a link: a run would follow it out."""
    paths = (folder / name for name in (*FILES, *FOLDERS))
    return next((path for path in paths if path.is_symlink()), None)


def retire(folder: Path) -> None:
    """Put the checkpoints out of reach, in one step, before a new run takes the folder over.

    Then a kill at any moment leaves the earlier run whole but for them, or the new one at its
    start; never the new ``run.json`` beside checkpoints of the earlier run.
    """
    old = folder / ".old-checkpoints"
    with writing(folder / "checkpoints"):
        delete(old)
        if os.path.lexists(folder / "checkpoints"):
            (folder / "checkpoints").rename(old)


def clear(folder: Path) -> None:
    """Delete what an earlier run wrote into a run folder, and nothing else.

    ``run.json`` stays: it is the new run's by now, and it marks the folder as a run's.
    """
    names = [name for name in (*FOLDERS, *FILES) if name not in (".lock", "run.json")]
    with writing(folder):
        for name in names:
            drop(folder, name)
        for name in (*FOLDERS, *FILES):
            delete(folder / f".tmp-{name}")
            delete(folder / f".old-{name}")


def drop(folder: Path, name: str) -> None:
    """Delete one of the tool's own; under another name at once, so that no half of it is read."""
    path, gone = folder / name, folder / f".tmp-{name}"
    with writing(path):
        delete(gone)
        if os.path.lexists(path):
            path.rename(gone)
            delete(gone)


def mend(folder: Path) -> None:
    """Finish what a kill interrupted: a replaced model or checkpoint is there, nothing is half."""
    with writing(folder):
        for name in MODELS:
            old, new = folder / f".old-{name}", folder / name
            if old.is_dir() and not new.exists():
                old.rename(new)
            delete(old)
        for name in (*FILES, *FOLDERS):
            delete(folder / f".tmp-{name}")
        delete(folder / ".old-checkpoints")
        checkpoint.mend(folder / "checkpoints")


def publish(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Write a model folder beside its place, flush it, and put it there.

    Args:
        folder: the run folder.
        name: such as ``model``.
        write: fills the empty folder it is given.

    Returns:
        The finished folder.

    Raises:
        ResourceError: the disk refuses; the folder is the one before.
    """
    target = folder / name
    with staged(target) as temporary:
        write(temporary)
        manifest.write(temporary)
        flush([*temporary.rglob("*"), temporary])
        _put(temporary, target)
    return target


def _put(temporary: Path, target: Path) -> None:
    """Rename into place; what was there stays in reach until then (see ``mend``)."""
    old = target.with_name(f".old-{target.name}")
    if os.path.lexists(target):
        delete(old)
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    flush([target.parent])
    delete(old)


def write_run(folder: Path, values: Mapping[str, Any]) -> None:
    """Write ``run.json``."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
    write_text(folder / "run.json", text + "\n")


def read_run(folder: Path) -> dict[str, Any] | None:
    """``run.json``, or None where there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / "run.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or "status" not in values:
            raise ValueError("no description of a run")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"cannot be read ({error})",
            where=str(path),
            do="start the run anew with --overwrite",
        ) from None


def hash_of(values: object) -> str:
    """A hash of anything that JSON can hold."""
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def weights_hash(folder: Path) -> str:
    """A hash of a model folder's weights; empty for a model that is not a local folder."""
    files = sorted(folder.glob("*.safetensors"))
    return hash_of([[file.name, digest(file)] for file in files]) if files else ""


def surroundings() -> dict[str, Any]:
    """Versions and source revision, for ``run.json``."""
    versions = {name: version(name) for name in VERSIONS}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git": _revision(),
        "cwd": os.getcwd(),
    }


def _revision() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
