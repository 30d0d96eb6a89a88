"""``rlhf sample``: where the answers go, what is refused, what reaches the library."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_cli.app import main
from tests.stages.project import Project


@dataclass(frozen=True)
class FakeOptions:
    """The options that the command line has for the library."""

    policy: str
    prompts: str
    k: int
    output: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    limit: int | None
    resume: bool


@pytest.fixture
def fake_sample(fake_module: Callable[..., ModuleType]) -> list[Any]:
    """A sampler that writes two lines and keeps its options."""
    calls: list[Any] = []

    def run(options: FakeOptions, reporter: Any, *, write: Callable[[str], None]) -> dict[str, Any]:
        calls.append(options)
        reporter.note("sampling")
        if options.output is None:
            write('{"prompt": "a"}')
            write('{"prompt": "b"}\n')
        return {"status": "done", "output": options.output, "prompts": 2, "answers": 8}

    fake_module("stages.sample", run=run, SampleOptions=FakeOptions)
    return calls


@pytest.mark.parametrize("output", [[], ["--output", "-"]])
def test_answers_without_a_file_are_the_only_thing_on_stdout(
    output: list[str], fake_sample: list[Any], capsys: Any
) -> None:
    assert main(["sample", "runs/sft", "prompts.jsonl", *output]) == 0
    out, err = capsys.readouterr()
    assert out == '{"prompt": "a"}\n{"prompt": "b"}\n'
    assert err == "sampling\n"


@pytest.mark.parametrize("leads_to", ["the descriptor", "the file"])
def test_standard_output_under_another_name_holds_the_answers_alone(
    leads_to: str,
    fake_sample: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with open("so.txt", "w+", encoding="utf-8") as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        descriptor = f"/dev/fd/{stdout.fileno()}"
        Path("link").symlink_to("so.txt" if leads_to == "the file" else descriptor)
        assert main(["sample", "p", "q", "--output", "link"]) == 0
    assert fake_sample[0].output is None
    assert Path("so.txt").read_text() == '{"prompt": "a"}\n{"prompt": "b"}\n'


def test_options_reach_the_library(fake_sample: list[Any], tmp_path: Path) -> None:
    file = str(tmp_path / "answers.jsonl")
    argv = "sample p q --k 9 --max-new-tokens 7 --temperature 0.5 --top-p 0.9 --seed 3 --limit 2"
    assert main([*argv.split(), "--resume", "--output", file]) == 0
    assert fake_sample == [FakeOptions("p", "q", 9, file, 7, 0.5, 0.9, 3, 2, True)]


def test_defaults_are_the_documented_ones(fake_sample: list[Any]) -> None:
    assert main(["sample", "p", "q"]) == 0
    assert fake_sample == [FakeOptions("p", "q", 4, None, 64, 1.0, 1.0, 0, None, False)]


def test_json_prints_one_object(fake_sample: list[Any], capsys: Any) -> None:
    assert main(["sample", "p", "q", "--output", "f", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"] == 8


@pytest.mark.parametrize("flag", ["--json", "--resume"])
def test_flags_that_need_a_file_are_refused_without_one(
    flag: str, fake_sample: list[Any], capsys: Any
) -> None:
    assert main(["sample", "p", "q", flag]) == 2
    assert f"{flag} needs the answers in a file" in capsys.readouterr().err
    assert fake_sample == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--k", "0"],
        ["--max-new-tokens", "0"],
        ["--temperature", "0"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--top-p", "0"],
        ["--top-p", "1.1"],
        ["--limit", "0"],
    ],
)
def test_numbers_out_of_range_are_refused_by_name(
    argv: list[str], fake_sample: list[Any], capsys: Any
) -> None:
    assert main(["sample", "p", "q", *argv]) == 2
    assert f"command line: {argv[0]}: " in capsys.readouterr().err
    assert fake_sample == []


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_a_file_name_that_is_not_utf8_is_refused(
    command: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Project(tmp_path).model("base")
    name = os.fsdecode(b"prompts\xff.jsonl")
    Path(name).write_text('{"prompt": "ab:"}\n')
    assert main([command, "base", name]) == 2
    told = capsys.readouterr().err
    assert "is not UTF-8" in told
    assert "rename the file" in told
