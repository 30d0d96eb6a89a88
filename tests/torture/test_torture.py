"""A few seconds of each campaign; ``make torture`` runs them for as long as one likes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.torture import mutate

ROOT = Path(__file__).parents[2]


def torture(tmp_path: Path, campaign: str, *options: str, seconds: float) -> dict[str, Any]:
    """A campaign in a process of its own: it forks, and this one may have threads."""
    report = tmp_path / "report.json"
    command = ["--only", campaign, "--seconds", str(seconds), "--seed", "7", "--output", report]
    command += options
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]
    return json.loads(report.read_text())[campaign]


def test_runs_killed_at_random_lose_no_checkpoint_and_end_bit_equal(tmp_path: Path) -> None:
    report = torture(tmp_path, "kills", "--stage", "sft", seconds=4)
    assert report["trials"]["sft"] >= 1
    assert report["failures"] == 0


def test_spoilt_input_ends_in_no_traceback(tmp_path: Path) -> None:
    report = torture(tmp_path, "fuzz", seconds=5)
    assert sum(report["inputs"].values()) > 50
    assert report["failures"] == 0
    assert {"2", "3", "4"} <= report["codes"].keys(), "spoilt input is refused, most of it"


def test_the_same_seed_spoils_in_the_same_way() -> None:
    good = {"prompt": "a", "responses": [{"text": "b", "rank": 1}]}
    first, second = ([mutate.value(good, random.Random(n)) for n in range(50)] for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert good == {"prompt": "a", "responses": [{"text": "b", "rank": 1}]}
    assert len({json.dumps(value) for value in first}) > 40
