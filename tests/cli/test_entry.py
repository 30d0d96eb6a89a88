"""What the program does before a command runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_cli import __main__ as entry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch):
    """Start the program with a command that only tells what its surroundings are."""

    def start():
        seen = {}
        monkeypatch.setattr(entry, "main", lambda argv: seen.update(os.environ) or 0)
        with pytest.raises(SystemExit) as ended:
            entry.run()
        assert ended.value.code == 0
        return seen

    monkeypatch.setenv("GOMP_SPINCOUNT", "0")  # restored whatever the program sets
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    return start


def test_threads_that_wait_go_to_sleep_soon(started):
    assert started()["GOMP_SPINCOUNT"] == "10000"


def test_what_the_user_says_about_waiting_threads_is_left(started, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert started()["GOMP_SPINCOUNT"] == "7"


def test_a_wait_policy_of_the_user_is_left(started, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "GOMP_SPINCOUNT" not in started()


@pytest.mark.parametrize(
    ("argv", "redirection", "code"),
    [
        ("config show configs/sft.yaml --json", ">&-", 0),
        ("config show -", "<&-", 2),
        ("config show configs/nope.yaml", "2>&-", 2),
    ],
)
def test_a_closed_stream_is_as_good_as_dev_null(argv, redirection, code):
    line = f"exec {shlex.quote(sys.executable)} -m rlhf_cli {argv} {redirection}"
    ended = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
