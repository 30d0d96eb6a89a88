"""SIGKILL at chosen moments: between steps, at an epoch's end, inside a save, inside an iteration.

The campaign of ``make torture`` kills at random ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stages.killed import MOMENTS

ROOT = Path(__file__).parents[2]

# The newest checkpoint that is whole behind the kill; where there is none, the run starts anew.
LEFT = {
    "sft": ["step-000002", "step-000002", "step-000002", "step-000003"],
    "reward_model": ["step-000002", "step-000002", "step-000002"],
    "ppo": ["step-000004", None, "step-000004", "step-000004"],
    "reinforce": ["step-000002", "step-000002"],
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", MOMENTS)
def test_a_run_killed_at_a_chosen_moment_ends_bit_equal(tmp_path: Path, stage: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.stages.killed", stage, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == list(MOMENTS[stage])
    for (text, trial), left in zip(report.items(), LEFT[stage], strict=True):
        assert trial["killed"] == -signal.SIGKILL, (text, trial)
        assert trial["left"] == left, (text, trial)
        assert trial["resumed"] == 0, (text, trial)
        assert trial["different"] == [], (text, trial)
