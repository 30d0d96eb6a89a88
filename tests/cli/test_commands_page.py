"""``docs/commands.md`` tells the truth: every option is on the page, and its CI example runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rlhf_cli.app import app
from stages import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
COMMANDS = {
    "sft": "sft",
    "train-rm": "sft",
    "ppo": "sft",
    **dict.fromkeys(("dpo", "odpo", "kto", "orpo", "simpo"), "sft"),
    **dict.fromkeys(("grpo", "rloo", "reinforce", "online-dpo"), "sft"),
    "check": "check",
    "sample": "sample",
    "score": "score",
    "evaluate": "evaluate",
    "chat": "chat",
    "init": "init",
    "data inspect": "data",
    "data convert": "data",
    "config show": "config",
    "config schema": "config",
}
"""Each command and the section that describes it."""


def section(name: str) -> str:
    """The text below the heading that begins with the command."""
    begin = PAGE.index(f"\n## `rlhf {name}`")
    return PAGE[begin : PAGE.index("\n## ", begin + 1)]


def options_of(command: str) -> set[str]:
    """The long options of a command, as Typer knows them."""
    found = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.opts if "--" in option}


@pytest.mark.parametrize(("command", "heading"), COMMANDS.items())
def test_every_option_is_on_the_page_and_no_other(command: str, heading: str) -> None:
    described = set(re.findall(r"--[a-z][a-z-]*", section(heading)))
    assert options_of(command) - {"--help"} <= described
    if heading == command:
        assert described <= options_of(command)


def test_every_command_is_on_the_page() -> None:
    top = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    listed = re.findall(r"^rlhf ([a-z-]+)", PAGE, flags=re.MULTILINE)
    assert set(listed) == set(top)


def test_every_exit_code_is_on_the_page() -> None:
    classes = (
        errors.ConfigError,
        errors.DataError,
        errors.CheckpointError,
        errors.TrainingError,
        errors.ResourceError,
        errors.GateError,
    )
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE)]
    assert listed == [0, 1, *(kind.exit_code for kind in classes), 141]


def test_the_three_lines_for_continuous_integration_run(tmp_path: Path) -> None:
    example = re.findall(r"```sh\n(.*?)```", PAGE[PAGE.index("## In continuous") :], re.DOTALL)[0]
    assert len(example.splitlines()) == 3
    project = tmp_path / "project"
    shim = tmp_path / "bin" / "rlhf"
    project.mkdir()
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rlhf_cli "$@"\n')
    shim.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RLHF_CACHE": str(tmp_path / "cache"),
    }
    ended = subprocess.run(
        ["sh", "-euc", example], cwd=project, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads((project / "sft.json").read_text())
    assert result["status"] == "done"
    assert result["step"] == 60
