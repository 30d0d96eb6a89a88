"""``rlhf init``: a complete project, made the same every time, and never over anything."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_cli.app import main
from rlhf_cli.assets import asset
from rlhf_cli.commands.init import FILES
from stages.errors import ConfigError


@pytest.fixture
def fake_base(fake_module: Callable[..., ModuleType]) -> list[Any]:
    """A base model that is one file."""
    calls: list[Any] = []

    def make_base(folder: Path, texts: Iterable[str], *, seed: int) -> None:
        calls.append(list(texts))
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    fake_module("stages.models.tiny", make_base=make_base)
    return calls


def test_project_is_complete(fake_base: list[Any], tmp_path: Path, capsys: Any) -> None:
    project = tmp_path / "a new" / "project"
    assert main(["init", str(project)]) == 0
    made = {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()}
    data = {f"data/{n}.jsonl" for n in ("demonstrations", "prompts", "eval_prompts", "pretrain")}
    assert made == {*FILES, *data, "base/config.json"}
    assert os.access(project / "run.sh", os.X_OK)
    assert f"cd '{project}' && ./run.sh" in capsys.readouterr().out


def test_tokenizer_learns_from_prompts_answers_and_plain_texts(
    fake_base: list[Any], tmp_path: Path
) -> None:
    assert main(["init", str(tmp_path / "p")]) == 0
    (texts,) = fake_base
    first = json.loads((tmp_path / "p/data/demonstrations.jsonl").read_text().splitlines()[0])
    last = json.loads((tmp_path / "p/data/pretrain.jsonl").read_text().splitlines()[-1])
    assert texts[0] == first["prompt"] + first["response"]
    assert texts[-1] == last["text"]


def test_json_names_the_folder_and_the_next_command(
    fake_base: list[Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"status": "done", "output": ".", "next": "./run.sh"}
    assert (tmp_path / "run.sh").exists()


@pytest.mark.parametrize("taken", ["run.sh", "data", "configs"])
def test_nothing_is_overwritten(
    taken: str, fake_base: list[Any], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / taken).write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path / taken}: exists already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "mine"


def test_a_second_init_is_refused(fake_base: list[Any], tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "p")]) == 0
    assert main(["init", str(tmp_path / "p")]) == 2


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p").write_text("mine")
    assert main(["init", str(tmp_path / "p")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_folder_below_a_file_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "p").write_text("mine")
    assert main(["init", str(tmp_path / "p" / "q")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_failure_leaves_no_half_project(
    fake_module: Callable[..., ModuleType], tmp_path: Path
) -> None:
    def fail(folder: Path, texts: Iterable[str], *, seed: int) -> None:
        raise MemoryError

    fake_module("stages.models.tiny", make_base=fail)
    assert main(["init", str(tmp_path)]) == 6
    assert list(tmp_path.iterdir()) == []


def test_a_missing_asset_is_a_broken_installation() -> None:
    with pytest.raises(ConfigError, match="missing from this installation"):
        asset("configs/no such file")


def test_run_script_is_valid_for_the_shell() -> None:
    script = asset("configs/tiny/run.sh")
    assert subprocess.run(["sh", "-n", str(script)], check=False).returncode == 0
