"""``rlhf data inspect`` and ``rlhf data convert``: what a data file is, and in another form."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from rlhf_cli.commands import options
from rlhf_cli.commands.check import as_lines
from rlhf_cli.commands.standard_output import is_stdout
from rlhf_cli.console import clean, make_reporter, silence_libraries
from stages.errors import ConfigError

if TYPE_CHECKING:
    from stages.data.convert import Converted
    from stages.data.inspect import FileReport
    from stages.data.templates import Codec

Columns = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--column",
        metavar="THEIRS=OURS",
        help="Read a column under another name, as data.columns does; repeatable.",
        show_default=False,
    ),
]
app = typer.Typer(
    name="data", help="Look at a data file, or write it in another form.", no_args_is_help=True
)


@app.command()
def inspect(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="Paths or globs; - is standard input."),
    ],
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Count tokens with the tokenizer of this folder or hub id.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--chat-template",
            metavar="NAME",
            help="A template in place of the tokenizer's: chatml or a path.",
            show_default=False,
        ),
    ] = None,
    column: Columns = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Print what a data file is, and what would be dropped and why."""
    if chat_template is not None and model is None:
        raise ConfigError(
            "--chat-template needs a tokenizer",
            do="add --model",
            where="command line: --chat-template",
        )
    columns = _columns(column)
    silence_libraries(debug=debug)
    from stages.data.inspect import find
    from stages.data.inspect import inspect as look

    codec = None if model is None else _codec(model, chat_template)
    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        reports, overlap = look(list(dict.fromkeys(find(files))), codec, reporter, columns)
    if as_json:
        print(json.dumps(_as_object(reports, overlap)), flush=True)
    else:
        blocks = ["\n".join(as_lines(block)) for block in _for_people(reports, overlap)]
        print("\n\n".join(blocks), flush=True)


@app.command()
def convert(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A data file; - is standard input.")],
    to: Annotated[
        str, typer.Option("--to", metavar="FORM", help="canonical, trl, openrlhf or llama-factory.")
    ],
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="Where the lines go; - is stdout.")
    ],
    as_messages: Annotated[
        bool, typer.Option("--as-messages", help="Write every prompt as turns of a conversation.")
    ] = False,
    column: Columns = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Write the records of a data file in the form that a tool reads (JSONL)."""
    to_stdout = is_stdout(output)
    if to_stdout and as_json:
        raise ConfigError(
            "--json needs the lines in a file",
            do="add --output FILE",
            where="command line: --json",
        )
    silence_libraries(debug=debug)
    from stages.data import convert as conversion
    from stages.data.output import opened

    if to not in conversion.TARGETS:
        raise ConfigError(
            f"no form is called {to!r}",
            do=f"name one of {', '.join(conversion.TARGETS)}",
            where="command line: --to",
        )
    settings: dict[str, Any] = {"as_messages": as_messages, "columns": _columns(column)}
    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        name = one_file(file)
        if to_stdout:
            done = conversion.convert(name, to, sys.stdout, reporter=reporter, **settings)
            reporter.note(_summary(done, output))
            return
        with opened(Path(output).expanduser(), name, force=force) as out:
            done = conversion.convert(name, to, out, reporter=reporter, **settings)
    told = {"file": file, "to": to, "output": output, **asdict(done)}
    print(json.dumps(told) if as_json else _summary(done, output), flush=True)


def _columns(given: list[str] | None) -> dict[str, str]:
    """The renamings of ``--column``."""
    pairs = [entry.partition("=") for entry in given or []]
    for theirs, equals, ours in pairs:
        if not (theirs and equals and ours):
            raise ConfigError(
                f"{theirs + equals + ours!r} renames nothing",
                do="write the file's name first: question=prompt",
                where="command line: --column",
            )
    return {theirs: ours for theirs, _, ours in pairs}


def one_file(file: str) -> str:
    """The one file that a path or a glob names."""
    from stages.data.inspect import find

    found = list(find([file]))
    if len(found) > 1:
        raise ConfigError(
            f"names {len(found)} files", do="convert one after the other", where=f"FILE {file}"
        )
    return found[0]


def _codec(model: str, chat_template: str | None) -> Codec:
    from stages.data.templates import make_codec
    from stages.models.folder import model_folder, read_identity
    from stages.models.load import load_tokenizer

    folder = model_folder(model)
    identity = read_identity(folder) if folder.is_dir() else None
    as_messages = identity is not None and identity.as_messages and chat_template is None
    return make_codec(load_tokenizer(model), chat_template=chat_template, as_messages=as_messages)


def _as_object(reports: list[FileReport], overlap: int) -> dict[str, Any]:
    if len(reports) > 1:
        return {"files": [asdict(report) for report in reports], "overlap": overlap}
    return {name: value for name, value in asdict(reports[0]).items() if name != "file"}


def _for_people(reports: list[FileReport], overlap: int) -> Iterator[dict[str, Any]]:
    """A block for each file, without what does not apply to it."""
    for report in reports:
        facts = {name: value for name, value in asdict(report).items() if value is not None}
        facts["dropped"] = facts["dropped"] or "none"
        facts["k"] = {f"K={k}": count for k, count in report.k.items()}
        if not report.k:
            facts.pop("k")
        if len(reports) == 1:
            facts.pop("overlap")
        if report.prompt_tokens is None:
            facts["tokens"] = "not counted (give a tokenizer with --model)"
        yield facts
    if len(reports) > 1:
        yield {"prompts in several files": overlap}


def _summary(done: Converted, output: str) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in done.dropped.items())
    left = f"; left out: {reasons}" if reasons else ""
    return clean(f"{output}: {done.lines} lines of {done.records} {done.format} records{left}")
