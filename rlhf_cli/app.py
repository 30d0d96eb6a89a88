"""The command ``rlhf``: its Typer app, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from rlhf_cli import failure
from rlhf_cli.commands import (
    chat,
    check,
    evaluate,
    init,
    online,
    ppo,
    preference,
    sample,
    score,
    sft,
    train_rm,
)
from rlhf_cli.commands import config as config_command
from rlhf_cli.commands import data as data_command
from stages.runtime.signals import ended_by_sigterm

# Plain help: rich would draw boxes and colours into pipes under GITHUB_ACTIONS, and costs a tenth
# of a second of every start.
app = typer.Typer(
    name="rlhf",
    help="The InstructGPT pipeline at the command line, and the methods after it: dpo to grpo.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
)
app.command("init")(init.init)
app.command("sft")(sft.command)
app.command("train-rm")(train_rm.command)
app.command("ppo")(ppo.command)
for _word, _command in {**preference.commands, **online.commands}.items():
    app.command(_word)(_command)
app.command("sample")(sample.sample)
app.command("score")(score.score)
app.command("evaluate")(evaluate.evaluate)
app.command("chat")(chat.chat)
app.command("check")(check.check)
app.add_typer(config_command.app, name="config")
app.add_typer(data_command.app, name="data")


WITHOUT_RESUME = ("init", "check", "config", "data", "score", "evaluate", "chat")
"""Commands that begin anew each time."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("rlhf-cli")
        except PackageNotFoundError:
            number = "(not installed)"
        typer.echo(f"rlhf {number}")
        raise typer.Exit


@app.callback()
def _options_of_the_tool(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    pass


def main(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; no user error leaves here as a traceback.

    Args:
        argv: the arguments after the program's name.

    Returns:
        0 for success, else the exit code of docs/commands.md.
    """
    try:
        with ended_by_sigterm():
            code = _invoke(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return failure.reader_left()
    except (Exception, KeyboardInterrupt) as error:
        resumes = not any(word in WITHOUT_RESUME for word in argv[:1])
        return failure.report(
            error, as_json="--json" in argv, debug="--debug" in argv, resumes=resumes
        )


def _invoke(argv: Sequence[str]) -> int:
    if "_RLHF_COMPLETE" in os.environ:
        app(prog_name="rlhf")
    # Not ``app()``: it would print usage errors in its own form and turn Ctrl-C into a bare code.
    command = typer.main.get_command(app)
    try:
        with command.make_context("rlhf", list(argv), obj=tuple(argv)) as context:
            return command.invoke(context) or 0
    except typer.Exit as ending:
        return ending.exit_code
