"""Kills: a stage is stopped at a random moment, resumed, and compared with the whole run.

Each stage runs with everything that has a state: dropout, several micro-batches, averaged weights,
adaptive KL, pretraining texts, evaluations, a checkpoint at every step. A trial kills it between
one and three times (SIGKILL, SIGTERM, or both), at moments spread over the whole run, then lets it
end. Lost is a checkpoint that was there and does not load; unequal is a run that ends with another
bit anywhere but in the times.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.server import PATIENCE, Child, Ended, forked

STAGES = ("sft", "reward_model", "ppo", "dpo", "grpo", "reinforce")
CHANGES: dict[str, dict[str, Any]] = {
    stage: {"train.tokens_per_micro_batch": 24, "checkpoint.every": 1, "log.every": 1}
    for stage in STAGES
}
MOST_KILLS = 3


@dataclass
class Report:
    """What a campaign came to."""

    trials: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    early: int = 0
    saved: int = 0
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> int:
        """Trials that went wrong."""
        return len(self.lost) + len(self.unequal)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self) | {"failures": self.failures}


def campaign(
    folder: Path, *, seconds: float, seed: int, stages: tuple[str, ...] = STAGES, workers: int = 2
) -> Report:
    """Kill runs of the stages in turn until the time is over.

    Args:
        folder: an empty one, to work in.
        seconds: how long; the whole runs that trials are held against come first and count.
        seed: of the moments and signals.
        stages: which.
        workers: processes that do trials beside each other.
    """
    started = time.monotonic()
    template = folder / "template"
    template.mkdir(parents=True)
    made = forked(folder, "template", lambda: make_project(template))
    assert made.code == 0, made.text
    whole = {stage: _whole(folder, template, stage) for stage in stages}
    children = []
    for n in range(workers):
        place = folder / f"worker-{n}"
        place.mkdir()
        chance = random.Random(seed * workers + n)
        order = stages[n % len(stages) :] + stages[: n % len(stages)]

        def work(place: Path = place, chance: random.Random = chance, order: Any = order) -> Any:
            return _trials(place, template, chance, order, whole, started + seconds).to_dict()

        children.append(Child(folder, f"worker-{n}", work))
    ends = [child.wait(seconds + 10 * PATIENCE) for child in children]
    report = _sum(ends)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _trials(
    folder: Path,
    template: Path,
    chance: random.Random,
    stages: tuple[str, ...],
    whole: dict[str, Any],
    until: float,
) -> Report:
    """At least one trial of each stage, then more until the time is over."""
    report = Report()
    while not report.trials[stages[-1]] or time.monotonic() < until:
        for stage in stages:
            if not report.trials[stage] or time.monotonic() < until:
                Trial(folder / "trial", template, stage, chance, *whole[stage]).run(report)
    return report


def _sum(ends: list[Ended]) -> Report:
    """The reports of all workers as one; a worker that ended badly has lost something."""
    total = Report()
    for ended in ends:
        if ended.value is None:
            total.lost.append(f"a worker ended with {ended.code}: {ended.text[-2000:]}")
            continue
        for stage in STAGES:
            total.trials[stage] += ended.value["trials"][stage]
            total.kills[stage] += ended.value["kills"][stage]
        total.early += ended.value["early"]
        total.saved += ended.value["saved"]
        total.lost += ended.value["lost"]
        total.unequal += ended.value["unequal"]
    return total


def _whole(folder: Path, template: Path, stage: str) -> tuple[dict[str, str], float]:
    """What the run that nothing stops leaves behind, and how long a run takes.

    It fills the cache of tokenised records that most trials share, and names the modules that are
    imported late, which the server imports before it forks again.
    """
    for name in ("first", "whole"):
        place = folder / f"{name}-{stage}"
        shutil.copytree(template, place)
        started = time.monotonic()
        ended = forked(folder, name, lambda place=place: run(place, stage, resume=False))
        assert ended.code == 0, ended.text
        duration = time.monotonic() - started
        for module in ended.value:
            if module not in sys.modules:
                with suppress(Exception):  # some modules stand for others and cannot be imported
                    importlib.import_module(module)
    place = folder / f"whole-{stage}"
    return forked(folder, "fingerprint", lambda: fingerprint(place)).value, duration


STOPPED = (-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM)
"""How a run may end that was sent a signal; the last before it listens, or when it is done."""


class Trial:
    """One run that is killed, resumed and compared."""

    def __init__(
        self,
        folder: Path,
        template: Path,
        stage: str,
        chance: random.Random,
        whole: dict[str, str],
        duration: float,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder / "project")
        self.folder, self.project, self.stage = folder, folder / "project", stage
        self.chance, self.whole, self.duration = chance, whole, duration
        self.cache = chance.choice([template.parent / "cache"] * 4 + [folder / "cache"])
        self.told: list[str] = [stage]

    def run(self, report: Report) -> None:
        """Kill, resume, compare."""
        report.trials[self.stage] += 1
        for n in range(self.chance.randint(1, MOST_KILLS)):
            ended = self._killed(n)
            if ended.code == 0:
                report.early += 1
                break
            report.kills[self.stage] += 1
            found = forked(self.folder, f"look-{n}", lambda: newest(self.project))
            if found.code != 0 or ended.code not in STOPPED:
                report.lost.append(self._story(ended, found))
                return
            report.saved += found.value is not None
        last = forked(self.folder, "last", lambda: self._run(resume=True))
        got = forked(self.folder, "compare", lambda: fingerprint(self.project))
        if last.code != 0 or got.value != self.whole:
            different = [k for k in self.whole if (got.value or {}).get(k) != self.whole[k]]
            report.unequal.append(f"{self._story(last, got)}\ndifferent: {different}")

    def _killed(self, n: int) -> Ended:
        """Start or resume, and end it at a random moment."""
        wait = self.chance.uniform(0.0, self.duration)
        how = self.chance.choice(("kill", "terminate", "terminate, kill"))
        self.told.append(f"{how} after {wait:.3f} s")
        child = Child(self.folder, f"run-{n}", lambda: self._run(resume=n > 0))
        time.sleep(wait)
        if how != "kill":
            child.send(signal.SIGTERM)
        if how == "terminate, kill":
            time.sleep(self.chance.uniform(0.0, 0.05))
        if how != "terminate":
            child.send(signal.SIGKILL)
        return child.wait()

    def _run(self, *, resume: bool) -> None:
        run(self.project, self.stage, resume=resume, cache=self.cache)

    def _story(self, *ends: Ended) -> str:
        texts = [f"exit {ended.code}: {ended.text[-2000:]}" for ended in ends]
        return "\n".join(["; ".join(self.told), *texts])


def make_project(folder: Path) -> None:
    """Models, data and nothing else."""
    import torch

    from tests.stages.project import DEMONSTRATIONS, DOCUMENTS, PROMPTS, Project, rankings
    from tests.stages.test_resume import HELD_OUT

    torch.set_num_threads(1)
    project = Project(folder)
    project.write("demonstrations.jsonl", DEMONSTRATIONS)
    project.write("rankings.jsonl", rankings())
    project.write("prompts.jsonl", PROMPTS)
    project.write("documents.jsonl", DOCUMENTS)
    for stage, records in HELD_OUT.items():
        project.write(f"held_out_{stage}.jsonl", records)
    project.model("wet", "gpt2", dropout=0.3, dtype=torch.float64)
    project.model("reward", kind="reward", dtype=torch.float64, seed=1)


def run(folder: Path, stage: str, *, resume: bool, cache: Path | None = None) -> list[str]:
    """A stage in the project's folder; the process ends with the exit code of the command.

    Returns:
        The modules that were imported.
    """
    import torch

    from stages.errors import RlhfError
    from stages.runtime.reporter import SilentReporter
    from tests.stages.project import Project
    from tests.stages.test_resume import FULL, RUNS

    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ["RLHF_CACHE"] = str(cache or folder.parent / "cache")
    values = {
        **FULL[stage],
        **CHANGES[stage],
        "data.eval": f"held_out_{stage}.jsonl",
        "output": "run",
    }
    config = Project(folder).config(stage, **values)
    try:
        RUNS[stage](config, SilentReporter(), resume=resume)
    except RlhfError as error:
        print(error, error.do, flush=True)
        os._exit(error.exit_code)
    return sorted(sys.modules)


def newest(folder: Path) -> str | None:
    """The newest checkpoint of the run, which must load; None where there is none yet."""
    from stages.runtime import checkpoint, run_dir

    run_dir.mend(folder / "run")
    found = checkpoint.newest(folder / "run" / "checkpoints", print)
    if found is None:
        return None
    checkpoint.load(found)
    return found.name


def fingerprint(folder: Path) -> dict[str, str]:
    """A hash of everything the run left that does not tell the time."""
    return dict(_hashes(folder / "run"))


def _hashes(run_folder: Path) -> Iterator[tuple[str, str]]:
    # Which older checkpoints are kept depends on where the run was stopped; the newest does not.
    older = sorted((run_folder / "checkpoints").glob("*"))[:-1]
    for path in sorted(run_folder.rglob("*")):
        if {path, *path.parents} & {*older}:
            continue
        name = path.relative_to(run_folder).as_posix()
        if path.suffix == ".safetensors":
            yield name, hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.suffix == ".jsonl":
            rows = [untimed(json.loads(line)) for line in path.read_text().splitlines()]
            yield name, json.dumps(rows)
        elif path.name == "state.json":
            yield name, json.dumps(untimed(json.loads(path.read_text())))
        elif path.name == "run.json":
            values = json.loads(path.read_text())
            told = {key: values[key] for key in ("status", "step", "iteration", "selected")}
            yield name, json.dumps([told, untimed(values["metrics"])])
        elif path.is_file():
            yield name, ""


def untimed(value: Any) -> Any:
    """Without the fields that differ between any two runs."""
    if not isinstance(value, dict):
        return value
    return {
        key: untimed(inner)
        for key, inner in sorted(value.items())
        if not key.startswith("time/") and key not in ("seconds", "train_seconds")
    }
