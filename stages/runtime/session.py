"""A run in progress: counters, log, checkpoints, what it publishes and how it ends.

The stages hold the mathematics and call this for everything that makes a run survive: what must
outlast a stop is in ``Progress`` and in the trainees, and both go into every checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.config import StageConfig
from stages.errors import (
    ConfigError,
    Interrupted,
    TrainingError,
)
from stages.models.precision import Arithmetic
from stages.runtime import checkpoint, metrics, run_dir
from stages.runtime.allocator import give_back
from stages.runtime.disk import flush
from stages.runtime.optim import (
    Trainee,
    load_optimiser_state,
    load_weights,
    optimiser_state,
    require_finite_weights,
    weights,
)
from stages.runtime.processes import World
from stages.runtime.reporter import Reporter
from stages.runtime.resume import (
    LENGTHS,
    of_new_length,
)
from stages.runtime.run_dir import Result
from stages.runtime.signals import StopRequest

Metrics = dict[str, float]


@dataclass
class Progress:
    """Where a run stands; all of it is saved.

    Attributes:
        step: optimiser steps done.
        records: examples consumed over all processes.
        iteration: rollouts finished (ppo).
        selected: best evaluation so far: step, by, value.
        window: sums and counts of the metrics since the last logged row.
        seconds: time spent before this process started.
        train_seconds: time spent in optimiser steps.
        last: metrics of the last logged row.
        evaluation: metrics of the last evaluation.
        stage: what else a stage keeps, such as the KL coefficient.
    """

    step: int = 0
    records: int = 0
    iteration: int = 0
    selected: dict[str, Any] | None = None
    window: metrics.Window = field(default_factory=metrics.Window)
    seconds: float = 0.0
    train_seconds: float = 0.0
    last: Metrics = field(default_factory=dict)
    evaluation: Metrics = field(default_factory=dict)
    stage: dict[str, Any] = field(default_factory=dict)


@dataclass
class Session:
    """An open run folder and the processes that work on it."""

    config: StageConfig
    folder: Path
    world: World
    arithmetic: Arithmetic
    reporter: Reporter
    stop: StopRequest
    started: float
    begun: bool = False
    done: Result | None = None
    resume_from: Path | None = None
    saved: checkpoint.Saved | None = None
    earlier: StageConfig | None = None
    progress: Progress = field(default_factory=Progress)
    trainees: dict[str, Trainee] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    trackers: list[Any] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall time of the run, earlier parts included."""
        return self.progress.seconds + time.perf_counter() - self.started

    def take_over(self) -> None:
        """Read the newest checkpoint whole, so that damage is found before anything is written.

        Raises:
            CheckpointError: a file of it is missing, cut off, changed or foreign.
        """
        if self.resume_from is None:
            return
        self.saved = checkpoint.load(self.resume_from)
        window = metrics.Window(**self.saved.state["window"])
        self.progress = Progress(**{**self.saved.state, "window": window})

    def restore(self, **trainees: Trainee) -> dict[str, dict[str, Tensor]]:
        """Take charge of what is trained, and put the checkpoint that was taken over into it.

        Returns:
            The stage's own groups of tensors in the checkpoint.
        """
        self.trainees = trainees
        saved, self.saved = self.saved, None  # its memory is free as soon as it is copied
        if saved is None:
            return {}
        for name, trained in trainees.items():
            load_weights(trained, saved.tensors.pop(name))
            load_optimiser_state(trained, saved.tensors.pop(f"optimizer_{name}", {}))
            if trained.average is not None:
                averages = saved.tensors.pop("ema")
                trained.average = {k: v.to(self.arithmetic.device) for k, v in averages.items()}
        if self.world.main:
            for name in run_dir.LOGS:
                self._cut_back(self.folder / name)
        self.reporter.note(f"resumed at step {self.progress.step} from {self.resume_from}")
        return saved.tensors

    def _cut_back(self, path: Path) -> None:
        """Take back the rows behind the checkpoint, and say which lines are none."""
        for line in metrics.cut_back(path, self.progress.step, self.progress.iteration):
            self.reporter.warn(
                f"{path}:{line}: the row is damaged; it is set aside in {path}{metrics.DAMAGED}"
            )

    def tell_length(self, steps: Callable[[StageConfig], int]) -> None:
        """Say it where a continuation has another length than the run was to have.

        Args:
            steps: optimiser steps of the whole run under a config.
        """
        if self.earlier is None:
            return
        before, now = steps(self.earlier), steps(self.config)
        told = of_new_length(self.config.train, self.progress.step, before=before, now=now)
        if told is not None:
            self.reporter.note(told)

    def save(self, extra: Mapping[str, dict[str, Tensor]] | None = None) -> None:
        """Write a checkpoint and rotate the older ones.

        Raises:
            TrainingError: a weight is not finite; nothing is written.
        """
        for trained in self.trainees.values():
            require_finite_weights(trained, what=f"step {self.progress.step}")
        if not self.world.main:
            self.world.wait()
            return
        groups: dict[str, dict[str, Tensor]] = dict(extra or {})
        for name, trained in self.trainees.items():
            groups[name] = weights(trained)
            groups[f"optimizer_{name}"] = optimiser_state(trained)
            if trained.average is not None:
                groups["ema"] = trained.average
        state = asdict(self.progress) | {"seconds": self.seconds}
        folder = self.folder / "checkpoints"
        # The rows up to here must not be lost where the checkpoint is not.
        logs = [self.folder / name for name in run_dir.LOGS]
        flush(path for path in logs if path.exists())
        checkpoint.save(folder, self.progress.step, checkpoint.Saved(groups, state))
        best = self.progress.selected["step"] if self.progress.selected else -1
        checkpoint.rotate(folder, keep=self.config.checkpoint.keep, protect=[best])
        self.world.wait()

    @contextmanager
    def guarded(
        self, extra: Callable[[], dict[str, dict[str, Tensor]] | None] = lambda: None
    ) -> Iterator[None]:
        """Save the state before the step that a guard stops; no step is half taken then."""
        try:
            yield
        except TrainingError:
            for trained in self.trainees.values():
                trained.adam.zero_grad(set_to_none=True)
            self.save(extra())
            raise

    def log(self, kind: str, values: Mapping[str, float], **counters: float) -> Metrics:
        """Write one row of ``metrics.jsonl`` and hand it to the trackers."""
        row = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        if kind == "train":
            self.progress.last = row
        else:
            self.progress.evaluation = row
        if self.world.main:
            head = {"kind": kind, "step": self.progress.step, **counters}
            head |= {"records": self.progress.records, "seconds": round(self.seconds, 3)}
            metrics.append(self.folder / "metrics.jsonl", head | row)
            for tracker in self.trackers:
                tracker.log(row, step=self.progress.step)
        return row

    def take_steps(self) -> None:
        """From now on a signal waits for the end of a step, when the state is saved."""
        if not self.stop.patient:
            self.world.wait()  # or one process would leave and another go on
            self.stop.patient = True

    def stop_if_asked(self, extra: Mapping[str, dict[str, Tensor]] | None = None) -> None:
        """After a signal to any process: save, then leave."""
        signum = self.world.most(self.stop.signum)
        if not signum:
            return
        self.save(extra)
        raise Interrupted(
            signum,
            what=f"interrupted at step {self.progress.step}; the state is saved in {self.folder}",
            do="run the same command with --resume to go on",
        )

    def publish(self, name: str, write: Callable[[Path], None]) -> None:
        """Write a model folder from the main process."""
        if self.world.main:
            give_back()
            run_dir.publish(self.folder, name, write)
        self.world.wait()

    def drop(self, name: str) -> None:
        """Remove a model folder of an earlier end that is out of date."""
        if self.world.main:
            run_dir.drop(self.folder, name)

    def select(self, by: str, value: float) -> bool:
        """Whether an evaluation is the best so far; it is remembered."""
        best = self.progress.selected
        if not math.isfinite(value):
            return False
        higher = by == "eval/accuracy"
        if best is not None and (value <= best["value"] if higher else value >= best["value"]):
            return False
        self.progress.selected = {"step": self.progress.step, "by": by, "value": value}
        return True

    def finish(self, next_command: str) -> Result:
        """Mark the run as done."""
        if self.progress.step == 0:
            raise ConfigError(
                "the config asks for no optimiser step at all",
                where="train",
                do="give train.epochs, train.max_steps or train.total_episodes at least one step",
            )
        result = Result(
            stage=self.config.stage,
            status="done",
            output=str(self.folder),
            model=str(self.folder / "model"),
            step=self.progress.step,
            selected=self.progress.selected,
            metrics=self.progress.last | self.progress.evaluation,
            seconds=round(self.seconds, 3),
            next=next_command,
        )
        self.facts |= {"target": goal(self.config), "result": result.to_dict()}
        self.write_run("done")
        return result

    def write_run(self, status: str, error: dict[str, str] | None = None) -> None:
        """Bring ``run.json`` up to date."""
        if not self.world.main:
            return
        values = {
            "stage": self.config.stage,
            "status": status,
            "error": error,
            "step": self.progress.step,
            "iteration": self.progress.iteration,
            "selected": self.progress.selected,
            "metrics": self.progress.last | self.progress.evaluation,
            "seconds": {
                "total": round(self.seconds, 3),
                "train": round(self.progress.train_seconds, 3),
            },
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
            "device": str(self.arithmetic.device),
            "precision": precision_of(self.arithmetic),
            **run_dir.surroundings(),
            "config": self.config.model_dump(mode="json"),
            "config_hash": run_dir.hash_of(self.config.model_dump(mode="json")),
            **self.facts,
        }
        run_dir.write_run(self.folder, values)


def goal(config: StageConfig) -> dict[str, Any]:
    """How far the config asks a run to go; a finished run with the same goal has nothing to do."""
    train = config.train
    return {name: getattr(train, name) for name in LENGTHS if hasattr(train, name)}


def precision_of(arithmetic: Arithmetic) -> str:
    """The number format of the passes, as ``run.json`` says it."""
    dtype = arithmetic.compute or arithmetic.weights
    return {torch.bfloat16: "bf16", torch.float64: "fp64"}.get(dtype, "fp32")


def storage_dtype(config: StageConfig) -> torch.dtype | None:
    """The number format of saved weights, None = that of the master weights."""
    return torch.bfloat16 if config.checkpoint.dtype == "bfloat16" else None
