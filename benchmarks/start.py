"""From the command to the end of the first training step, beside the imports it cannot avoid."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.configs import values_of
from benchmarks.environments import PEER_OF, ROOT, ChildFailed, python_of, surroundings
from benchmarks.rounds import Reading
from benchmarks.watch import Watch
from benchmarks.works import Job

IMPORTS = (
    "import sys, torch, transformers; transformers.LlamaForCausalLM;"
    "print('imported', file=sys.stderr, flush=True)"
)


def seconds_until(command: list[str], mark: str) -> Reading:
    """Run a command to its end, and time it up to the first line of stderr that holds a mark.

    Raises:
        ChildFailed: no such line came.
    """
    watch, said = Watch(), []
    watch.start()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=surroundings(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        seconds = None
        for line in process.stderr:
            said.append(line)
            if seconds is None and mark in line:
                seconds = watch.so_far()
    watch.stop()
    if seconds is None:
        raise ChildFailed(f"{command} never said {mark!r}:\n{''.join(said[-20:])}")
    return Reading(seconds=seconds, disturbed=watch.disturbed)


def imports() -> Reading:
    """torch, transformers and the model's class, in this project's environment."""
    return seconds_until([sys.executable, "-c", IMPORTS], "imported")


def ours(job: Job) -> Reading:
    """``rlhf sft CONFIG``; a YAML file may be JSON."""
    path = Path(f"{job.output}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values_of(job)), encoding="utf-8")
    command = [sys.executable, "-m", "rlhf_cli", "sft", str(path), "--overwrite"]
    return seconds_until(command, "sft: 1/")


def peer(job: Job) -> Reading:
    """The peer's script on the same data."""
    path = replace(job, save=False).write(Path(f"{job.output}.json"))
    command = [python_of(PEER_OF[job.work.stage]), "-m", "benchmarks.peer", str(path)]
    return seconds_until(command, "first step")
