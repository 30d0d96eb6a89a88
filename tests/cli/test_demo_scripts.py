"""The project's own scripts: ``run.sh`` calls the stages in order, ``summary.py`` reads them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli.assets import asset

FAKE_RLHF = """#!/bin/sh
echo "$@" >> calls.txt
"""
FAKE_PYTHON = """#!/bin/sh
echo "$(basename "$1")" "$2" >> calls.txt
"""


def write_run(runs: Path, stage: str, rows: list[dict[str, object]], selected: object) -> None:
    """A run folder with the two files that the summary reads."""
    (runs / stage).mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (runs / stage / "metrics.jsonl").write_text(lines)
    run = {"selected": selected, "seconds": {"total": 20.0}}
    (runs / stage / "run.json").write_text(json.dumps(run))


def evaluation(step: int, **figures: float) -> dict[str, object]:
    return {"kind": "eval", "step": step, **{f"eval/{k}": v for k, v in figures.items()}}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Three finished runs; the best sft model is not the last."""
    runs = tmp_path / "runs"
    best = {"step": 10, "by": "eval/loss", "value": 1.0}
    rows = [evaluation(0, loss=6.0), {"kind": "train", "step": 5, "loss/sft": 3.0}]
    write_run(runs, "sft", [*rows, evaluation(10, loss=1.0), evaluation(20, loss=1.5)], best)
    rows = [evaluation(0, accuracy=0.5), evaluation(20, accuracy=0.875)]
    write_run(runs, "reward_model", rows, None)
    rows = [evaluation(0, score=0.0, kl=0.0), evaluation(80, score=2.0, kl=1.7)]
    write_run(runs, "ppo", rows, None)
    (tmp_path / "before.json").write_text('{"true_score": 0.73}')
    (tmp_path / "after.json").write_text('{"true_score": 0.94}')
    return tmp_path


def summarise(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = asset("configs/tiny/summary.py")
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)


def test_summary_holds_the_figures_before_and_after(project: Path) -> None:
    summarise(project, "--seconds", "90", "--true-scores", "before.json", "after.json")
    assert json.loads((project / "summary.json").read_text()) == {
        "sft": {"eval_loss_before": 6.0, "eval_loss_after": 1.0, "true_score": 0.73},
        "reward_model": {"accuracy_before": 0.5, "accuracy_after": 0.875},
        "ppo": {
            "true_score_before": 0.73,
            "true_score_after": 0.94,
            "score_before": 0.0,
            "score_after": 2.0,
            "kl": 1.7,
        },
        "seconds": 90.0,
    }


def test_table_shows_one_line_per_figure_and_the_three_models(project: Path) -> None:
    printed = summarise(project, "--true-scores", "before.json", "after.json").stdout
    rows = [line.split() for line in printed.splitlines()]
    assert ["ppo:", "true", "score", "0.730", "0.940"] in rows
    assert rows[-3:] == [[stage, f"runs/{stage}/model"] for stage in ("sft", "reward_model", "ppo")]


def test_a_rerun_that_had_nothing_to_do_keeps_the_time_of_the_stages(project: Path) -> None:
    summarise(project, "--seconds", "2")
    assert json.loads((project / "summary.json").read_text())["seconds"] == 60.0


def test_without_a_rule_there_is_no_true_score(project: Path) -> None:
    printed = summarise(project).stdout
    assert "true" not in printed
    assert "true_score" not in (project / "summary.json").read_text()


def test_run_script_calls_the_stages_in_order_from_a_path_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a project"
    folder.mkdir()
    shutil.copy(asset("configs/tiny/run.sh"), folder)
    for name, text in (("the rlhf", FAKE_RLHF), ("the python", FAKE_PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "RLHF": str(tmp_path / "the rlhf"),
        "PYTHON": str(tmp_path / "the python"),
    }
    subprocess.run([str(folder / "run.sh")], env=environment, check=True, capture_output=True)
    calls = [line.split()[:2] for line in (folder / "calls.txt").read_text().splitlines()]
    assert calls == [
        ["sft", "configs/sft.yaml"],
        ["sample", "runs/sft"],
        ["tone_count.py", "label"],
        ["train-rm", "configs/reward_model.yaml"],
        ["ppo", "configs/ppo.yaml"],
        ["sample", "runs/sft"],
        ["sample", "runs/ppo"],
        ["tone_count.py", "score"],
        ["tone_count.py", "score"],
        ["summary.py", "--seconds"],
    ]


def test_run_script_stops_at_the_first_failure(tmp_path: Path) -> None:
    shutil.copy(asset("configs/tiny/run.sh"), tmp_path)
    environment = {**os.environ, "RLHF": "false"}
    ended = subprocess.run([str(tmp_path / "run.sh")], env=environment, capture_output=True)
    assert ended.returncode == 1
