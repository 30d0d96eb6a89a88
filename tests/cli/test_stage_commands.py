"""The commands of the three stages: what reaches the library and what is printed at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_cli import launch as launch_module
from rlhf_cli.app import main
from rlhf_cli.commands import stage as stage_module

KEYS = ["stage", "status", "output", "model", "step", "selected", "metrics", "seconds", "next"]


def test_flags_and_overrides_reach_the_stage(fake_sft: Any, config: str) -> None:
    calls = fake_sft()
    assert main(["sft", config, "train.learning_rate=1e-3", "--resume"]) == 0
    assert calls[0]["resume"] is True
    assert calls[0]["overwrite"] is False
    assert calls[0]["config"].train.learning_rate == 1e-3


def test_resume_and_overwrite_exclude_each_other(fake_sft: Any, config: str, capsys: Any) -> None:
    calls = fake_sft()
    assert main(["sft", config, "--resume", "--overwrite"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert calls == []


def test_json_result_is_one_object_with_the_promised_keys(
    fake_sft: Any, result: Any, config: str, capsys: Any
) -> None:
    fake_sft(result(metrics={"eval/loss": 0.5, "eval/ece": float("nan")}))
    assert main(["sft", config, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == KEYS
    assert printed["metrics"] == {"eval/loss": 0.5, "eval/ece": None}


def test_last_lines_name_model_figures_and_next_command(
    fake_sft: Any, result: Any, config: str, capsys: Any
) -> None:
    selected = {"step": 30, "by": "eval/loss", "value": 0.98765}
    fake_sft(result(selected=selected, metrics={"eval/loss": 0.98765, "optim/lr": 1.0}))
    assert main(["sft", config, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["sft:", "done", "at", "step", "40", "in", "1m23s"]
    assert lines[1][:2] == ["model", "runs/x/model"]
    assert lines[2] == ["eval/loss", "0.9877"]
    assert lines[3] == ["next", "rlhf", "train-rm", "configs/reward_model.yaml"]


def test_a_gate_that_holds_exits_with_0(fake_sft: Any, result: Any, config: str) -> None:
    fake_sft(result(metrics={"eval/loss": 0.5}))
    assert main(["sft", config, "--require", "eval/loss<=1", "--require", "eval/loss>0"]) == 0


def test_a_gate_that_fails_exits_with_7_after_the_result(
    fake_sft: Any, result: Any, config: str, capsys: Any
) -> None:
    fake_sft(result(metrics={"eval/loss": 2.5}))
    assert main(["sft", config, "--require", "eval/loss<=1"]) == 7
    out, err = capsys.readouterr()
    assert "runs/x/model" in out
    assert "eval/loss is 2.5 (required: eval/loss<=1)" in err


def test_a_gate_that_fails_prints_one_object_with_json(
    fake_sft: Any, result: Any, config: str, capsys: Any
) -> None:
    fake_sft(result(metrics={"eval/loss": 2.5}))
    assert main(["sft", config, "--json", "--require", "eval/loss<=1"]) == 7
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "gate"


def test_a_misspelt_gate_is_refused_before_the_run(fake_sft: Any, config: str) -> None:
    calls = fake_sft()
    assert main(["sft", config, "--require", "evl/loss<=1"]) == 2
    assert calls == []


def test_other_processes_of_a_world_print_nothing(
    fake_sft: Any, result: Any, config: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sft(result(metrics={}))
    monkeypatch.setenv("RANK", "1")
    assert main(["sft", config, "--require", "eval/loss<=1"]) == 0
    assert capsys.readouterr() == ("", "")


def test_dry_run_checks_and_trains_nothing(
    fake_sft: Any, fake_module: Callable[..., ModuleType], config: str, capsys: Any
) -> None:
    calls = fake_sft()
    report = {"stage": "sft", "disk": {"fits": True}}
    fake_module("stages.check", run=lambda config, reporter, dump: report)
    assert main(["sft", config, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert calls == []


def test_num_processes_hands_the_command_line_to_the_launcher(
    fake_sft: Any, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_sft()
    launched: list[Any] = []
    monkeypatch.setattr(
        stage_module,
        "launch",
        lambda argv, processes, *, as_json: launched.append((argv, processes, as_json)) or 5,
    )
    argv = ["sft", config, "--num-processes", "3", "--json"]
    assert main(argv) == 5
    assert launched == [(tuple(argv), 3, True)]
    assert calls == []


def test_one_process_is_no_world(fake_sft: Any, config: str) -> None:
    calls = fake_sft()
    assert main(["sft", config, "--num-processes", "1"]) == 0
    assert len(calls) == 1


@pytest.mark.parametrize("number", ["0", "-2"])
def test_fewer_than_one_process_is_refused(number: str, config: str, capsys: Any) -> None:
    assert main(["sft", config, "--num-processes", number]) == 2
    assert launch_module.FLAG in capsys.readouterr().err


def test_a_world_within_a_world_is_refused(
    config: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["sft", config, "--num-processes", "2"]) == 2
    assert "one of 4 that another launcher started" in capsys.readouterr().err


def test_a_config_from_stdin_cannot_feed_several_processes(capsys: Any) -> None:
    assert main(["sft", "-", "--num-processes", "2"]) == 2
    assert "standard input" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "word"), [("train-rm", "reward_model"), ("ppo", "ppo")])
def test_each_command_refuses_the_config_of_another_stage(
    command: str, word: str, config: str, capsys: Any, tmp_path: Path
) -> None:
    assert main([command, config]) == 2
    assert "this is a sft config" in capsys.readouterr().err.replace("an sft", "a sft")
    assert not (tmp_path / "runs").exists()


def test_the_next_command_names_the_config_beside_this_one() -> None:
    assert stage_module.beside(
        "configs/sft.yaml", "rlhf train-rm reward_model.yaml model=runs/sft"
    ) == ("rlhf train-rm configs/reward_model.yaml model=runs/sft")
    assert stage_module.beside("a b/sft.yaml", "rlhf ppo ppo.yaml") == "rlhf ppo 'a b/ppo.yaml'"
    assert stage_module.beside("sft.yaml", "rlhf ppo ppo.yaml") == "rlhf ppo ppo.yaml"
    other = "rlhf sample runs/ppo prompts.jsonl --output answers.jsonl"
    assert stage_module.beside("configs/ppo.yaml", other) == other
