"""One job by this project, in a process of its own: ``python -m benchmarks.ours JOB.json``.

Prints one JSON line. Timed is the loop alone: from the moment at which a stage tells that it begins
to its last step; loading, reading data and saving are outside.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import cost
from benchmarks.configs import values_of
from benchmarks.watch import Watch
from benchmarks.works import Job, read_job
from stages.config import resolve
from stages.runtime.reporter import SilentReporter

PEAK_SIDE, PEAK_READINGS = 2048, 5


class Timed(SilentReporter):
    """Starts the watch when a stage begins and stops it after its last step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.total: int | None = None

    def begin(self, what: str, *, total: int | None, unit: str, done: int = 0) -> None:
        self.total = total
        self.watch.start()

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        if done == self.total:
            self.watch.stop()


def run(job: Job, watch: Watch) -> None:
    """Do the work once."""
    stage = importlib.import_module(f"stages.{job.work.stage}")
    if job.work.stage == "sample":
        options = stage.SampleOptions(
            policy=job.model,
            prompts=job.data,
            k=job.work.k,
            output=f"{job.output}.jsonl",
            max_new_tokens=job.work.new_tokens,
            seed=job.seed,
            device="cpu",
            precision=job.precision,
        )
        stage.run(options, Timed(watch))
    else:
        stage.run(resolve(values_of(job)), Timed(watch))


def learned(job: Job) -> dict[str, Any]:
    """Optimiser steps, and figures of the last row that the stage logged."""
    if job.work.stage == "sample":
        lengths = [len(a) for _, answers in _sampled(job) for a in answers]
        return {"learned": {"length": sum(lengths) / len(lengths)}}
    rows = (Path(job.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(rows[-1])
    names = {
        "loss/sft": "loss",
        "loss/ranking": "loss",
        "objective/score": "score",
        "objective/kl": "kl",
        "rollout/response_length_mean": "length",
    }
    found = {short: last[name] for name, short in names.items() if name in last}
    return {"steps": last["step"], "learned": found}


def arithmetic(job: Job) -> tuple[int, float]:
    """Tokens of the work (sampling and ppo: of the answers) and operations it needs at least."""
    config = json.loads((Path(job.model) / "config.json").read_text(encoding="utf-8"))
    policy = cost.shape_of(config)
    head = cost.with_head(policy, config["hidden_size"])
    work = job.work
    if work.stage == "sft":
        load = cost.total([cost.sequence(p, a[0]) for p, a in _lengths(job)])
        return load.tokens * work.epochs, work.epochs * cost.flops(policy, load, cost.TRAINING)
    if work.stage == "reward_model":
        load = cost.total([cost.ranking(p, a) for p, a in _lengths(job)])
        return load.tokens * work.epochs, work.epochs * cost.flops(head, load, cost.TRAINING)
    answers = [(p, [len(a) for a in rows]) for p, rows in _sampled(job)]
    if work.stage == "ppo":
        load = cost.total([cost.sequence(p, n) for p, lengths in answers for n in lengths])
        return load.targets, cost.ppo_flops(policy, head, load, work.epochs)
    loads = [cost.ranking(p, lengths) for p, lengths in answers]
    made = sum(n for _, lengths in answers for n in lengths)
    return made, cost.flops(policy, cost.total(loads)._replace(targets=made), cost.FORWARD)


def _lengths(job: Job) -> list[tuple[int, list[int]]]:
    """Tokens of each prompt and of its answers, end tokens included."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    rows = [json.loads(line) for line in Path(job.data).read_text(encoding="utf-8").splitlines()]
    texts = [
        (row["prompt"], [r["text"] for r in row.get("responses", [{"text": row.get("response")}])])
        for row in rows
    ]
    return [(count(prompt), [count(a) + 1 for a in answers]) for prompt, answers in texts]


def _sampled(job: Job) -> list[tuple[int, list[Sequence[int]]]]:
    """Tokens of each prompt, and the ids of the answers that were sampled for it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    sampling = job.work.stage == "sample"
    path = Path(f"{job.output}.jsonl") if sampling else Path(job.output) / "samples.jsonl"
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        ids = [r["ids"] for r in row["responses"]] if sampling else [row["response_ids"]]
        found.append((len(prompt), ids))
    return found


def matmul_peak(precision: str) -> float:
    """FLOP/s of a square matrix product, the best of several readings."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = torch.randn(2, PEAK_SIDE, PEAK_SIDE, dtype=dtype)
    seconds = []
    for _ in range(PEAK_READINGS + 1):
        watch = Watch()
        watch.start()
        torch.mm(left, right)
        watch.stop()
        seconds.append(watch.seconds)
    return float(2 * PEAK_SIDE**3 / min(seconds))


def main(path: str) -> None:
    """Do a job and print what there is to say about it."""
    job = read_job(path)
    importlib.import_module(f"stages.{job.work.stage}")
    watch = Watch()
    os.makedirs(Path(job.output).parent, exist_ok=True)
    run(job, watch)
    tokens, flops = arithmetic(job)
    figures = {**learned(job), "tokens": tokens, "flops": flops}
    peak = matmul_peak(job.precision)
    print(json.dumps({**watch.figures(), **figures, "peak": peak}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
