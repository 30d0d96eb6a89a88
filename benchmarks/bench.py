"""``make bench``: this project and its peers take turns at the same works.

Writes ``benchmarks/results.json``, prints the table, and puts it into ``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import inputs, learning, start, table, works
from benchmarks.environments import (
    BUILD,
    PEERS,
    SETTINGS,
    ChildFailed,
    ask,
    do,
    python_of,
    versions,
)
from benchmarks.rounds import Reading, alternate, spread
from benchmarks.works import Job, Work

TRACKED = ("torch", "transformers")
START = "start to first step, tiny model"
ONE_STEP = replace(works.sft(64), name="start", size="tiny", records=32)
SEEDS = (0, 1, 2)
LEARNING = "learning"
Part = tuple[str, Callable[[], None]]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a part of it failed, which is said, and the rest is shown."""
    options = _options(arguments)
    begun = time.perf_counter()
    machine = _set_up(options)
    ready = time.perf_counter()
    say(f"set up in {ready - begun:.0f} s")
    results = _head(machine) | {"rows": [], "failed": []}
    shutil.rmtree(BUILD / "runs", ignore_errors=True)
    for name, part in _parts(results, options, machine["fast_bf16"]):
        try:
            part()
        except (ChildFailed, OSError) as error:
            say(f"{name} failed: {error}")
            results["failed"].append(name)
        _store(results, BUILD / "partial.json")
        options.spare *= time.perf_counter() - ready < 60 * options.minutes
    results["minutes"] = round((time.perf_counter() - ready) / 60, 1)
    results["set_up_minutes"] = round((ready - begun) / 60, 1)
    if options.works == LEARNING:
        results = json.loads(table.RESULTS.read_text(encoding="utf-8")) | {
            name: results[name] for name in (LEARNING, "failed")
        }
    _store(results, options.output)
    if options.output == table.RESULTS:
        table.update_page()
    print(table.render(results))
    return 1 if results["failed"] else 0


def _set_up(options: argparse.Namespace) -> dict[str, Any]:
    """Environments and models; what the machine is."""
    for name in PEERS:
        say(f"environment of {name}")
        python_of(name)
    machine = ask(sys.executable, "surroundings")
    chosen = _chosen(options, fast_bf16=machine["fast_bf16"])
    _models({*(work.size for work, _ in chosen), "tiny"})
    return machine


def _parts(results: dict[str, Any], options: argparse.Namespace, fast_bf16: bool) -> list[Part]:
    """What is run, in this order; each part puts its figures into the results."""

    def measure(work: Work, precision: str) -> None:
        results["rows"].append(_measure(work, precision, options))

    def first_step() -> None:
        results["start"], row = _start(options)
        results["rows"].append(row)

    def learn() -> None:
        place = learning.Place(BUILD / "inputs" / "tiny", BUILD / "runs" / "learning", say)
        results[LEARNING] = []
        learning.compare(place, () if options.quick else SEEDS, results[LEARNING])

    chosen = _chosen(options, fast_bf16=fast_bf16)
    parts: list[Part] = [("warm-up", _warm_up)] if chosen and not options.quick else []
    parts += [(work.name, partial(measure, work, precision)) for work, precision in chosen]
    if not options.works:
        parts.append((START, first_step))
    if options.learning and options.works in (None, LEARNING):
        parts.append((LEARNING, learn))
    return parts


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, one round")
    parser.add_argument("--rounds", type=int, help="clean rounds of each work (3; quick: 1)")
    parser.add_argument("--spare", type=int, default=2, help="rounds that may be repeated")
    parser.add_argument(
        "--minutes", type=float, default=30, help="after which no round is repeated any more"
    )
    parser.add_argument(
        "--works",
        help="only works whose name holds this; results stay aside. learning: only what is "
        "learned, in the place of what the stored results say of it",
    )
    parser.add_argument("--no-learning", dest="learning", action="store_false")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.spare = 0 if options.quick else options.spare
    aside = options.quick or options.works not in (None, LEARNING)
    options.output = BUILD / "partial.json" if aside else table.RESULTS
    return options


