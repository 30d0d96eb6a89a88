"""The peers' environments, the settings of all child processes, and how one is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds import Reading
from benchmarks.works import Job, Stage

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "bench"
PEERS = {"trl-1.16": "TRL 1.16", "trl-1.12": "TRL 1.12"}
"""The environments, each made from the file of its name in ``benchmarks/peers/``."""
PEER_OF: dict[Stage, str] = {
    "sft": "trl-1.16",
    "reward_model": "trl-1.16",
    "ppo": "trl-1.12",
    "sample": "trl-1.16",
}
RAISED = str(1 << 30)  # bytes
SETTINGS = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
    "GOMP_SPINCOUNT": "10000",
    "MALLOC_MMAP_THRESHOLD_": RAISED,
    "MALLOC_TRIM_THRESHOLD_": RAISED,
}
"""Environment variables of every child, of either side, that its speed may depend on.

With glibc's own thresholds each large tensor is mapped anew and its pages are faulted in, which
slows the peers, whose tensors are large, more than this project.
"""
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
TAIL = 3000  # characters of a failed child's messages


class ChildFailed(RuntimeError):
    """A child process ended with an error."""


def surroundings() -> dict[str, str]:
    """The variables of a child process."""
    return {**os.environ, **SETTINGS, **QUIET, "RLHF_CACHE": str(BUILD / "cache")}


def python_of(name: str) -> str:
    """The interpreter of a peer's environment, which is made where it is missing or out of date."""
    folder = BUILD / name
    wanted = (ROOT / "benchmarks" / "peers" / f"{name}.txt").read_text(encoding="utf-8")
    stamp = folder / "requirements.txt"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        _install(folder, name)
        stamp.write_text(wanted, encoding="utf-8")
    return str(folder / "bin" / "python")


def _install(folder: Path, name: str) -> None:
    """A virtual environment with this project's torch and the peer."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    folder.parent.mkdir(parents=True, exist_ok=True)
    torch = folder.parent / "torch.txt"
    torch.write_text("".join(f"{pin}\n" for pin in pins if pin.startswith("torch==")))
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "-c", str(torch)]
    # By itself first: so an index or a folder of CPU builds is asked for nothing else.
    subprocess.run([*pip, "torch"], check=True)
    listed = str(ROOT / "benchmarks" / "peers" / f"{name}.txt")
    subprocess.run([*pip, "-r", listed], check=True)


def ask(python: str, module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of this package in a process of its own and return the object it prints.

    Raises:
        ChildFailed: it ended with an error; the end of what it said is shown.
    """
    done = subprocess.run(
        [python, "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        env=surroundings(),
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = f"{done.stdout}\n{done.stderr}"[-TAIL:]
        raise ChildFailed(f"{module} {' '.join(arguments)} ended with {done.returncode}:\n{said}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def do(side: str, job: Job) -> Reading:
    """A job by one side, ``peer`` or ``ours``, in a child process."""
    path = job.write(Path(f"{job.output}.json"))
    python = sys.executable if side == "ours" else python_of(PEER_OF[job.work.stage])
    return Reading(**ask(python, side, str(path)))


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Installed versions in an environment."""
    code = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
