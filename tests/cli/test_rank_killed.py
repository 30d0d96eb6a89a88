"""Where the kernel kills a process of a world, the others end, and what was saved is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.runtime import checkpoint
from tests.cli.bad_input import make_project

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds; most of it imports


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_a_killed_process_ends_the_world_with_6_and_the_last_checkpoint_loads(
    tmp_path: Path,
) -> None:
    make_project(tmp_path)
    settings = ["train.max_steps=100000", "checkpoint.every=2", "log.every=1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_cli", "sft", "sft.yaml", *settings, "--num-processes", "2",
         "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
             "RLHF_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    folder = tmp_path / "runs" / "sft" / "checkpoints"
    until = time.monotonic() + PATIENCE
    while not list(folder.glob("step-*/COMPLETE")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 6, err
    error = json.loads(out)["error"]
    assert "process 1 of 2 was killed (SIGKILL)" in error["what"]
    assert "kernel for want of memory" in error["what"]
    assert "train.tokens_per_micro_batch" in error["do"]
    assert "Traceback" not in err
    found = checkpoint.newest(folder, print)
    assert found is not None
    assert checkpoint.load(found).state["step"] >= 2


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank among the launcher's children."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text().split():
            settings = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in settings:
                return int(child)
    raise AssertionError(f"no process of rank {rank}")
