"""What the commands of the stages share: they differ in their word and their library."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import typer

from rlhf_cli import gates
from rlhf_cli.commands import options
from rlhf_cli.commands.check import check_config
from rlhf_cli.console import clean, duration, is_main_process, make_reporter, silence_libraries
from rlhf_cli.launch import check_world, launch
from stages.errors import ConfigError

if TYPE_CHECKING:
    from stages.runtime.run_dir import Result

HEADLINES = (
    "eval/loss",
    "eval/perplexity",
    "eval/accuracy",
    "eval/margin",
    "eval/ece",
    "eval/length_accuracy",
    "eval/score",
    "eval/kl",
    "objective/score",
    "objective/kl",
    "rollout/ended",
    "loss/sft",
    "loss/ranking",
    "loss/preference",
    "preference/margin",
)
"""Figures for the last lines of a stage, most telling first; those that it has are shown."""
HEADLINES_SHOWN = 6


def stage_command(word: str, *, description: str, module: str | None = None) -> Callable[..., int]:
    """The command of one stage.

    Args:
        word: the stage as configs name it, such as reward_model.
        description: the first line of its help.
        module: the library of that stage in ``stages``; None where it has the stage's name.
    """

    def command(
        context: typer.Context,
        config: options.Config,
        overrides: options.Overrides = None,
        resume: options.Resume = False,
        overwrite: options.Overwrite = False,
        dry_run: options.DryRun = False,
        require: options.Require = None,
        num_processes: options.Processes = None,
        as_json: options.AsJson = False,
        quiet: options.Quiet = False,
        debug: options.Debug = False,
    ) -> int:
        from rlhf_cli.config_file import load

        if resume and overwrite:
            raise ConfigError(
                "--resume and --overwrite exclude each other",
                do="keep one: --resume goes on with the run, --overwrite replaces it",
                where="command line",
            )
        bounds = [gates.parse(text, stage=word) for text in require or ()]
        starts_world = check_world(num_processes, config=config)
        loaded = load(config, overrides or [], stage=word)
        silence_libraries(debug=debug)
        if dry_run:
            check_config(loaded.config, as_json=as_json, quiet=quiet)
            return 0
        if starts_world:
            return launch(context.obj, num_processes or 1, as_json=as_json)
        run = importlib.import_module(f"stages.{module or word}").run
        with make_reporter(as_json=as_json, quiet=quiet) as reporter:
            result = run(loaded.config, reporter, resume=resume, overwrite=overwrite)
        if is_main_process():
            following = beside(config, result.next)
            finish(dataclasses.replace(result, next=following), bounds, as_json=as_json)
        return 0

    command.__doc__ = description
    return command


def beside(config: str, command: str) -> str:
    """The next command, its config looked for in the folder of this stage's config."""
    words = command.split(" ")
    folder = os.path.dirname(config)
    if len(words) > 2 and words[2].endswith(".yaml") and os.path.dirname(words[2]) == "":
        words[2] = shlex.quote(os.path.join(folder, words[2]))
    return " ".join(words)


def finish(result: Result, bounds: list[gates.Gate], *, as_json: bool) -> None:
    """Print the result of a stage on stdout and hold it against what was required.

    With ``--json`` a failed requirement is reported by the object of the failure alone.
    """
    if as_json:
        gates.check(bounds, result.metrics)
        print(as_object(result), flush=True)
    else:
        print(as_text(result), flush=True)
        gates.check(bounds, result.metrics)


def as_object(result: Result) -> str:
    """The JSON object of a finished stage; a number that JSON cannot hold becomes null."""
    fields = dataclasses.asdict(result)
    fields["metrics"] = {name: _finite(value) for name, value in result.metrics.items()}
    return json.dumps(fields, allow_nan=False, default=os.fspath)


def as_text(result: Result) -> str:
    """The last lines for a person: where the model is, how good it is, what to run next."""
    shown = [name for name in HEADLINES if name in result.metrics][:HEADLINES_SHOWN]
    lines = [
        f"{result.stage}: {result.status} at step {result.step} in {duration(result.seconds)}",
        f"  model    {result.model}{_choice(result.selected)}",
        *(f"  {name:<22} {result.metrics[name]:.4g}" for name in shown),
    ]
    if result.next:
        lines.append(f"  next     {result.next}")
    return clean("\n".join(lines), keep="\n")


def _choice(selected: Mapping[str, object] | None) -> str:
    """Which of the run's models was kept, where there was a choice."""
    if not selected or selected.get("value") is None:
        return ""
    return f" (step {selected['step']}, best {selected['by']} {selected['value']:.4g})"


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") and value == value else None
