"""Where a run may write: not over what it reads, nor over what is there unless that is meant."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from stages.config import (
    ModelReward,
    OnlineConfig,
    PpoConfig,
    PythonReward,
    RewardModelConfig,
    SftConfig,
    StageConfig,
)
from stages.errors import CheckpointError, ConfigError
from stages.runtime import run_dir

T = TypeVar("T")
LONGEST_INSIDE = 128
"""Bytes that the paths of the files inside a run folder take at most."""


def require(config: StageConfig) -> None:
    """The output folder can be written, and is no folder that the run reads.

    Raises:
        ConfigError: it is a file, may not be written, holds, is or lies in the folder of a model
            that is read, or holds a file that is read among those that a run writes.
    """
    folder = Path(config.output)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(
            "is a file", where=f"output: {folder}", do="give output the name of a folder"
        )
    nearest = existing(folder)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{nearest} cannot be written",
            where=f"output: {folder}",
            do="give output a folder that this user may write into",
        )
    _require_short(folder, nearest)
    written = folder.resolve()
    for key, source in sources(config):
        read = Path(source).resolve()
        if os.path.exists(source) and (written in (read, *read.parents) or read in written.parents):
            how = "is" if read == written else "holds" if written in read.parents else "lies in"
            raise ConfigError(
                f"{how} the folder of {key} ({source}), which the run reads",
                where=f"output: {folder}",
                do="give output another folder",
            )
    for key, source in files(config):
        if name := _replaced(source, folder):
            raise ConfigError(
                f"holds the file of {key} ({source}), which the run reads, and a run replaces "
                f"{name} in its folder",
                where=f"output: {folder}",
                do="move the file elsewhere, or give output another folder",
            )


def _require_short(folder: Path, nearest: Path) -> None:
    """The file system takes the folder's name, and the names of what a run puts into it."""
    longest = max(len(os.fsencode(part)) for part in os.path.abspath(folder).split(os.sep))
    room = len(os.fsencode(os.path.abspath(folder))) + LONGEST_INSIDE
    for size, limit in ((longest, "PC_NAME_MAX"), (room, "PC_PATH_MAX")):
        if size > os.pathconf(nearest, limit):
            raise ConfigError(
                "the name is too long for the file system",
                where=f"output: {folder}",
                do="give output a shorter name",
            )


def files(config: StageConfig) -> Iterator[tuple[str, str]]:
    """The files that a stage reads: their keys and each one's path."""
    for key, named in _named_files(config):
        for entry in (named,) if isinstance(named, str) else named:
            yield key, entry
            for found in glob.iglob(entry, recursive=True) if glob.has_magic(entry) else ():
                yield key, found


def _named_files(config: StageConfig) -> Iterator[tuple[str, str | tuple[str, ...]]]:
    named = {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "data.chat_template": config.data.chat_template,
    }
    if isinstance(config, SftConfig):
        named["sft.pretrain.data"] = config.sft.pretrain.data
    if isinstance(config, RewardModelConfig):
        named["normalise.demonstrations"] = config.normalise.demonstrations
    if isinstance(config, PpoConfig):
        named["ptx.data"] = config.ptx.data
    for key, value in named.items():
        if isinstance(value, str | tuple):
            yield key, value
    if isinstance(config, OnlineConfig):
        yield from ((f"{key}.path", term.path) for key, term in _of_type(config, PythonReward))


def _of_type(config: OnlineConfig, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The terms of the reward of a type, each with its key."""
    return ((key, term) for key, _, term in config.terms if isinstance(term, kind))


def _replaced(source: str, folder: Path) -> str | None:
    """Which of the names that a run writes holds the file, as it is named or where it truly is."""
    names = (*run_dir.FOLDERS, *run_dir.FILES)
    ours = {f"{mark}{name}" for mark in ("", ".tmp-", ".old-") for name in names}
    for read in (Path(os.path.abspath(source)), Path(source).resolve()):
        for written in (Path(os.path.abspath(folder)), folder.resolve()):
            if written in read.parents and read.relative_to(written).parts[0] in ours:
                return read.relative_to(written).parts[0]
    return None


def sources(config: StageConfig) -> list[tuple[str, str]]:
    """The models that a stage reads: their keys and what they name."""
    found = [("model", config.model)]
    if isinstance(config, RewardModelConfig) and config.normalise.policy:
        found.append(("normalise.policy", config.normalise.policy))
    if isinstance(config, OnlineConfig):
        found += [(f"{key}.path", term.path) for key, term in _of_type(config, ModelReward)]
        if config.reference:
            found.append(("reference", config.reference))
    if isinstance(config, PpoConfig) and config.critic.init not in ("reward", "policy"):
        found.append(("critic.init", config.critic.init))
    return found


def require_free(config: StageConfig, *, resume: bool, overwrite: bool) -> None:
    """The output folder is empty, or holds a run that is meant to be gone on with or replaced.

    Raises:
        ConfigError: it is neither, what the run would write over is of no run, or one of the
            run's own files is a link.
    """
    folder = Path(config.output)
    if (folder / "run.json").is_dir():
        raise ConfigError(
            "run.json in it is a folder, and a run keeps a file of that name",
            where=f"output: {folder}",
            do="move that folder away, or give output another folder",
        )
    if foreign := run_dir.foreign(folder):
        raise ConfigError(
            f"{foreign} in it would be written over, and the folder is no run of rlhf: it has no "
            "run.json",
            where=f"output: {folder}",
            do="give output another folder",
        )
    if link := run_dir.link(folder):
        raise ConfigError(
            f"{link.name} in it is a link to {os.readlink(link)}, and a run writes into its own "
            "folder only",
            where=f"output: {folder}",
            do="put the folder or file itself there, or let output as a whole be the link",
        )
    if run_dir.occupied(folder) and not (resume or overwrite):
        raise ConfigError(
            "the folder is not empty",
            where=f"output: {folder}",
            do="go on with --resume, replace it with --overwrite, or give output another folder",
        )


def require_unlocked(folder: Path) -> None:
    """No other run holds the folder; nothing is written.

    Raises:
        ConfigError: another run is writing into it.
    """
    if (folder / ".lock").is_file():
        with run_dir.locked(folder):
            pass


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def state_of(folder: Path) -> str:
    """What stands in the output folder, in words: ``free``, or what an earlier run left."""
    if not run_dir.occupied(folder):
        return "free"
    try:
        run = run_dir.read_run(folder)
    except CheckpointError:
        return "not empty, and its run.json cannot be read"
    if run is None:
        return "not empty, and no run of rlhf"
    return f"a run of {run.get('stage')}, {run.get('status')} at step {run.get('step')}"
