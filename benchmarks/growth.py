"""``make bench-growth``: how time and memory of this project grow, one axis at a time.

Writes ``benchmarks/growth.json`` and ``docs/performance.svg``, and puts the table into
``docs/performance.md``. Each point is one short run in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import inputs, table
from benchmarks.bench import say
from benchmarks.configs import values_of
from benchmarks.environments import BUILD, ROOT, ask, do, surroundings
from benchmarks.inputs import SIZES, Size
from benchmarks.works import Job, Work

SFT = Work("growth", "sft", records=16, batch=8, spread=0.0)
REWARD = Work("growth", "reward_model", records=8, batch=4, k=4, spread=0.0)
ANSWERS, LENGTHS = (2, 4, 9), (64, 256, 512, 1024, 2048)
BATCHES, VOCABULARIES = (4, 16, 64), (512, 8192, 32768, 131072)
TEXT = 32  # tokens of a prompt or answer that does not vary
MIDDLE = Size(512, 12, 8, 1408, 16384)  # 46.9 M
Point = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """What grows: its name, and a work and a model for each value."""

    name: str
    points: Sequence[tuple[int, Work, Size]]


def axes() -> Iterator[Axis]:
    """All of them; lengths are fixed, so that each point has the length that it names."""
    small = SIZES["small"]
    yield Axis("K, reward model", [(k, replace(REWARD, k=k), small) for k in ANSWERS])
    yield Axis("prompt tokens, reward model", [(n, _prompt(n), small) for n in LENGTHS])
    yield Axis("answer tokens, SFT", [(n, _answer(n), small) for n in LENGTHS])
    batches = [(n, replace(SFT, records=2 * n, batch=n), small) for n in BATCHES]
    yield Axis("demonstrations of a step, SFT", batches)
    models = (SIZES["tiny"], small, MIDDLE, SIZES["medium"])
    yield Axis("weights, SFT", [(_weights(size), SFT, size) for size in models])
    narrow = [replace(SIZES["tiny"], vocabulary=n) for n in VOCABULARIES]
    yield Axis("vocabulary, SFT", [(size.vocabulary, SFT, size) for size in narrow])


def _prompt(tokens: int) -> Work:
    return replace(REWARD, records=4, batch=2, prompt_words=tokens, answer_words=TEXT)


def _answer(tokens: int) -> Work:
    records = 4 if tokens > 512 else 8
    return replace(SFT, records=records, batch=4, prompt_words=TEXT, answer_words=tokens)


def _weights(size: Size) -> int:
    """Weights of a Llama with tied embeddings, its norms left out."""
    shared = (size.shared_heads or size.heads) / size.heads
    attention = (2 + 2 * shared) * size.hidden**2
    layer = attention + 3 * size.hidden * size.inner
    return round(size.layers * layer + size.vocabulary * size.hidden)


def measure(axis: Axis) -> list[Point]:
    """The points of an axis."""
    found = []
    for value, work, size in axis.points:
        job = _job(work, size, f"{axis.name}-{value}")
        reading = do("ours", job)
        say(f"{axis.name} {value:,}: {reading.seconds:.2f} s, {reading.mib:.0f} MiB")
        found.append(_point(axis.name, value, reading.tokens or 0, reading.seconds, reading.mib))
    return found


def processes() -> list[Point]:
    """The same demonstrations by one and by two processes, through the command line."""
    found = []
    for count in (1, 2):
        job = _job(replace(SFT, records=64, batch=32), SIZES["small"], f"processes-{count}")
        path = Path(f"{job.output}.yaml")
        path.write_text(json.dumps(values_of(job)), encoding="utf-8")
        command = [sys.executable, "-m", "rlhf_cli", "sft", str(path), "--quiet"]
        mib = _peak_of([*command, "--num-processes", str(count)], threads=_threads() // count)
        run = json.loads((Path(job.output) / "run.json").read_text(encoding="utf-8"))
        tokens = sum(int(row["tokens"]) for row in _rows(job))
        seconds = run["seconds"]["train"]
        say(f"processes {count}: {seconds:.2f} s, {mib:.0f} MiB each")
        found.append(_point("processes, SFT", count, tokens, seconds, mib))
    return found


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))


def _rows(job: Job) -> Iterator[dict[str, float]]:
    """Tokens of each logged step."""
    for line in (Path(job.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield {"tokens": row["time/tokens_per_second"] * row["time/train"]}


def _peak_of(command: Sequence[str], *, threads: int) -> float:
    """Run a command; the largest resident memory of any process of it, in MiB."""
    variables = surroundings() | {"OMP_NUM_THREADS": str(max(1, threads))}
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _job(work: Work, size: Size, name: str) -> Job:
    """A model and fresh data of exact lengths."""
    safe = replace(work, name=name).slug
    parts = (size.hidden, size.layers, size.vocabulary)
    models = BUILD / "inputs" / "growth" / "-".join(map(str, parts))
    if not (models / "reward" / "tokenizer.json").is_file():
        inputs.write_models(models, size)
    rows = inputs.records(work, work.records, 0, vocabulary=size.vocabulary)
    data = str(inputs.write_lines(BUILD / "inputs" / "data" / f"growth-{safe}.jsonl", rows))
    model = str(models / ("reward" if work.stage == "reward_model" else "model"))
    output = BUILD / "runs" / "growth" / safe
    output.parent.mkdir(parents=True, exist_ok=True)
    return Job(work, model, str(models / "reward"), data, data, str(output))


def _point(axis: str, value: int, tokens: int, seconds: float, mib: float) -> Point:
    return {
        "axis": axis,
        "value": value,
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "mib": round(mib),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="growth", description=__doc__)
    parser.add_argument("--axes", default="", help="only axes whose name holds this; results aside")
    wanted = parser.parse_args(arguments).axes
    shutil.rmtree(BUILD / "runs" / "growth", ignore_errors=True)
    chosen = [axis for axis in axes() if wanted in axis.name]
    points = [point for axis in chosen for point in measure(axis)]
    if wanted in "processes, SFT":
        points += processes()
    growth = {
        "date": datetime.date.today().isoformat(),
        "machine": ask(sys.executable, "surroundings"),
        "precision": "fp32",
        "points": points,
    }
    path = BUILD / "partial-growth.json" if wanted else table.GROWTH
    path.write_text(f"{json.dumps(growth, indent=1)}\n", encoding="utf-8")
    if not wanted:
        from benchmarks import plot

        plot.draw(growth, plot.PICTURE)
        table.update_page()
    print(table.render_growth(growth))


if __name__ == "__main__":
    main()
