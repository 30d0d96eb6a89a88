"""``rlhf check``: the report for a person and for a program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_cli.app import main
from rlhf_cli.commands.check import as_lines

REPORT: dict[str, Any] = {
    "stage": "sft",
    "data": {
        "train": {"records": 57, "dropped": {"overlong": 2, "empty": 1}, "formats": ["messages"]},
        "eval": None,
    },
    "example": {
        "text": "Hi\x1b[2J\nthere",
        "tokens": [{"token": "Hi", "target": False}, {"token": "[bold]", "target": True}],
    },
    "memory": {"bytes": 1234567.0, "fits": True},
    "disk": {"need": 3.0, "free": 2.0, "fits": True},
}


@pytest.fixture
def fake_check(fake_module: Callable[..., ModuleType]) -> list[Any]:
    """A check that returns the report above and keeps what it was asked for."""
    calls: list[Any] = []

    def run(config: Any, reporter: Any, *, dump: str | None) -> dict[str, Any]:
        calls.append((config.stage, dump))
        return REPORT

    fake_module("stages.check", run=run)
    return calls


def test_json_report_is_the_library_s_own(fake_check: list[Any], config: str, capsys: Any) -> None:
    assert main(["check", config, "--json", "--dump", "examples.jsonl"]) == 0
    assert json.loads(capsys.readouterr().out) == REPORT
    assert fake_check == [("sft", "examples.jsonl")]


def test_a_dump_to_standard_output_is_refused(
    fake_check: list[Any], config: str, capsys: Any
) -> None:
    assert main(["check", config, "--dump", "-"]) == 2
    assert "holds the report" in capsys.readouterr().err
    assert fake_check == []


def test_a_dump_to_standard_output_under_another_name_is_refused(
    fake_check: list[Any], config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "so.txt").open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        assert main(["check", config, "--dump", f"/dev/fd/{stdout.fileno()}"]) == 2
    assert fake_check == []


def test_report_for_a_person_shows_every_figure_in_its_section(
    fake_check: list[Any], config: str, capsys: Any
) -> None:
    assert main(["check", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "stage    sft",
        "data",
        "  train",
        "    records  57",
        "    dropped",
        "      overlong  2",
        "      empty     1",
        "    formats  messages",
        "  eval   -",
        "example",
        "  text",
        "    Hi\\x1b[2J",
        "    there",
        "  tokens",
        "    token=Hi  target=no",
        "    token=[bold]  target=yes",
        "memory",
        "  bytes  1.235e+06",
        "  fits   yes",
        "disk",
        "  need  3",
        "  free  2",
        "  fits  yes",
    ]


def test_a_disk_that_cannot_hold_the_run_is_refused_behind_the_report(
    fake_check: list[Any], config: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REPORT["disk"], "fits", False)
    assert main(["check", config]) == 6
    out, err = capsys.readouterr()
    assert "  fits  no" in out.splitlines()
    assert "about 3 MiB are needed" in err
    assert "2 are free" in err
    assert main(["check", config, "--json"]) == 6
    printed = json.loads(capsys.readouterr().out)
    assert (printed["status"], printed["exit"]) == ("failed", 6)


def test_overrides_are_part_of_what_is_checked(
    fake_check: list[Any], config: str, capsys: Any
) -> None:
    assert main(["check", config, "train.learnin_rate=1"]) == 2
    assert "train.learnin_rate" in capsys.readouterr().err
    assert fake_check == []


def test_an_empty_section_is_shown_as_such() -> None:
    assert list(as_lines({"dropped": {}, "kept": []})) == ["dropped  -", "kept     -"]
