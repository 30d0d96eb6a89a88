"""The arguments and options that several commands share, each described once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from stages.errors import ConfigError

if TYPE_CHECKING:
    from stages.config.rewards import Placed

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The config, a YAML file.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045  (Typer reads it at run time on Python 3.10)
    typer.Argument(
        metavar="KEY=VALUE", help="Settings that win over the file: train.learning_rate=1e-5."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print results and warnings only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of all errors.")]
Processes = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--num-processes",
        metavar="N",
        help="Train with N processes on this machine.",
        show_default=False,
    ),
]
Require = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--require",
        metavar="'METRIC>=X'",
        help="Exit with 7 after saving unless the bound is kept (>=, <=, >, <, ==); repeatable.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on where the run stopped; start it if it never began."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything and train nothing; same as rlhf check.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens per answer at most.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature.")]
TopP = Annotated[float, typer.Option(help="Sample from this share of probability.")]
Seed = Annotated[int, typer.Option(help="Equal seeds give equal answers.")]
Limit = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--limit", metavar="N", help="Only the first N records.", show_default=False),
]
Device = Annotated[str, typer.Option(metavar="[auto|cpu|cuda|mps]")]
Precision = Annotated[str, typer.Option(metavar="[auto|bf16|fp32]")]

YAML = (".yaml", ".yml")


def require_number(holds: bool, option: str, value: object, right: str) -> None:
    """Refuse a number that no model could work with, before one is loaded.

    Raises:
        ConfigError: it is out of range; ``right`` says what would be in it.
    """
    if not holds:
        raise ConfigError(
            f"{value} is out of range", do=f"give {right}", where=f"command line: {option}"
        )


def require_choice(option: str, value: str | None, words: Sequence[str]) -> None:
    """Refuse a word that an option does not know; None is not given.

    Raises:
        ConfigError: it is none of them.
    """
    if value is not None and value not in words:
        raise ConfigError(
            f"there is no {value}",
            do=f"give {', '.join(words[:-1])} or {words[-1]}",
            where=f"command line: {option}",
        )


def require_utf8(argument: str, name: str) -> None:
    """Refuse a file whose name a config cannot hold.

    Raises:
        ConfigError: the name has bytes that are no text.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name {name} is not UTF-8",
            do="rename the file, or lead to it by a link with another name",
            where=f"command line: {argument}",
        ) from None


def require_place(device: str, precision: str) -> None:
    """Refuse a device or a number format that there is not.

    Raises:
        ConfigError: it is no word of the options.
    """
    require_choice("--device", device, ("auto", "cpu", "cuda", "mps"))
    require_choice("--precision", precision, ("auto", "bf16", "fp32"))


def reward_terms(name: str) -> tuple[Placed, ...]:
    """The terms of a reward in a YAML file, or the one term of a reward model.

    Raises:
        ConfigError: the file cannot be read as such.
    """
    if name.lower().endswith(YAML) and not Path(name).is_dir():
        from rlhf_cli.config_file import load_reward

        return load_reward(name).terms
    from stages.config import resolve_reward

    return resolve_reward({"type": "model", "path": name}).terms
