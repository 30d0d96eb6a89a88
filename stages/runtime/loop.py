"""Optimiser steps over a store of examples: the loop of the stages that learn from files.

An optimiser batch is the same whatever the number of processes and the token budget: every process
draws it, takes its share, cuts the share into micro-batches, and divides by the denominator of the
whole batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from stages.config import OnlineConfig
from stages.data.plan import micro_batches, share, steps_per_epoch
from stages.errors import TrainingError
from stages.models.network import Network
from stages.runtime.optim import Trainee, clip, learning_rate_at, sum_gradients, take_step
from stages.runtime.processes import World
from stages.runtime.session import Metrics, Session
from stages.seeds import seed_of

T = TypeVar("T")


class Task(Protocol):
    """What a stage brings to the loop."""

    trained: Trainee
    loss_name: str

    @property
    def select_by(self) -> str:
        """The figure by which the best model is kept."""

    def records(self) -> int:
        """Number of training records."""

    def records_per_step(self) -> int:
        """How many of them an optimiser step takes."""

    def draw(self, step: int) -> tuple[list[Any], np.ndarray, int]:
        """Items of an optimiser step, their lengths in tokens, and how many records they are."""

    def denominator(self, items: Sequence[Any]) -> Tensor:
        """What the loss of the whole optimiser batch is divided by."""

    def loss(self, items: Sequence[Any], denominator: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss, and sums for ``describe``."""

    def describe(self, sums: dict[str, float]) -> Metrics:
        """Metrics of a step from its sums over micro-batches and processes."""

    def evaluate(self) -> Metrics:
        """Figures on the held-out records; none where nothing is held out."""

    def publish(self, name: str, weights: dict[str, Tensor] | None = None) -> None:
        """Write a finished model folder."""


def total_steps(train: Any, per_epoch: int) -> int:
    """Optimiser steps of the whole run: ``max_steps``, else whole epochs."""
    steps: int = train.max_steps or train.epochs * per_epoch
    return steps


@dataclass(frozen=True)
class Plan:
    """How many iterations and steps a run has; an iteration has the same number of steps each."""

    iterations: int | None
    total_steps: int

    @classmethod
    def of(cls, config: OnlineConfig, prompts: int) -> Plan:
        """Whole rollouts for ``train.total_episodes`` (one pass over the prompts), or max_steps."""
        if config.train.max_steps is not None:
            return cls(None, config.train.max_steps)
        episodes = config.train.total_episodes or prompts * config.per_prompt
        iterations = math.ceil(episodes / config.rollout.batch_size)
        return cls(iterations, iterations * config.epochs * minibatches(config))


