"""What a model's source is, from its files alone: refusals that need no weights in memory.

A source is a run folder, a model folder or a hub id.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_url, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import build_hf_headers, get_session, validate_repo_id
from safetensors import SafetensorError, safe_open

from stages.errors import CheckpointError
from stages.models import manifest
from stages.models.folder import Identity, model_folder, read_config, read_identity

HUB_SECONDS = 10  # to answer whether it has a model
INDEX = "model.safetensors.index.json"


def identity_of(source: str) -> Identity | None:
    """What a source says about itself; None for models of other tools.

    Raises:
        CheckpointError: no such folder, a folder without a model, or no such model on the hub.
    """
    folder = model_folder(source)
    if os.path.isdir(folder):  # False for a name that is too long to be one
        if (folder / "run.json").is_file() and not (folder / "config.json").exists():
            raise CheckpointError(
                "the run in this folder has not made a model yet",
                where=source,
                do="finish it with --resume, or name another model",
            )
        read_config(folder)
        return read_identity(folder)
    if os.path.exists(folder):
        raise CheckpointError(
            "is a file, not a model folder",
            where=source,
            do="name the run folder of an earlier stage, or a model folder",
        )
    if source.count("/") != 1 or not _is_hub_id(source):
        raise _missing(source, "no such folder")
    _require_on_hub(source)
    return None


def _is_hub_id(source: str) -> bool:
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def require_weights(source: str) -> None:
    """The weights of a local folder are there, as they were written, and no pickles.

    Raises:
        CheckpointError: it names the file.
    """
    folder = model_folder(source)
    if not folder.is_dir():
        return
    files = _weight_files(folder)
    if not files:
        _refuse_pickles(folder, source)
        raise _unusable("holds no weights (model.safetensors)", source)
    for file in files:
        if not file.is_file():
            raise _unusable(f"lacks a part of its weights, {file.name}", source)
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise _unusable(f"{file.name} is damaged or cut off ({error})", source) from error
    manifest.require(folder)


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index names, or the one file, or none."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except FileNotFoundError:
        return sorted(folder.glob("*.safetensors"))
    except manifest.UNREADABLE as error:
        raise _unusable(f"{INDEX} cannot be read ({error})", str(folder)) from error


def _refuse_pickles(folder: Path, source: str) -> None:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise CheckpointError(
            "holds pickled weights, which can run any code when they are opened",
            where=source,
            do="convert them to safetensors where they come from, then name that folder",
        )


@lru_cache
def _require_on_hub(source: str) -> None:
    """Ask once, with little patience: a path whose run was never made looks like a hub id."""
    if isinstance(try_to_load_from_cache(source, "config.json"), str):
        return
    if is_offline_mode():
        raise _missing(
            source,
            "no such folder, and the hub's models that are not on this machine are not asked for "
            "while HF_HUB_OFFLINE is set",
            fetch="unset HF_HUB_OFFLINE to fetch the model",
        )
    try:
        url = hf_hub_url(source, "config.json")
        answer = get_session().head(url, headers=build_hf_headers(), timeout=HUB_SECONDS)
    except Exception as error:  # the network libraries underneath raise kinds of their own
        raise _missing(
            source,
            "no such folder, and the hub cannot be reached to look for such a model",
            fetch="look after the connection, or copy the model into a folder and name that",
        ) from error
    if answer.status_code in (401, 403, 404):
        raise _missing(
            source,
            "no such folder, and no such model on the hub that you may read",
            fetch="mend the model's name, or log in (hf auth login) if it is not public",
        )


def _missing(source: str, what: str, *, fetch: str = "") -> CheckpointError:
    do = "run the stage that makes it first, or mend the path"
    if fetch:
        do = f"if it is a folder, {do}; if it is a hub id, {fetch}"
    return CheckpointError(what, where=source, do=do)


def _unusable(what: str, source: str) -> CheckpointError:
    do = "copy the folder anew, or run the stage that made it again"
    return CheckpointError(what, where=source, do=do)
