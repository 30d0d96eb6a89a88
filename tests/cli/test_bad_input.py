"""Bad input through the real command line: told in two sentences, and nothing written or lost."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_cli.app import main
from rlhf_cli.console import PlainReporter
from tests.cli import bad_input
from tests.cli.bad_input import KIND, Bad
from tests.cli.bad_input_fields import FIELDS
from tests.cli.bad_input_online import ONLINE
from tests.cli.bad_input_places import PLACES

CASES = [*bad_input.CASES, *PLACES, *FIELDS, *ONLINE]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, and every folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def failed(argv: list[str], capsys: Any) -> dict[str, Any]:
    """Run a command that must fail, and return the object it prints."""
    capsys.readouterr()
    code = main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert code != 0, out
    printed = json.loads(out)
    assert printed.keys() == {"status", "exit", "error"}
    assert (printed["status"], printed["exit"]) == ("failed", code)
    error = printed["error"]
    assert error.keys() == {"kind", "where", "what", "do"}
    assert "Traceback" not in err
    place = f"{error['where']}: " if error["where"] else ""
    told = [f"error: {place}{error['what']}", f"what to do: {error['do']}"]
    assert err.splitlines()[-2:] == told
    return printed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_told_in_two_sentences_and_changes_nothing(
    case: Bad, folder: Path, capsys: Any
) -> None:
    held = case.spoil(folder)
    before = contents(folder)
    argv = shlex.split(case.argv)
    printed = failed(argv, capsys)
    error = printed["error"]
    assert printed["exit"] == case.exit, error
    assert error["kind"] == KIND[case.exit]
    assert case.where in error["where"]
    for words in case.what:
        assert words in error["what"]
    assert case.do in error["do"]
    assert error["do"][:1] == error["do"][:1].lower()
    assert error["do"][-1:] not in ("", ".")
    assert contents(folder) == before
    if case.as_check and argv[0] != "check":
        assert failed(["check", *argv[1:]], capsys)["error"] == error
        assert contents(folder) == before
    del held


def test_there_are_150_cases_or_more_and_none_comes_twice() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 150


def test_every_message_is_free_of_the_tool_s_own_names(folder: Path) -> None:
    """Sentences of the table hold no names of modules, classes or private functions."""
    for case in CASES:
        for words in (*case.what, case.do):
            assert "stages." not in words
            assert "Error(" not in words


@pytest.mark.parametrize("stage", ["sft sft.yaml", "train-rm rm.yaml", "ppo ppo.yaml"])
def test_the_unspoilt_project_passes(stage: str, folder: Path, capsys: Any) -> None:
    assert main([*stage.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"


def test_overwrite_keeps_the_earlier_run_until_the_new_one_can_begin(
    folder: Path, capsys: Any
) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    before = contents(folder)
    printed = failed(["sft", "sft.yaml", "data.train=no.jsonl", "--overwrite"], capsys)
    assert printed["exit"] == 3
    assert contents(folder) == before


def test_overwrite_replaces_the_tool_s_own_files_and_no_others(folder: Path) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    (folder / "runs/sft/notes.txt").write_text("mine")
    assert main(["sft", "sft.yaml", "train.max_steps=1", "--overwrite"]) == 0
    kept = {path.name for path in (folder / "runs/sft/checkpoints").iterdir()}
    assert kept == {"step-000001"}
    assert (folder / "runs/sft/notes.txt").read_text() == "mine"


def test_a_dry_run_reports_and_writes_nothing(folder: Path, capsys: Any) -> None:
    before = contents(folder)
    for stage in ("sft sft.yaml", "train-rm rm.yaml", "ppo ppo.yaml"):
        capsys.readouterr()
        assert main([*stage.split(), "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["output_is"] == "free"
    assert contents(folder) == before


def test_resume_with_a_changed_key_names_it_and_leaves_the_run(folder: Path, capsys: Any) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    before = contents(folder)
    printed = failed(["sft", "sft.yaml", "train.batch_size=2", "--resume"], capsys)
    assert printed["exit"] == 4
    assert printed["error"]["where"] == "runs/sft: train.batch_size"
    assert "was 4" in printed["error"]["what"]
    assert "is 2 now" in printed["error"]["what"]
    assert "--overwrite" in printed["error"]["do"]
    assert contents(folder) == before


def test_a_failed_requirement_exits_with_7_and_keeps_the_model(folder: Path, capsys: Any) -> None:
    printed = failed(["sft", "sft.yaml", "--require", "loss/sft<=0"], capsys)
    assert printed["exit"] == 7
    assert printed["error"]["kind"] == "gate"
    assert "loss/sft" in printed["error"]["what"]
    assert (folder / "runs/sft/model/model.safetensors").is_file()
    assert json.loads((folder / "runs/sft/run.json").read_text())["status"] == "done"


@pytest.mark.parametrize(
    ("stage", "steps"),
    [
        ("sft sft.yaml", 3),
        ("train-rm rm.yaml", 2),
        ("ppo ppo.yaml train.total_episodes=12", 3),
    ],
)
def test_an_interrupt_saves_the_state_and_resume_goes_on(
    stage: str, steps: int, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: PlainReporter, done: int, metrics: Any = None) -> None:
        if done == 1 and metrics is not None:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(PlainReporter, "advance", interrupt)
        printed = failed(stage.split(), capsys)
    assert printed["exit"] == 130
    assert printed["error"]["kind"] == "interrupted"
    assert "--resume" in printed["error"]["do"]
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert (run / "checkpoints/step-000001/COMPLETE").is_file()
    assert main([*stage.split(), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_named(folder: Path, capsys: Any) -> None:
    before = contents(folder)
    for command in ("sft", "check"):
        printed = failed([command, "sft.yaml", "device=cuda"], capsys)
        assert printed["exit"] == 2
        assert printed["error"]["where"] == "device"
        assert "cuda is not available" in printed["error"]["what"]
        assert "auto" in printed["error"]["do"]
    assert contents(folder) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_that_may_not_be_written_is_named(folder: Path, capsys: Any) -> None:
    (folder / "runs").mkdir(mode=0o500)
    for command in ("sft", "check"):
        printed = failed([command, "sft.yaml"], capsys)
        assert printed["exit"] == 2
        assert printed["error"]["where"] == "output: runs/sft"
        assert "cannot be written" in printed["error"]["what"]


def test_a_finished_run_is_told_by_check_and_not_refused(folder: Path, capsys: Any) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    before = contents(folder)
    capsys.readouterr()
    assert main(["check", "sft.yaml", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["config"]["output_is"] == "a run of sft, done at step 3"
    assert "warning: the output folder is not empty" in err
    assert contents(folder) == before
