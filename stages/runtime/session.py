"""A run from its first to its last moment: folder, lock, processes, signals, log, checkpoints.

The stages hold the mathematics and call this for everything that makes a run survive: what must
outlast a stop is in ``Progress`` and in the trainees, and both go into every checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.config import StageConfig, to_yaml
from stages.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    ResourceError,
    RlhfError,
    TrainingError,
)
from stages.models.precision import Arithmetic, choose, order_sums
from stages.runtime import checkpoint, memory, metrics, place, run_dir, trackers
from stages.runtime.disk import flush, write_text
from stages.runtime.optim import (
    Trainee,
    load_optimiser_state,
    load_weights,
    optimiser_state,
    require_finite_weights,
    weights,
)
from stages.runtime.processes import World, join, leave
from stages.runtime.reporter import Reporter, SilentReporter
from stages.runtime.resume import (
    LENGTHS,
    as_long_as_before,
    of_new_length,
    of_new_world,
    require_same_data,
    require_same_meaning,
    require_same_text,
)
from stages.runtime.run_dir import Result
from stages.runtime.signals import StopRequest

Metrics = dict[str, float]

TELLING = ("loss/", "objective/", "optim/")
"""Groups of metrics that say how a run stood when a guard stopped it."""


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
    earlier: StageConfig | None = None
    progress: Progress = field(default_factory=Progress)
    trainees: dict[str, Trainee] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    trackers: list[Any] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall time of the run, earlier parts included."""
        return self.progress.seconds + time.perf_counter() - self.started

    def restore(self, **trainees: Trainee) -> dict[str, dict[str, Tensor]]:
        """Take charge of what is trained, and put the newest checkpoint back into it.

        Returns:
            The stage's own groups of tensors in the checkpoint.
        """
        self.trainees = trainees
        if self.resume_from is None:
            return {}
        saved = checkpoint.load(self.resume_from)
        for name, trained in trainees.items():
            load_weights(trained, saved.tensors.pop(name))
            load_optimiser_state(trained, saved.tensors.pop(f"optimizer_{name}", {}))
            if trained.average is not None:
                averages = saved.tensors.pop("ema")
                trained.average = {k: v.to(self.arithmetic.device) for k, v in averages.items()}
        state = dict(saved.state)
        state["window"] = metrics.Window(**state["window"])
        self.progress = Progress(**state)
        if self.world.main:
            for name in ("metrics.jsonl", "samples.jsonl"):
                path = self.folder / name
                metrics.cut_back(path, self.progress.step, self.progress.iteration)
        self.reporter.note(f"resumed at step {self.progress.step} from {self.resume_from}")
        return saved.tensors

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
        logs = [self.folder / name for name in ("metrics.jsonl", "samples.jsonl")]
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


@contextmanager
def opened(
    config: StageConfig, reporter: Reporter, *, resume: bool, overwrite: bool
) -> Iterator[Session]:
    """Open a run folder for a stage; whatever ends the stage is written into ``run.json``.

    Raises:
        ConfigError: the folder is not empty, locked or not writable.
        CheckpointError: resuming would change the meaning of the run.
    """
    world = join(config.device)
    arithmetic = choose(config.device, config.train.precision, local_rank=world.local_rank)
    order_sums(arithmetic.device)
    reporter = reporter if world.main else SilentReporter()
    folder = Path(config.output)
    with ExitStack() as stack:
        stack.callback(leave)
        if world.main:
            place.require(config)
            place.require_free(config, resume=resume, overwrite=overwrite)
            stack.enter_context(run_dir.locked(folder))
        world.wait()
        stop = stack.enter_context(StopRequest())
        session = Session(config, folder, world, arithmetic, reporter, stop, time.perf_counter())
        trackers.require(config)
        _prepare(session, resume=resume)
        stack.callback(trackers.finish, session.trackers)
        try:
            yield session
        except Exception as caught:
            error = caught
            if not isinstance(caught, ResourceError) and memory.is_short(caught):
                error = memory.explain(caught, config, session.progress.step)
            elif isinstance(caught, TrainingError):
                error = _with_figures(caught, session.progress)
            status = "interrupted" if isinstance(error, Interrupted) else "failed"
            if session.begun:
                # Want of disk or memory must not hide what ended the run.
                with suppress(OSError, MemoryError, ResourceError):
                    session.write_run(status, _told(error))
            if error is caught:
                raise
            raise error from caught