def minibatches(config: OnlineConfig) -> int:
    """Minibatches of one pass over a rollout; the last may be smaller."""
    size, together = config.rollout.batch_size, config.together
    return steps_per_epoch(size // together, max(1, min(size, config.train.batch_size) // together))


def run_task(session: Session, task: Task) -> None:
    """Train to the end, then write the finished model folders."""
    with session.guarded():
        _train(session, task)
    session.save()
    _publish_last(session, task)
    session.reporter.end()


def _train(session: Session, task: Task) -> None:
    """Steps, log, evaluations and checkpoints."""
    config, progress = session.config, session.progress
    per_epoch = steps_per_epoch(task.records(), task.records_per_step())
    total = total_steps(config.train, per_epoch)
    session.tell_length(lambda asked: total_steps(asked.train, per_epoch))
    session.reporter.begin(config.stage, total=total, unit="steps", done=progress.step)
    if session.resume_from is None:
        _evaluate(session, task, per_epoch, publish=False)
    session.take_steps()
    while progress.step < total:
        _train_step(session, task, total)
        logged = None
        if progress.step % config.log.every == 0 or progress.step == total:
            epoch = progress.step / per_epoch
            logged = session.log("train", progress.window.take(), epoch=round(epoch, 4))
        session.reporter.advance(progress.step, logged)
        if progress.step % (config.evaluate.every or per_epoch) == 0 or progress.step == total:
            _evaluate(session, task, per_epoch, publish=True)
        if progress.step % config.checkpoint.every == 0 and progress.step < total:
            session.save()
        if progress.step < total:
            session.stop_if_asked()


def accumulate(
    items: Sequence[T],
    lengths: np.ndarray,
    *,
    world: World,
    budget: int,
    backward: Callable[[list[T]], dict[str, Tensor]],
) -> dict[str, float]:
    """Run one optimiser batch: this process's share, micro-batch by micro-batch.

    Args:
        items: the whole optimiser batch.
        lengths: tokens of each item.
        world: the processes.
        budget: tokens per micro-batch.
        backward: computes a micro-batch's loss, back-propagates it and returns sums.

    Returns:
        The sums over all micro-batches of all processes.
    """
    mine = share(lengths, world.rank, world.size)
    totals: dict[str, Tensor] = {}
    for chosen in micro_batches(lengths[mine], budget):
        for name, value in backward([items[mine[n]] for n in chosen]).items():
            value = value.detach()
            totals[name] = totals[name] + value if name in totals else value
    parts = world.gather([_read(totals)])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _read(totals: dict[str, Tensor]) -> dict[str, float]:
    """The sums as numbers; a GPU is waited for once, after the last micro-batch."""
    if not totals:
        return {}
    device = next(iter(totals.values())).device
    exact = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
    values = torch.stack([value.to(exact) for value in totals.values()]).tolist()
    return dict(zip(totals, values, strict=True))


def require_finite(value: float, *, what: str) -> None:
    """A guard: the run stops before a broken number reaches the weights.

    Raises:
        TrainingError: the number is not finite.
    """
    if not np.isfinite(value):
        raise TrainingError(
            f"{what} is {value}",
            do="lower train.learning_rate, or look at the data of this step; the state before it "
            "is saved",
        )


@contextmanager
def modes_kept(*networks: Network) -> Iterator[None]:
    """Whatever mode an evaluation sets, each network is in its own again afterwards."""
    modes = [network.module.training for network in networks]
    try:
        yield
    finally:
        for network, training in zip(networks, modes, strict=True):
            network.module.train(training)


def seed_dropout(session: Session) -> None:
    """Seed the generators that dropout draws from, for the coming optimiser step."""
    key = ("dropout", session.progress.step, session.world.rank)
    torch.manual_seed(seed_of(session.config.seed, *key))


def _train_step(session: Session, task: Task, total: int) -> None:
    """One optimiser step on the whole optimiser batch."""
    started = time.perf_counter()
    config, progress = session.config, session.progress
    items, lengths, records = task.draw(progress.step)
    denominator = task.denominator(items).to(session.arithmetic.device)
    seed_dropout(session)
    task.trained.network.module.train()

    def backward(micro_batch: list[Any]) -> dict[str, Tensor]:
        loss, sums = task.loss(micro_batch, denominator)
        loss.backward()
        return {task.loss_name: loss, **sums}

    sums = accumulate(
        items,
        lengths,
        world=session.world,
        budget=config.train.tokens_per_micro_batch,
        backward=backward,
    )
    what = f"step {progress.step + 1}, {task.loss_name}"
    loss = sums.pop(task.loss_name)
    lr = learning_rate_at(config.train, progress.step, total, peak=config.train.learning_rate)
    require_finite(loss, what=what)
    sum_gradients(task.trained, session.world)
    norm = clip(task.trained, what=what)
    take_step(task.trained, lr=lr)
    seconds = time.perf_counter() - started
    progress.step += 1
    progress.train_seconds += seconds
    progress.records += records
    metrics = {task.loss_name: loss, **task.describe(sums)}
    metrics |= {"optim/lr": lr, "optim/grad_norm": norm, "time/train": seconds}
    metrics["time/tokens_per_second"] = float(lengths.sum()) / seconds
    progress.window.add(metrics)


def _evaluate(session: Session, task: Task, per_epoch: int, *, publish: bool) -> None:
    """Held-out figures; a new best is published at once."""
    with modes_kept(task.trained.network):
        figures = task.evaluate()
        if not figures:
            return
        step = session.progress.step
        require_finite(figures[task.select_by], what=f"step {step}, {task.select_by}")
        row = session.log("eval", figures, epoch=round(step / per_epoch, 4))
        session.reporter.advance(step, row)
        if publish and session.select(task.select_by, row[task.select_by]):
            task.publish("model")


def _publish_last(session: Session, task: Task) -> None:
    """The model of the last step: as ``model`` where nothing was selected, else as ``last``."""
    selected = session.progress.selected
    if selected is None:
        task.publish("model")
        session.progress.selected = {"step": session.progress.step, "by": "last", "value": None}
    elif selected["step"] != session.progress.step:
        task.publish("last")
    else:
        session.drop("last")
    if task.trained.average is not None:
        task.publish("model_ema", task.trained.average)
