"""``make bench-memory``: the memory that ``rlhf check`` foretells beside what a run takes.

Every stage takes two optimiser steps on a model of the demo's shape and on one of 135 M weights,
with all weights in training and with adapters, each in a process of its own. Measured is its
largest resident memory less what it holds after its imports. Writes ``benchmarks/memory.json`` and
the table in ``docs/memory.md``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import inputs, table
from benchmarks.environments import BUILD, QUIET, ROOT, TAIL, ChildFailed
from benchmarks.inputs import SIZES, Size
from benchmarks.works import Stage, Work

RESULTS = Path(__file__).parent / "memory.json"
PAGE = ROOT / "docs" / "memory.md"
BLOCK = "estimates"
PLACE = BUILD / "memory"
MODELS = {"demo": Size(128, 2, 8, 384, 524), "135 M": SIZES["medium"]}
WORKS: dict[Stage, Work] = {
    "sft": Work("memory", "sft", records=32, batch=16),
    "reward_model": Work("memory", "reward_model", records=8, batch=4, k=4),
    "ppo": Work("memory", "ppo", records=16, batch=16, new_tokens=32),
}
COMMANDS = {"sft": "sft", "reward_model": "train-rm", "ppo": "ppo"}
HEAD = ("model", "stage", "trained", "estimate, MiB", "measured, MiB", "difference")
LATE = ("accelerate", "datasets", "peft", "pyarrow", "torch.utils.checkpoint")
"""Packages that a run imports when it comes to them."""


@dataclass(frozen=True)
class Trial:
    """One run: a key of ``MODELS``, a stage, and whether adapters alone are trained."""

    model: str
    stage: Stage
    adapters: bool

    @property
    def folder(self) -> Path:
        """Where the model's files and the data lie."""
        return PLACE / self.model.replace(" ", "")

    @property
    def output(self) -> Path:
        """The run folder."""
        return self.folder / f"{self.stage}-{'adapters' if self.adapters else 'weights'}"


def main() -> None:
    """Estimate and measure every trial, print and store the rows."""
    options = _options()
    if options.measure or options.estimate:
        action = _measure if options.measure else _estimate
        print(json.dumps(action(options.measure or options.estimate)))
        return
    rows = [_row(trial) for trial in trials(options.models)]
    store(rows)


def _options() -> Any:
    parser = argparse.ArgumentParser(description="Estimated and measured memory of every stage.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--estimate", help=argparse.SUPPRESS)
    return parser.parse_args()


def trials(models: Sequence[str]) -> Iterator[Trial]:
    """All stages of all models, with all weights and with adapters."""
    for model in models:
        for stage in WORKS:
            for adapters in (False, True):
                yield Trial(model, stage, adapters)


def values_of(trial: Trial) -> dict[str, Any]:
    """The config of a trial; what it does not say is the default."""
    work, folder = WORKS[trial.stage], trial.folder
    values: dict[str, Any] = {
        "stage": trial.stage,
        "model": str(folder / "model"),
        "data": {"train": str(folder / f"{trial.stage}.jsonl"), "eval": None},
        "output": str(trial.output),
        "train": {"max_steps": 2, "batch_size": work.batch},
        "device": "cpu",
        "log": {"every": 1},
    }
    if trial.adapters:
        values["lora"] = {}
    if trial.stage == "ppo":
        values["reward"] = {"path": str(folder / "reward")}
        values["rollout"] = {"batch_size": work.batch, "max_new_tokens": work.new_tokens}
    return values


def make_inputs(trial: Trial) -> None:
    """Models and data, where they are not there from a run before."""
    size, work, folder = MODELS[trial.model], WORKS[trial.stage], trial.folder
    if not (folder / "reward" / "config.json").is_file():
        inputs.write_models(folder, size)
    rows = inputs.records(replace(work, words=None), work.records, 0, vocabulary=size.vocabulary)
    inputs.write_lines(folder / f"{trial.stage}.jsonl", rows)