def _prepare(session: Session, *, resume: bool) -> None:
    """Find out what there is to continue."""
    folder, world = session.folder, session.world
    if world.main:
        run_dir.mend(folder)
    world.wait()
    stored = run_dir.read_run(folder) if resume else None
    if stored is not None:
        require_same_meaning(stored.get("config", {}), session.config)
        if stored["status"] == "done" and stored.get("target") == goal(session.config):
            session.done = Result(**stored["result"])
            return
        session.resume_from = checkpoint.newest(folder / "checkpoints", session.reporter.warn)
        if session.resume_from is None and stored["status"] == "done":
            raise CheckpointError(
                "the finished run in it has no checkpoint left to go on from",
                where=str(folder / "checkpoints"),
                do="give output another folder, or replace the run with --overwrite",
            )
        if session.resume_from is None:
            session.reporter.note("nothing to resume: the run starts from the beginning")
        else:
            _tell_what_differs(session, stored)
    world.wait()


def _tell_what_differs(session: Session, stored: dict[str, Any]) -> None:
    """What a continuation may change and its user should know."""
    told = of_new_world(stored.get("processes", session.world.size), session.world.size)
    if told is not None:
        session.reporter.note(told)
    session.earlier = as_long_as_before(session.config, stored.get("config", {}))


def begin(session: Session) -> None:
    """The first writing into the folder, once config, data and models are known to be usable.

    An earlier run that is to be replaced goes now: a mistake found before has cost nothing.

    Raises:
        CheckpointError: the data, or how text is read, of a run that is gone on with have changed.
    """
    if session.resume_from is not None:
        stored = run_dir.read_run(session.folder) or {}
        require_same_data(stored.get("data", []), session.facts.get("data", []))
        before, now = stored.get("text", {}), session.facts.get("text", {})
        require_same_text(before, now, model=session.config.model)
    if session.world.main:
        # What is not gone on with is replaced: also what a kill left of a start or an overwriting.
        replaces = session.resume_from is None and (session.folder / "run.json").is_file()
        if replaces:
            run_dir.retire(session.folder)
        session.write_run("running")
        session.begun = True
        if replaces:
            run_dir.clear(session.folder)
        write_text(session.folder / "config.yaml", to_yaml(session.config))
    session.begun = True
    session.trackers += trackers.start(session.config, session.folder, session.world)
    session.world.wait()


def goal(config: StageConfig) -> dict[str, Any]:
    """How far the config asks a run to go; a finished run with the same goal has nothing to do."""
    train = config.train
    return {name: getattr(train, name) for name in LENGTHS if hasattr(train, name)}


def require_parents(session: Session, parents: list[dict[str, str]]) -> None:
    """Record the models a run was made from; on resume they must be the same.

    Raises:
        CheckpointError: the weights of one have changed since the run was started.
    """
    stored = (run_dir.read_run(session.folder) or {}) if session.resume_from else {}
    before = {(p["role"], p["path"]): p["hash"] for p in stored.get("parents", [])}
    for parent in parents:
        known = before.get((parent["role"], parent["path"]))
        if known is not None and known != parent["hash"]:
            raise CheckpointError(
                f"the weights of the {parent['role']} have changed since the run was started",
                where=parent["path"],
                do="put the earlier weights back, or start anew with --overwrite",
            )
    session.facts["parents"] = parents


def precision_of(arithmetic: Arithmetic) -> str:
    """The number format of the passes, as ``run.json`` says it."""
    dtype = arithmetic.compute or arithmetic.weights
    return {torch.bfloat16: "bf16", torch.float64: "fp64"}.get(dtype, "fp32")


def _with_figures(error: TrainingError, progress: Progress) -> TrainingError:
    """The error of a guard, and what was measured last before it."""
    figures = {
        name: value
        for name, value in (progress.window.means() or progress.last).items()
        if name.startswith(TELLING)
    }
    if not figures:
        return error
    listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    what = f"{error.what}; measured last: {listed}"
    return TrainingError(what, where=error.where, do=error.do)


def _told(error: Exception) -> dict[str, str]:
    """An error as ``run.json`` keeps it."""
    if isinstance(error, RlhfError):
        return {"kind": error.kind, "what": str(error), "do": error.do}
    return {"kind": type(error).__name__, "what": str(error), "do": "see the traceback"}


def storage_dtype(config: StageConfig) -> torch.dtype | None:
    """The number format of saved weights, None = that of the master weights."""
    return torch.bfloat16 if config.checkpoint.dtype == "bfloat16" else None
