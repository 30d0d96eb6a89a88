"""``rlhf score``: answers with what a reward says of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from rlhf_cli.commands import options
from rlhf_cli.commands.data import one_file
from rlhf_cli.commands.options import require_place, reward_terms
from rlhf_cli.commands.standard_output import is_stdout
from rlhf_cli.console import clean, make_reporter, silence_libraries
from stages.errors import ConfigError


def score(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="REWARD", help="A reward model's folder or hub id, or a YAML file of terms."
        ),
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Answers in any format; - is standard input.")
    ],
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--output",
            metavar="FILE",
            help="Where the lines go; default stdout.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output file.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model brings.")
    ] = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Score the answers of a file with any reward (JSONL)."""
    to_stdout = output is None or is_stdout(output)
    if to_stdout and as_json:
        raise ConfigError(
            "--json needs the lines in a file",
            do="add --output FILE",
            where="command line: --json",
        )
    require_place(device, precision)
    terms = reward_terms(reward)
    silence_libraries(debug=debug)
    from stages import score as stage_score
    from stages.config import ModelReward, PythonReward
    from stages.data.output import opened

    with make_reporter(as_json=as_json, quiet=quiet) as reporter:
        name = one_file(file)
        wanted = stage_score.ScoreOptions(terms, name, device, precision, trust_remote_code)
        if to_stdout:
            done = stage_score.run(wanted, reporter, sys.stdout.write)
            reporter.note(_summary(done, "stdout"))
            return
        assert output is not None
        files = (each.term for each in terms if isinstance(each.term, ModelReward | PythonReward))
        read = [name, reward, *(path for term in files for path in _read_at(term.path))]
        with opened(Path(output).expanduser(), *read, force=force) as out:
            done = stage_score.run(wanted, reporter, out.write)
    told = {"file": file, "output": output, **done}
    print(json.dumps(told) if as_json else _summary(done, output), flush=True)


def _read_at(path: str) -> tuple[str, str]:
    """The path of a term, and the model in it where it is a run folder."""
    from stages.models.folder import model_folder

    return path, str(model_folder(path))


def _summary(done: Mapping[str, Any], output: str) -> str:
    mean = "none" if done["mean"] is None else f"{done['mean']:.4g}"
    parts = [f"{output}: {done['lines']} lines, {done['answers']} answers, mean score {mean}"]
    if done["missing"]:
        parts.append(f"{done['missing']} without a judgement")
    parts += [f"{count} left out: {reason}" for reason, count in done["dropped"].items()]
    return clean("; ".join(parts))