def _chosen(options: argparse.Namespace, *, fast_bf16: bool) -> list[tuple[Work, str]]:
    """The works and their precisions: bf16 where it is fast, and fp32 always."""
    full = [(work, "bf16") for work in works.FULL] if fast_bf16 else []
    plan = [*full, *((work, "fp32") for work in works.REDUCED)]
    if options.quick:
        plan = [(work, "fp32") for work in works.QUICK]
    return [(work, precision) for work, precision in plan if (options.works or "") in work.name]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _models(sizes: set[str]) -> None:
    for size in sorted(sizes):
        folder = BUILD / "inputs" / size
        if not (folder / "reward" / "tokenizer.json").is_file():
            say(f"models: {size}")
            inputs.write_models(folder, inputs.SIZES[size])


def _head(machine: dict[str, Any]) -> dict[str, Any]:
    """Date, machine, versions and settings."""
    found = {"rlhf": versions(sys.executable, TRACKED)}
    for name, shown in PEERS.items():
        found[shown] = versions(python_of(name), ("trl", *TRACKED))
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "versions": found,
        "settings": SETTINGS,
    }


def _store(results: dict[str, Any], path: Path) -> None:
    path.write_text(f"{json.dumps(results, indent=1)}\n", encoding="utf-8")


def job_of(work: Work, side: str, number: int, precision: str) -> Job:
    """A work with its files and a fresh output folder."""
    models = BUILD / "inputs" / work.size
    data, pairs = inputs.write_data(BUILD / "inputs" / "data", work)
    model = "reward" if work.stage == "reward_model" else "ending" if work.ending else "model"
    output = BUILD / "runs" / f"{work.slug}-{precision}-{side}-{number}"
    return Job(
        work,
        model=str(models / model),
        reward=str(models / "reward"),
        data=str(data),
        pairs=str(pairs),
        output=str(output),
        precision=precision,
    )


def _warm_up() -> None:
    """Bring every environment's files into memory; nothing of it counts."""
    say("warm-up")
    tiny = replace(works.ppo(32, tokens=4), size="tiny")
    for side, work in (("peer", tiny), ("peer", ONE_STEP), ("ours", ONE_STEP), ("ours", tiny)):
        do(side, job_of(replace(work, name=f"warm-up {work.stage}"), side, 0, "fp32"))


def _measure(work: Work, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of a work, as a row."""
    counter = iter(range(1 << 30))

    def side(name: str) -> Reading:
        reading = do(name, job_of(work, name, next(counter), precision))
        disturbed = "" if reading.disturbed is None else f", others {reading.disturbed:.0%}"
        say(f"{work.name} ({precision}): {name} {reading.seconds:.2f} s{disturbed}")
        return reading

    rounds = alternate(
        lambda: side("peer"), lambda: side("ours"), wanted=options.rounds, spare=options.spare
    )
    return table.row_of(work.name, precision, rounds, options.rounds)


def _start(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """From command to first step on both sides, and the imports alone."""
    counter = iter(range(1 << 30))
    alone: list[float] = []

    def ours() -> Reading:
        alone.append(start.imports().seconds)
        return start.ours(job_of(ONE_STEP, "ours", next(counter), "fp32"))

    def peer() -> Reading:
        return start.peer(job_of(ONE_STEP, "peer", next(counter), "fp32"))

    say(START)
    rounds = alternate(peer, ours, wanted=options.rounds, spare=options.spare)
    row = table.row_of(START, "fp32", rounds, options.rounds)
    imports = spread(alone)
    figures = {
        "imports": round(imports.median, 3),
        "imports_range": [round(imports.low, 3), round(imports.high, 3)],
        "beyond": round(row["seconds"] - imports.median, 3),
        "peer_beyond": round(row["peer_seconds"] - imports.median, 3),
    }
    return figures, row


if __name__ == "__main__":
    sys.exit(main())
