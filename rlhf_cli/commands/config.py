"""``rlhf config show`` and ``rlhf config schema``: what a config says, and what it may say."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rlhf_cli.commands import options

app = typer.Typer(
    name="config", help="Show a resolved config, or the schema of one.", no_args_is_help=True
)


@app.command()
def show(
    config: options.Config,
    overrides: options.Overrides = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Print the config with every default filled in and where each value comes from."""
    from rlhf_cli.config_file import load
    from stages.config import to_yaml

    loaded = load(config, overrides or (), stage=None)
    if as_json:
        values = loaded.config.model_dump(mode="json")
        typer.echo(json.dumps({"config": values, "origins": loaded.origins}, ensure_ascii=False))
    else:
        typer.echo(to_yaml(loaded.config, comments=loaded.origins), nl=False)


@app.command()
def schema(
    stage: Annotated[
        str,
        typer.Argument(
            metavar="STAGE",
            help="The word of a config, such as sft or online_dpo, or the command's.",
        ),
    ],
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Print the JSON Schema of a stage's config."""
    from rlhf_cli.config_file import COMMANDS
    from stages.config import STAGES
    from stages.config.problems import suggestion
    from stages.errors import ConfigError

    words = {command: word for word, command in COMMANDS.items()} | {word: word for word in STAGES}
    if stage not in words:
        raise ConfigError(
            f"no stage is called {stage}{suggestion(stage, list(words))}",
            do=f"name one of {', '.join(STAGES)}",
            where="command line: STAGE",
        )
    described = STAGES[words[stage]].model_json_schema()
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    typer.echo(json.dumps({**dialect, **described}, indent=2, ensure_ascii=False))
