"""Opening a run: folder, lock, processes, what there is to continue, and the first writing.

A stage opens its run, reads what it needs, and begins: until then nothing is written or deleted, so
that a mistake has cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from stages.config import StageConfig, to_yaml
from stages.errors import (
    CheckpointError,
    Interrupted,
    ResourceError,
    RlhfError,
    TrainingError,
)
from stages.models.precision import choose, order_sums
from stages.runtime import checkpoint, memory, place, run_dir, trackers
from stages.runtime.disk import write_text
from stages.runtime.processes import join, leave
from stages.runtime.reporter import Reporter, SilentReporter
from stages.runtime.resume import (
    as_long_as_before,
    of_new_world,
    require_same_data,
    require_same_meaning,
    require_same_text,
)
from stages.runtime.run_dir import Result
from stages.runtime.session import Progress, Session, goal
from stages.runtime.signals import Stopped, StopRequest

TELLING = ("loss/", "objective/", "optim/")
"""Groups of metrics that say how a run stood when a guard stopped it."""


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
        stop = stack.enter_context(StopRequest(patient=False))
        session = Session(config, folder, world, arithmetic, reporter, stop, time.perf_counter())
        trackers.require(config)
        _prepare(session, resume=resume)
        stack.callback(trackers.finish, session.trackers)
        try:
            yield session
        except (Exception, Stopped) as caught:
            error = _stopped(session, caught) if isinstance(caught, Stopped) else caught
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
    stored = run_dir.read_run(folder) if resume else None
    if stored is not None:
        require_same_meaning(stored.get("config", {}), session.config)
    world.wait()
    if world.main:
        run_dir.mend(folder)
    world.wait()
    if stored is not None:
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
        CheckpointError: the data, or how text is read, of a run that is gone on with have changed,
            or its checkpoint is damaged.
    """
    if session.resume_from is not None:
        stored = run_dir.read_run(session.folder) or {}
        require_same_data(stored.get("data", []), session.facts.get("data", []))
        before, now = stored.get("text", {}), session.facts.get("text", {})
        require_same_text(before, now, model=session.config.model)
        session.take_over()
    with session.stop.waiting():
        if session.world.main:
            _write_first(session)
        session.begun = True
    session.trackers += trackers.start(session.config, session.folder, session.world)
    session.world.wait()


def _write_first(session: Session) -> None:
    """``run.json`` and ``config.yaml``, in place of what an earlier run left."""
    # What is not gone on with is replaced: also what a kill left of a start or an overwriting.
    replaces = session.resume_from is None and (session.folder / "run.json").is_file()
    if replaces:
        run_dir.retire(session.folder)
    session.write_run("running")
    session.begun = True
    if replaces:
        run_dir.clear(session.folder)
    write_text(session.folder / "config.yaml", to_yaml(session.config))


def require_parents(session: Session, parents: list[dict[str, str]]) -> None:
    """Record the models a run was made from; on resume they must be the same.

    Raises:
        CheckpointError: the weights of one, or how its scores are scaled, have changed since the
            run was started.
    """
    stored = (run_dir.read_run(session.folder) or {}) if session.resume_from else {}
    before = {(p["role"], p["path"]): p for p in stored.get("parents", [])}
    for parent in parents:
        known = before.get((parent["role"], parent["path"]), parent)
        if known["hash"] != parent["hash"]:
            raise CheckpointError(
                f"the weights of the {parent['role']} have changed since the run was started",
                where=parent["path"],
                do="put the earlier weights back, or start anew with --overwrite",
            )
        if known.get("scale") != parent.get("scale"):
            raise CheckpointError(
                f"the scores of the {parent['role']} had {known.get('scale')} when the run was "
                f"started, and have {parent.get('scale')}",
                where=f"{parent['path']}: rlhf.json",
                do="put the earlier numbers back, or start anew with --overwrite",
            )
    session.facts["parents"] = parents


def _stopped(session: Session, stopped: Stopped) -> Interrupted:
    """What a signal before the first step comes to: there is nothing that has to be saved."""
    resumed = "" if session.resume_from is None else " that was to follow the last checkpoint"
    return Interrupted(
        stopped.signum,
        what=f"interrupted before the first step{resumed}; nothing is lost",
        do="run the same command with --resume to go on",
    )


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
