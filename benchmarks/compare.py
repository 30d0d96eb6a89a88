"""``make compare``: every method on the embedded task, from one SFT model, in one table.

For each seed the task's data are made anew, a model is fine-tuned, its answers are ranked by the
task's rule, and a reward model learns the rankings. Then every method starts from that SFT model,
with its config in ``configs/tiny/``: the offline ones on those rankings, the others against that
reward model. All answer the same held-out prompts. Writes ``benchmarks/compare.json``, the table in
``docs/methods.md`` and its picture. The seeds are others than the one of the tuned configs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import methods_page
from benchmarks.environments import QUIET, ROOT, TAIL, ChildFailed
from benchmarks.surroundings import machine
from rlhf_cli.config_file import load
from stages.config import STAGES, OnlineConfig, PreferenceConfig
from stages.functional.judged import best_of_n_kl, expected_choice

PLACE = ROOT / "build" / "compare"
RESULTS = methods_page.RESULTS
SEEDS = (11, 12, 13)
METHODS = tuple(word for word in STAGES if word not in ("sft", "reward_model"))
ANSWERS = 4  # to each held-out prompt
BEST_OF = (1, 2, 4, 8, 16)
LONGEST = 32  # tokens of an answer that is judged
KIB = 1024
Row = dict[str, Any]
Scorer = Callable[[str, str], float]


def main() -> None:
    """Train and judge every method with every seed, then print and store the table."""
    options = _options()
    if options.stored:
        importlib.import_module("matplotlib")  # not missed after half an hour
    place = PLACE / ("quick" if options.quick else "whole")
    if options.fresh:
        shutil.rmtree(place, ignore_errors=True)
    started, rows, curve = time.perf_counter(), [], []
    for seed in options.seeds:
        project = prepared(place / f"seed-{seed}", seed)
        curve += [{"seed": seed, **point} for point in best_of(project)]
        rows.append(judged(project, "sft", Taken(0.0, 0.0)))
        for method in options.methods:
            taken = trained(project, method, third=options.quick)
            rows.append(judged(project, method, taken))
            print(methods_page.line(rows[-1]), flush=True)
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "rows": rows,
        "best_of": curve,
    }
    print(methods_page.render(results))
    if options.stored:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        methods_page.update()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, a third of the steps")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds; results stay aside")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="some; results stay aside")
    parser.add_argument("--fresh", action="store_true", help="keep nothing of an earlier call")
    options = parser.parse_args()
    options.stored = not (options.quick or options.seeds or options.methods)
    options.seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    options.methods = options.methods or METHODS
    return options


@dataclass(frozen=True)
class Project:
    """A folder with the task's data, its SFT model and its reward model."""

    folder: Path
    seed: int

    def rlhf(self, *arguments: str) -> dict[str, Any]:
        """Run a command in the folder.

        Returns:
            The JSON object that it prints.
        """
        out = self.run(sys.executable, "-m", "rlhf_cli", *arguments, "--json")
        return json.loads(out.splitlines()[-1])

    def run(self, *command: str) -> str:
        """Standard output of a command in the folder.

        Raises:
            ChildFailed: it ended with an error.
        """
        around = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=self.folder, env=around, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = f"{done.stdout}\n{done.stderr}"[-TAIL:]
            raise ChildFailed(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
        return done.stdout

    def config(self, method: str) -> str:
        """The config of a method on the task."""
        return str(ROOT / "configs" / "tiny" / f"{method}.yaml")

    def sample(self, policy: str, answers: int) -> list[dict[str, Any]]:
        """Answers to the held-out prompts, drawn once."""
        name = f"answers/{policy}-{answers}.jsonl"
        self.rlhf(
            *("sample", f"runs/{policy}", "data/eval_prompts.jsonl", "--k", str(answers)),
            *("--max-new-tokens", str(LONGEST), "--seed", str(self.seed)),
            *("--output", name, "--resume"),
        )
        return read_lines(self.folder / name)


def prepared(folder: Path, seed: int) -> Project:
    """Data, SFT model, rankings and reward model of a seed; what is there already stays."""
    project = Project(folder, seed)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").is_dir():
        project.run(sys.executable, "-m", "rlhf_cli", "init", ".")
        project.run(sys.executable, "tone_count.py", "make", "data", "--seed", str(seed))
        (folder / "answers").mkdir()
    project.rlhf("sft", project.config("sft"), f"seed={seed}", "--resume")
    rankings = folder / "data" / "rankings.jsonl"
    if not rankings.is_file():
        unranked = "answers/unranked.jsonl"
        project.rlhf(
            *("sample", "runs/sft", "data/prompts.jsonl", "--k", "4", "--seed", str(seed)),
            *("--max-new-tokens", str(LONGEST), "--output", unranked, "--resume"),
        )
        project.run(
            *(sys.executable, "tone_count.py", "label", unranked),
            *("--seed", str(seed), "--output", "data/rankings.jsonl"),
        )
    project.rlhf("train-rm", project.config("reward_model"), f"seed={seed}", "--resume")
    return project


@dataclass(frozen=True)
class Taken:
    """What a training took: seconds from its first step to its last, and MiB at its peak."""

    seconds: float
    mib: float


def trained(project: Project, method: str, *, third: bool) -> Taken:
    """Train a method, or read what an earlier run of it took."""
    kept = project.folder / "runs" / f"{method}.json"
    if not kept.is_file():
        shorter = [f"train.max_steps={_third(project, method)}"] if third else []
        command = [
            *(sys.executable, "-m", "benchmarks.compare_run", method.replace("_", "-")),
            *(project.config(method), f"seed={project.seed}", *shorter, "--overwrite"),
        ]
        kept.write_text(project.run(*command).splitlines()[-1], encoding="utf-8")
    found = json.loads(kept.read_text(encoding="utf-8"))
    return Taken(found["seconds"], found["kib"] / KIB)


def _third(project: Project, method: str) -> int:
    """A third of the optimiser steps that a config asks for."""
    config = load(project.config(method), stage=method).config
    if isinstance(config, OnlineConfig):
        assert config.train.total_episodes is not None
        minibatches = config.rollout.batch_size // config.train.batch_size
        rollouts = config.train.total_episodes // config.rollout.batch_size
        return rollouts * minibatches * config.epochs // 3
    assert isinstance(config, PreferenceConfig)
    records = len(read_lines(project.folder / "data" / "rankings.jsonl"))
    return int(config.train.epochs * records / config.train.batch_size / 3)


def judged(project: Project, method: str, taken: Taken) -> Row:
    """The row of a method: its answers to the held-out prompts, judged by rule and model."""
    true = scorer(project.folder)
    values = [
        true(line["prompt"], response["text"])
        for line in project.sample(method, ANSWERS)
        for response in line["responses"]
    ]
    told = project.rlhf(
        *("evaluate", f"runs/{method}", "data/eval_prompts.jsonl", "--against", "runs/sft"),
        *("--reward", "runs/reward_model", "--k", str(ANSWERS), "--seed", str(project.seed)),
        *("--max-new-tokens", str(LONGEST)),
    )
    return {
        "method": method,
        "seed": project.seed,
        "true_score": sum(values) / len(values),
        "score": told["score"]["mean"],
        "kl": told["kl"],
        "win_rate": told["win_rate"],
        "length": told["length"],
        "ended": told["ended"],
        "seconds": round(taken.seconds, 1),
        "mib": round(taken.mib),
    }


def best_of(project: Project) -> list[Row]:
    """True score of the answer that the reward model likes best among n of the SFT model."""
    true, most = scorer(project.folder), BEST_OF[-1]
    project.sample("sft", most)
    scored = project.folder / "answers" / f"sft-{most}-scored.jsonl"
    if not scored.is_file():
        answers, output = f"answers/sft-{most}.jsonl", f"answers/{scored.name}"
        project.rlhf("score", "runs/reward_model", answers, "--output", output)
    lines = read_lines(scored)
    judged = torch.tensor([[y["score"] for y in line["responses"]] for line in lines])
    values = torch.tensor(
        [[true(line["prompt"], y["text"]) for y in line["responses"]] for line in lines]
    )
    return [
        {
            "n": n,
            "kl": best_of_n_kl(n),
            "true_score": float(expected_choice(judged, values, n=n).mean()),
        }
        for n in BEST_OF
    ]


def scorer(folder: Path) -> Scorer:
    """``true_score`` of the task in a project."""
    spec = importlib.util.spec_from_file_location("tone_count", folder / "tone_count.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module.true_score


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
