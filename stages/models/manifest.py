"""Size and xxh3-128 of the files of a model folder, so that damage is told by name.

``manifest.json`` lists weights and tokenizer: settings and card may be edited by hand.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from stages.errors import CheckpointError

NAME = "manifest.json"
WEIGHTS = ".safetensors"
BY_HAND = (NAME, "config.json", "generation_config.json", "rlhf.json", "README.md")
"""What is not listed; tokenizers have files of many names, and all of those are."""
BLOCK = 1 << 22
LONGEST_NAME = 255  # bytes; no file system of Linux or macOS has longer ones
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


def write(folder: Path) -> None:
    """Write the manifest of a model folder, where it has weights."""
    facts = {
        file.name: {"bytes": file.stat().st_size, "xxh3_128": digest(file)}
        for file in sorted(folder.iterdir())
        if file.is_file() and file.name not in BY_HAND
    }
    if any(name.endswith(WEIGHTS) for name in facts):
        (folder / NAME).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def require(folder: Path, *, weights: bool = True) -> None:
    """The files are those that were written; a folder without a manifest says nothing.

    Args:
        folder: a model folder.
        weights: whether they are to be read as well, or the tokenizer alone.

    Raises:
        CheckpointError: a file is missing, cut off or changed; it is named.
    """
    if not (folder / NAME).is_file():
        return
    for name, facts in read(folder / NAME).items():
        if name.endswith(WEIGHTS) and not weights:
            continue
        file = folder / name
        if not file.is_file():
            raise _damaged(file, "is missing")
        now = file.stat()
        if now.st_size != facts["bytes"]:
            raise _damaged(file, f"has {now.st_size} bytes, and {facts['bytes']} were written")
        if _digest_once(file, now.st_size, now.st_mtime_ns, now.st_ino) != facts["xxh3_128"]:
            raise _damaged(file, "is not what was written: its hash is another")


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The facts about each file of a manifest.

    Raises:
        CheckpointError: it cannot be read, or names something outside of its folder.
    """
    try:
        values: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        for name, facts in values.items():
            if Path(name).name != name or len(name.encode()) > LONGEST_NAME:
                raise ValueError(f"{name!r} is no name of a file")
            int(facts["bytes"]), str(facts["xxh3_128"])
        return values
    except UNREADABLE as error:
        raise _damaged(path, f"cannot be read ({error})") from error


def digest(path: Path) -> str:
    """xxh3-128 of a file, in hex."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            state.update(block)
    return state.hexdigest()


@lru_cache(maxsize=64)
def _digest_once(path: Path, size: int, changed: int, inode: int) -> str:
    """The hash of a file that has not changed since: a stage asks for each model several times."""
    return digest(path)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(path),
        do="copy the folder anew, or run the stage that made it again; if you have changed it "
        "yourself, delete manifest.json beside it",
    )