def _row(trial: Trial) -> dict[str, Any]:
    """A row of ``memory.json``."""
    make_inputs(trial)
    told, found = _child("--estimate", trial), _child("--measure", trial)
    shutil.rmtree(trial.output)
    row = {
        **asdict(trial),
        "precision": found["precision"],
        "estimate": round(told["peak"]),
        "measured": round(found["peak"] - found["imports"]),
        "imports": round(found["imports"]),
        "parts": {name: round(size) for name, size in told["parts"].items()},
    }
    print(" | ".join(_cells(row)), flush=True)
    return row


def _child(action: str, trial: Trial) -> dict[str, Any]:
    """Do one thing of a trial in a process of its own, under the allocator's own settings."""
    path = trial.output.with_suffix(".json")
    path.write_text(json.dumps(values_of(trial)), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.memory", action, str(path)]
    environment = {**os.environ, **QUIET, "RLHF_CACHE": str(PLACE / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ChildFailed(f"{' '.join(command)}:\n{done.stderr[-TAIL:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _estimate(path: str) -> dict[str, Any]:
    """What ``rlhf check`` says of a config, in MiB."""
    from stages import check
    from stages.config import resolve
    from stages.runtime.reporter import SilentReporter

    config = resolve(json.loads(Path(path).read_text(encoding="utf-8")))
    memory = check.run(config, SilentReporter())["memory"]
    return {"peak": memory["peak"], "parts": dict(_flat(memory))}


def _flat(memory: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for role, parts in memory.items():
        if isinstance(parts, Mapping):
            yield from ((f"{role} {name}", size) for name, size in parts.items())


def _measure(path: str) -> dict[str, Any]:
    """Run a config; MiB after the imports and at the fullest, and the number format."""
    from stages.config import resolve
    from stages.models.precision import choose
    from stages.runtime.reporter import SilentReporter
    from stages.runtime.session import precision_of

    values = json.loads(Path(path).read_text(encoding="utf-8"))
    stage = importlib.import_module(f"stages.{values['stage']}")
    for name in LATE:
        importlib.import_module(name)
    importlib.import_module("transformers.models.llama.modeling_llama")
    imports = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    stage.run(resolve(values), SilentReporter())
    precision = precision_of(choose("cpu", "auto"))
    return {"imports": imports, "peak": _resident("VmHWM"), "precision": precision}


def _resident(name: str) -> float:
    """A figure of this process in MiB, as Linux keeps it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def store(rows: Sequence[Mapping[str, Any]]) -> None:
    """Put the rows among those of the models that were not measured, and all on the page."""
    from benchmarks.surroundings import machine

    known = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.is_file() else []
    measured = {row["model"] for row in rows}
    rest = [row for row in known if row["model"] not in measured]
    ordered = sorted([*rows, *rest], key=lambda row: list(MODELS).index(row["model"]))
    results = {"date": datetime.date.today().isoformat(), "machine": machine(), "rows": ordered}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    update_page()


def update_page() -> None:
    """Put the stored table on the page."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(table.with_block(page, BLOCK, render(results)), encoding="utf-8")


def render(results: Mapping[str, Any]) -> str:
    """The markdown of stored results."""
    machine, rows = results["machine"], results["rows"]
    about = (
        f"{results['date']}, {machine['cpu']}, {machine['cores']} cores, "
        f"{' and '.join(sorted({row['precision'] for row in rows}))}. What the imports hold "
        f"({min(r['imports'] for r in rows)}–{max(r['imports'] for r in rows)} MiB) is left out."
    )
    return f"{about}\n\n{table.markdown(HEAD, [_cells(row) for row in rows])}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    difference = row["estimate"] - row["measured"]
    return [
        row["model"],
        f"`rlhf {COMMANDS[row['stage']]}`",
        "adapters" if row["adapters"] else "all weights",
        f"{row['estimate']:,}",
        f"{row['measured']:,}",
        f"{difference:+,} ({100 * difference / row['measured']:+.0f} %)",
    ]


if __name__ == "__main__":
    main()
