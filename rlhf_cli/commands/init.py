"""``rlhf init``: a folder with everything that the three stages need to run at once."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.assets import asset
from rlhf_cli.commands import options
from rlhf_cli.console import clean, make_reporter, silence_libraries
from rlhf_cli.failure import FULL
from stages.errors import ConfigError

FILES = {
    "configs/sft.yaml": "configs/tiny/sft.yaml",
    "configs/reward_model.yaml": "configs/tiny/reward_model.yaml",
    "configs/ppo.yaml": "configs/tiny/ppo.yaml",
    "configs/dpo.yaml": "configs/tiny/dpo.yaml",
    "configs/odpo.yaml": "configs/tiny/odpo.yaml",
    "configs/kto.yaml": "configs/tiny/kto.yaml",
    "configs/orpo.yaml": "configs/tiny/orpo.yaml",
    "configs/simpo.yaml": "configs/tiny/simpo.yaml",
    "configs/grpo.yaml": "configs/tiny/grpo.yaml",
    "configs/rloo.yaml": "configs/tiny/rloo.yaml",
    "configs/reinforce.yaml": "configs/tiny/reinforce.yaml",
    "configs/online_dpo.yaml": "configs/tiny/online_dpo.yaml",
    "README.md": "configs/tiny/README.md",
    "run.sh": "configs/tiny/run.sh",
    "summary.py": "configs/tiny/summary.py",
    "tone_count.py": "data_samples/tone_count.py",
}
"""Each file of the project and the shipped file that it is a copy of."""
MADE = ("data", "base")
"""Folders of the project that are made on the spot, the same on every run."""
SEED = 0


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The project's folder.", show_default=True)
    ] = Path(),
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Make a small project, ready to run; overwrites nothing."""
    refuse_existing(folder)
    silence_libraries(debug=debug)
    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        reporter.note("making the project's data and its tiny base model")
        build(folder)
    result = {"status": "done", "output": str(folder), "next": _next_command(folder)}
    text = f"init: a project in {folder}\n  next     {result['next']}"
    print(json.dumps(result) if as_json else clean(text, keep="\n"), flush=True)


def refuse_existing(folder: Path) -> None:
    """Check that nothing of the project is there yet.

    Raises:
        ConfigError: a file or folder of the same name exists, or ``folder`` is no folder.
    """
    taken = [folder] if folder.exists() and not folder.is_dir() else []
    taken += [folder / name for name in _entries() if os.path.lexists(folder / name)]
    if taken:
        raise ConfigError(
            "exists already and is not overwritten",
            do="name a new folder: rlhf init DIR",
            where=str(taken[0]),
        )


def build(folder: Path) -> None:
    """Make everything in a folder beside its final place, then move it there entry by entry.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".rlhf-init-", dir=folder)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ConfigError(
            "cannot be written", do="name a folder of your own: rlhf init DIR", where=str(folder)
        ) from error
    with scratch as made:
        _fill(Path(made))
        for name in _entries():
            os.replace(Path(made) / name, folder / name)


def _entries() -> list[str]:
    """What the project's folder holds at its top."""
    return sorted({Path(name).parts[0] for name in FILES} | set(MADE))


def _fill(folder: Path) -> None:
    from stages.models.tiny import make_base

    for name, source in FILES.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(asset(source), target)
    (folder / "run.sh").chmod(0o755)
    generator = [sys.executable, str(folder / "tone_count.py"), "make", str(folder / "data")]
    subprocess.run(generator, check=True, stdout=subprocess.DEVNULL)
    make_base(folder / "base", _texts(folder / "data"), seed=SEED)


def _texts(data: Path) -> Iterator[str]:
    """The task's text, from which the base model's tokenizer learns its merges."""
    for name in ("demonstrations.jsonl", "pretrain.jsonl"):
        for line in (data / name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            yield "".join(
                record[field] for field in ("prompt", "response", "text") if field in record
            )


def _next_command(folder: Path) -> str:
    return "./run.sh" if folder == Path() else f"cd {shlex.quote(str(folder))} && ./run.sh"
