"""How much work a run is: steps, micro-batches and disk, known before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.config import OnlineConfig, PpoConfig, SftConfig, StageConfig
from stages.data.plan import documents_per_step, micro_batches, optimiser_batch, steps_per_epoch
from stages.errors import ResourceError
from stages.inputs import Inputs
from stages.models.precision import Arithmetic
from stages.roles import Model
from stages.runtime import estimate, room
from stages.runtime.estimate import MIB, Shape
from stages.runtime.loop import Plan, minibatches, total_steps
from stages.runtime.optim import learning_rate_at
from stages.runtime.session import Session

Report = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """What the reckoning starts from.

    Attributes:
        config: of any stage.
        arithmetic: device and number formats.
        models: what the stage reads.
        shapes: their sizes, by role.
        inputs: the records.
    """

    config: StageConfig
    arithmetic: Arithmetic
    models: list[Model]
    shapes: Mapping[str, Shape]
    inputs: Inputs

    @classmethod
    def of(cls, session: Session, config: StageConfig, models: list[Model], read: Inputs) -> Known:
        """With the shapes of these models, counted without their weights."""
        shapes = {
            m.role: estimate.shape_of(
                m.config,
                m.kind,
                trust_remote_code=config.trust_remote_code,
                lora=config.lora if m.trained else None,
            )
            for m in models
        }
        return cls(config, session.arithmetic, models, shapes, read)

    @property
    def learners(self) -> list[Model]:
        """The models in training; in ppo the policy comes before the critic."""
        return [model for model in self.models if model.trained]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each training record, with the longest answer that a prompt may get."""
        lengths: np.ndarray = self.inputs.records.train.lengths
        return lengths + self.answer if self.answer else lengths

    @property
    def answer(self) -> int:
        """Tokens of the longest sampled answer; 0 where nothing is sampled."""
        return self.config.rollout.max_new_tokens if isinstance(self.config, OnlineConfig) else 0


def batches(known: Known) -> Report:
    """Steps, and how the first optimiser batch is cut."""
    if isinstance(known.config, OnlineConfig):
        return _iterations(known, known.config)
    config, lengths = known.config, known.inputs.records.train.lengths
    mixed = 0
    if isinstance(config, SftConfig) and known.inputs.beside is not None:
        mixed = documents_per_step(config.train.batch_size, config.sft.pretrain.share)
    size = config.train.batch_size - mixed
    per_epoch = steps_per_epoch(len(lengths), size)
    total = total_steps(config.train, per_epoch)
    _, chosen = optimiser_batch(len(lengths), size, config.seed, 0)
    return {
        "records": len(lengths),
        "records_per_step": min(size, len(lengths)),
        "documents_per_step": mixed,
        "steps_per_epoch": per_epoch,
        "epochs": total / per_epoch,
        "total_steps": total,
        "first_batch": _cut(lengths[chosen], config.train.tokens_per_micro_batch),
        **_schedule(config, total),
    }


def _iterations(known: Known, config: OnlineConfig) -> Report:
    """A run of rollouts; how long answers will be is not known: its tokens are upper bounds."""
    prompts, episodes = len(known.lengths), config.rollout.batch_size
    plan = Plan.of(config, prompts)
    size, per_epoch = min(episodes, config.train.batch_size), minibatches(config)
    each = config.epochs * per_epoch
    iterations = plan.iterations or -(-plan.total_steps // each)
    first = np.resize(known.lengths, size)
    asked = episodes / config.per_prompt
    documents = size * config.ptx.ratio if isinstance(config, PpoConfig) and config.ptx.data else 0
    return {
        "prompts": prompts,
        "episodes_per_iteration": episodes,
        "times_each_prompt_in_an_iteration": asked / prompts,
        "iterations": iterations,
        "episodes": iterations * episodes,
        "passes_over_the_prompts": iterations * asked / prompts,
        "minibatches_per_epoch": per_epoch,
        "steps_per_iteration": each,
        "total_steps": plan.total_steps,
        "documents_per_step": documents,
        "first_minibatch_at_most": _cut(first, config.train.tokens_per_micro_batch),
        **_schedule(config, plan.total_steps),
    }


def _cut(lengths: np.ndarray, budget: int) -> Report:
    plan = [lengths[rows] for rows in micro_batches(lengths, budget)]
    return {
        "tokens": int(lengths.sum()),
        "micro_batches": len(plan),
        "largest_micro_batch": max(int(part.sum()) for part in plan),
        "records_over_the_budget": int((lengths > budget).sum()),
    }


def _schedule(config: StageConfig, total: int) -> Report:
    peak = config.train.learning_rate
    first, last = (learning_rate_at(config.train, n, total, peak=peak) for n in (0, total - 1))
    return {
        "schedule": config.train.schedule,
        "warmup_steps": config.train.warmup_steps,
        "learning_rate": {"first": first, "peak": peak, "last": last},
    }


def require_disk(session: Session, config: StageConfig, models: list[Model], read: Inputs) -> None:
    """There is room for the model folders and training states that a run will write.

    Raises:
        ResourceError: there is not; nothing has been written.
    """
    needed = disk(Known.of(session, config, [m for m in models if m.trained], read))
    if not needed["fits"]:
        raise short_of_disk(config, needed)


def short_of_disk(config: StageConfig, needed: Report) -> ResourceError:
    """The error for a person who has not enough of it."""
    return ResourceError(
        f"about {needed['need']:.0f} MiB are needed for models and training states, and "
        f"{needed['free']:.0f} are free",
        where=f"output: {config.output}",
        do="free some space, lower checkpoint.keep, or give output a folder on another disk; then "
        "run the same command again with --resume",
    )


def disk(known: Known) -> Report:
    """MiB of the finished folders and of the training states, and what is free there."""
    config, size = known.config, known.arithmetic.weights.itemsize
    saved = 2 if config.checkpoint.dtype == "bfloat16" else size
    learners = [known.shapes[m.role] for m in known.learners]
    averaged = learners[:1] if config.train.ema_decay is not None else []
    # What learns from its own answers publishes its last model alone.
    last = known.inputs.records.eval is not None and not isinstance(config, OnlineConfig)
    folders = learners + averaged + (learners if last else [])
    models = (sum(s.parameters for s in folders) + sum(s.added for s in learners)) * saved
    numbers = (1 + estimate.ADAM) * sum(s.trainable for s in learners)
    state = (numbers + sum(s.trainable for s in averaged)) * size
    # One more than are kept while the newest is written, and perhaps the best.
    states = min(_saves(known), config.checkpoint.keep + (2 if last else 1))
    folder = Path(config.output)
    free = room.free_disk(folder) + room.held_by(folder)
    # A better model is written while the one before it is still there.
    beside = learners[0].parameters * saved if last else 0
    need = models + beside + states * state
    return {
        "unit": "MiB",
        "models": models / MIB,
        "one_checkpoint": state / MIB,
        "checkpoints_at_most": states,
        "need": need / MIB,
        "free": free / MIB,
        "fits": need <= free,
    }


def _saves(known: Known) -> int:
    """How many training states a run writes: every so often, and at its end."""
    told = batches(known)
    steps: int = told["total_steps"]
    return int(told.get("iterations", steps)) // known.config.checkpoint.every + 1
