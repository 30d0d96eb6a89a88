"""Bad input to a process of its own: what a shell and a script see."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.bad_input import CASES, Bad, rewrite

ROOT = Path(__file__).parents[2]
CHOSEN = (
    "a mistyped key, which is suggested",
    "the config of another stage",
    "an output folder that is not empty",
    "a broken line in the middle",
    "rankings of which none is left, each dropped for its reason",
    "messages without a chat template",
    "weights that are cut off",
    "a policy as reward model",
    "a family without a reward head",
    "a config that is not there",
)
CASES_HERE = [case for case in CASES if case.name in CHOSEN]
TIMEOUT = 120  # seconds; a process takes about ten where cores are shared


class Ended(NamedTuple):
    """A finished process, and its folder before and after."""

    code: int
    out: str
    err: str
    before: dict[str, bytes]
    after: dict[str, bytes]


@pytest.fixture(scope="module")
def ended(template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """The processes of all chosen cases, two at a time: most of each is imports."""

    def run(case: Bad) -> Ended:
        folder = tmp_path_factory.mktemp("case") / "project"
        shutil.copytree(template, folder)
        case.spoil(folder)
        before = contents(folder)
        process = start(folder, *shlex.split(case.argv))
        out, err = process.communicate(timeout=TIMEOUT)
        return Ended(process.returncode, out, err, before, contents(folder))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip([case.name for case in CASES_HERE], pool.map(run, CASES_HERE), strict=True))


def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
    """Start the command in the project's folder."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RLHF_CACHE": str(folder.parent / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_cli", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **settings},
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES_HERE, ids=lambda case: case.name)
def test_the_process_ends_with_the_code_and_two_lines(case: Bad, ended: dict[str, Ended]) -> None:
    code, out, err, before, after = ended[case.name]
    assert code == case.exit, err
    assert out == ""
    error, do = err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert do.startswith("what to do: ")
    for words in (case.where, *case.what):
        assert words in error
    assert case.do in do
    assert "Traceback" not in err
    assert after == before


def test_the_chosen_cases_exist() -> None:
    assert len(CASES_HERE) == len(CHOSEN)


def test_ctrl_c_stops_after_the_step_with_its_state_saved(template: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(template, folder)
    rewrite(folder / "sft.yaml", "max_steps: 3", "max_steps: 100000")
    process = start(folder, "sft", "sft.yaml", "--json")
    told: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        told.append(line)
        if line.startswith("sft: 2/"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, "".join(told) + err
    printed: dict[str, Any] = json.loads(out)
    assert (printed["exit"], printed["error"]["kind"]) == (130, "interrupted")
    assert "Traceback" not in err
    run = json.loads((folder / "runs/sft/run.json").read_text())
    assert run["status"] == "interrupted"
    (checkpoint,) = (folder / "runs/sft/checkpoints").glob("step-*/COMPLETE")
    assert checkpoint.parent.name == f"step-{run['step']:06d}"
