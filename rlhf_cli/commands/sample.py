"""``rlhf sample``: K answers per prompt, as ranking lines that wait for their ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Optional

import typer

from rlhf_cli.commands import options
from rlhf_cli.commands.options import require_number, require_utf8
from rlhf_cli.commands.standard_output import is_stdout
from rlhf_cli.console import clean, make_reporter, silence_libraries
from stages.errors import ConfigError


def sample(
    policy: Annotated[str, typer.Argument(help="A run folder or model folder, or a hub id.")],
    prompts: Annotated[str, typer.Argument(help="A file of prompts, in any format.")],
    k: Annotated[int, typer.Option("--k", help="Answers per prompt.")] = 4,
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output", metavar="FILE", help="Where the lines go; default stdout."),
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = 0,
    limit: options.Limit = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the lines FILE has and add the missing ones.")
    ] = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Sample K answers per prompt, for people to rank (JSONL)."""
    file = None if output is None or is_stdout(output) else output
    check_numbers(k, max_new_tokens, temperature, top_p, limit)
    require_utf8("PROMPTS", prompts)
    _check_output(file, resume=resume, as_json=as_json)
    silence_libraries(debug=debug)
    from stages import sample as stage_sample

    wanted = stage_sample.SampleOptions(
        policy=policy,
        prompts=prompts,
        k=k,
        output=file,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        limit=limit,
        resume=resume,
    )
    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        result = stage_sample.run(wanted, reporter, write=_write_line)
    if file is not None:
        print(_summary(_as_mapping(result), as_json=as_json), flush=True)


def check_numbers(
    k: int, max_new_tokens: int, temperature: float, top_p: float, limit: int | None
) -> None:
    """Refuse what no model could sample with, before one is loaded."""
    require_number(k >= 1, "--k", k, "1 or more")
    require_number(max_new_tokens >= 1, "--max-new-tokens", max_new_tokens, "1 or more")
    require_number(0 < temperature < math.inf, "--temperature", temperature, "a number above 0")
    require_number(0 < top_p <= 1, "--top-p", top_p, "above 0 and at most 1")
    require_number(limit is None or limit >= 1, "--limit", limit, "1 or more")


def _check_output(file: str | None, *, resume: bool, as_json: bool) -> None:
    """Only a file can be resumed, and stdout can hold either the answers or one JSON object."""
    for option, given in (("--resume", resume), ("--json", as_json)):
        if file is None and given:
            raise ConfigError(
                f"{option} needs the answers in a file",
                do="add --output FILE",
                where=f"command line: {option}",
            )


def _write_line(line: str) -> None:
    sys.stdout.write(line if line.endswith("\n") else f"{line}\n")


def _as_mapping(result: object) -> Mapping[str, object]:
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return dataclasses.asdict(result)
    assert isinstance(result, Mapping)
    return result


def _summary(result: Mapping[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(result)
    shown = {key: value for key, value in result.items() if not isinstance(value, Mapping)}
    return clean("sample: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
