"""How much work a run is: steps, micro-batches, memory and disk, known before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.config import PpoConfig, SftConfig, StageConfig
from stages.data.plan import documents_per_step, micro_batches, optimiser_batch, steps_per_epoch
from stages.inputs import Inputs, Model
from stages.models.load import DROPOUT_NAMES
from stages.models.precision import Arithmetic
from stages.runtime import estimate
from stages.runtime.estimate import MIB, Shape
from stages.runtime.loop import Plan, total_steps
from stages.runtime.optim import learning_rate_at

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

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each training record, in ppo with the longest answer it may get."""
        lengths = self.inputs.records.train.lengths
        return lengths + self.answer if self.answer else lengths

    @property
    def answer(self) -> int:
        """Tokens of the longest sampled answer; 0 where nothing is sampled."""
        return self.config.rollout.max_new_tokens if isinstance(self.config, PpoConfig) else 0


def batches(known: Known) -> Report:
    """Steps, and how the first optimiser batch is cut."""
    if isinstance(known.config, PpoConfig):
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


def _iterations(known: Known, config: PpoConfig) -> Report:
    """A run of ppo; how long the answers will be is not known, so its tokens are upper bounds."""
    prompts, episodes = len(known.lengths), config.rollout.batch_size
    plan = Plan.of(config, prompts)
    size = min(episodes, config.train.batch_size)
    each = config.ppo.epochs * steps_per_epoch(episodes, size)
    iterations = plan.iterations or -(-plan.total_steps // each)
    first = np.resize(known.lengths, size)
    return {
        "prompts": prompts,
        "episodes_per_iteration": episodes,
        "times_each_prompt_in_an_iteration": episodes / prompts,
        "iterations": iterations,
        "episodes": iterations * episodes,
        "passes_over_the_prompts": iterations * episodes / prompts,
        "minibatches_per_epoch": steps_per_epoch(episodes, size),
        "steps_per_iteration": each,
        "total_steps": plan.total_steps,
        "documents_per_step": size * config.ptx.ratio if config.ptx.data else 0,
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


def memory(known: Known) -> Report:
    """MiB of each part of a run at its fullest, and what this machine has free."""
    config, arithmetic = known.config, known.arithmetic
    average = config.train.ema_decay is not None
    standing = {}
    for model in known.models:
        averaged = average and model.role in ("model", "policy")
        parts = estimate.trained(known.shapes[model.role], arithmetic, average=averaged)
        kept = parts._asdict() if model.trained else {"weights": parts.weights}
        if model.shares is not None:
            kept = {}
        standing[model.role] = {name: size for name, size in kept.items() if size}
    passing = _passing(known)
    held = sum(size for parts in standing.values() for size in parts.values())
    held += passing.get("rollout", 0)
    step = passing["activations"] + passing["logits"]
    peak = held + max(step, passing.get("decoding_cache", 0), passing.get("merged_copy", 0))
    free = estimate.free_memory(arithmetic.device)
    return {
        "unit": "MiB",
        **{role: _mib(parts) for role, parts in standing.items()},
        "largest_micro_batch": _mib(passing),
        "peak": peak / MIB,
        "free": None if free is None else free / MIB,
        "fits": None if free is None else peak <= free,
    }


def _passing(known: Known) -> dict[str, int]:
    """Bytes that come and go: one micro-batch, and in ppo the rollout and its decoding."""
    config, train = known.config, known.config.train
    beside = known.inputs.second
    lengths = known.lengths if beside is None else np.append(known.lengths, beside.lengths)
    longest = int(known.lengths.max())
    budget = train.tokens_per_micro_batch
    tokens = estimate.largest_micro_batch(lengths, batch_size=train.batch_size, budget=budget)
    widest = max((m for m in known.models if m.trained), key=lambda m: known.shapes[m.role])
    found = {
        "activations": estimate.activations(
            known.shapes[widest.role],
            known.arithmetic,
            tokens=tokens,
            longest=int(lengths.max()),
            dropout=isinstance(config, SftConfig) and _drops(widest, config),
            checkpointing=train.gradient_checkpointing,
        ),
        "logits": 0,
    }
    if config.lora is not None and known.arithmetic.device.type == "cpu":  # they are merged there
        size = known.shapes[widest.role].parameters * known.arithmetic.weights.itemsize
        found["merged_copy"] = size
    policy = next((m for m in known.models if m.kind == "policy" and m.trained), None)
    if policy is not None:
        shape = known.shapes[policy.role]
        found["logits"] = estimate.logits(shape, known.arithmetic, targets=tokens)
    if isinstance(config, PpoConfig):
        episodes, prompt = config.rollout.batch_size, longest - known.answer
        found["decoding_cache"] = estimate.decoding_cache(
            known.shapes["policy"], known.arithmetic, rows=episodes, width=longest
        )
        found["rollout"] = estimate.rollout(episodes=episodes, prompt=prompt, answer=known.answer)
    return found


def _drops(model: Model, config: SftConfig) -> bool:
    if config.train.dropout is not None:
        return config.train.dropout > 0
    return any(getattr(model.config, name, 0) for name in DROPOUT_NAMES)


def disk(known: Known) -> Report:
    """MiB of the finished folders and of the training states, and what is free there."""
    config, size = known.config, known.arithmetic.weights.itemsize
    saved = 2 if config.checkpoint.dtype == "bfloat16" else size
    learners = [known.shapes[m.role] for m in known.models if m.trained]
    averaged = learners[:1] if config.train.ema_decay is not None else []
    last = known.inputs.records.eval is not None and len(learners) == 1
    folders = learners + averaged + (learners if last else [])
    models = (sum(s.parameters for s in folders) + sum(s.added for s in learners)) * saved
    numbers = (1 + estimate.ADAM) * sum(s.trainable for s in learners)
    state = (numbers + sum(s.trainable for s in averaged)) * size
    # One more than are kept while the newest is written, and perhaps the best.
    states = config.checkpoint.keep + (2 if last else 1)
    free = estimate.free_disk(Path(config.output))
    need = models + states * state
    return {
        "unit": "MiB",
        "models": models / MIB,
        "one_checkpoint": state / MIB,
        "checkpoints_at_most": states,
        "need": need / MIB,
        "free": free / MIB,
        "fits": need <= free,
    }


def _mib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {name: size / MIB for name, size in sizes.items()}
