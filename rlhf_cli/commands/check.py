"""``rlhf check``: everything that can be known before training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from rlhf_cli.commands import options
from rlhf_cli.commands.standard_output import is_stdout
from rlhf_cli.console import clean, make_reporter, silence_libraries
from stages.errors import ConfigError

if TYPE_CHECKING:
    from stages.config import StageConfig

INDENT = "  "


def check(
    config: options.Config,
    overrides: options.Overrides = None,
    dump: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--dump", metavar="FILE", help="Write every encoded example to FILE (JSONL)."),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Check config, data and models before training."""
    from rlhf_cli.config_file import load

    if dump is not None and is_stdout(dump):
        raise ConfigError(
            "standard output holds the report",
            do="name a file",
            where=f"command line: --dump {dump}",
        )
    loaded = load(config, overrides or [], stage=None)
    silence_libraries(debug=debug)
    check_config(loaded.config, as_json=as_json, quiet=quiet, dump=dump)


def check_config(
    config: StageConfig, *, as_json: bool, quiet: bool, dump: str | None = None
) -> None:
    """Check one config of any stage and print the report on stdout.

    Raises:
        ResourceError: the disk cannot hold the run; with ``--json`` the failure's object is all.
    """
    from stages import check as stage_check

    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        report = stage_check.run(config, reporter, dump=dump)
    fits = report["disk"]["fits"]
    if fits or not as_json:
        print(json.dumps(report) if as_json else "\n".join(as_lines(report)), flush=True)
    if not fits:
        from stages.budget import short_of_disk

        raise short_of_disk(config, report["disk"])


def as_lines(report: Mapping[str, object], indent: str = "") -> Iterator[str]:
    """A report as indented lines: one per figure, a block per section, a row per list entry."""
    width = max((len(str(key)) for key in report), default=0)
    for key, value in report.items():
        name = clean(str(key)).replace("_", " ")
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}"
            yield from as_lines(value, indent + INDENT)
        elif _is_block(value):
            yield f"{indent}{name}"
            yield from (f"{indent}{INDENT}{row}" for row in _rows(value))
        else:
            yield f"{indent}{name:<{width}}  {_scalar(value)}"


def _is_block(value: object) -> bool:
    """A text of several lines or a list that holds more than plain numbers and words."""
    if isinstance(value, str):
        return "\n" in value
    return _is_list(value) and any(_is_list(v) or isinstance(v, Mapping) for v in value)  # type: ignore[attr-defined]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _rows(value: object) -> Iterator[str]:
    """The lines of a block; entries that are mappings become ``key=value`` rows."""
    if isinstance(value, str):
        yield from (clean(line) for line in value.split("\n"))
        return
    for entry in value:  # type: ignore[attr-defined]
        if isinstance(entry, Mapping):
            yield "  ".join(f"{clean(str(k))}={_scalar(v)}" for k, v in entry.items())
        else:
            yield _scalar(entry)


def _scalar(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(str(k))} {_scalar(v)}" for k, v in value.items()) or "-"
    if isinstance(value, Sequence):
        return ", ".join(map(_scalar, value)) or "-"
    return clean(str(value))
