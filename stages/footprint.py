"""How much memory a run takes: what stands all the time, and what comes and goes beside it.

The peak is the sum of what stands and of the largest of the moments: a step of each network in
training, sampling, saving.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stages.batch import Group
from stages.budget import Known, Report
from stages.config import OnlineConfig, PpoConfig, RewardModelConfig, SftConfig
from stages.data.kinds import lengths_of
from stages.data.plan import micro_batches
from stages.data.store import Store
from stages.models.load import DROPOUT_NAMES
from stages.roles import Model
from stages.runtime import estimate, room
from stages.runtime.estimate import MIB, Load, Shape

SAMPLED = "normalise.policy"  # a model of train-rm that is gone when training begins
BESIDE = 80 * MIB  # tokenizer, records, and what libraries take for themselves as they work


def memory(known: Known) -> Report:
    """MiB of what stands, of each moment of a run beside it, and what this machine has free."""
    standing, moments = _standing(known), _moments(known)
    held = sum(
        size
        for role, parts in standing.items()
        for name, size in parts.items()
        if role != SAMPLED and name != "gradients"  # they come and go with a step
    )
    peak = held + max(moments.values()) + BESIDE
    free = room.free_memory(known.arithmetic.device)
    return {
        "unit": "MiB",
        **{role: _mib(parts) for role, parts in standing.items()},
        "one_at_a_time": _mib(moments),
        "peak": peak / MIB,
        "free": None if free is None else free / MIB,
        "fits": None if free is None else peak <= free,
    }


def _standing(known: Known) -> dict[str, dict[str, int]]:
    """Bytes that a run holds from its first step to its last, by role."""
    config, arithmetic, load = known.config, known.arithmetic, heaviest(known)
    checkpointing = config.train.gradient_checkpointing
    found: dict[str, dict[str, int]] = {}
    for model in known.models:
        shape, kept = known.shapes[model.role], {}
        if model.trained:
            average = config.train.ema_decay is not None and model.role in ("model", "policy")
            kept = estimate.trained(shape, arithmetic, average=average)._asdict()
            kept["holes"] = estimate.holes(shape, arithmetic, load, checkpointing=checkpointing)
        elif model.shares is None:
            kept = {"weights": estimate.frozen(shape, arithmetic)}
        found[model.role] = {name: size for name, size in kept.items() if size}
    if isinstance(config, OnlineConfig):
        prompt = int(known.lengths.max()) - known.answer
        episodes = config.rollout.batch_size
        size = estimate.rollout(episodes=episodes, prompt=prompt, answer=known.answer)
        found["rollout"] = {"answers": size}
    return found


def _moments(known: Known) -> dict[str, int]:
    """Bytes that come and go: the steps of what is trained, sampling, saving; one at a time."""
    config, arithmetic, load = known.config, known.arithmetic, heaviest(known)
    checkpointing, found, before = config.train.gradient_checkpointing, {}, 0
    for model in known.learners:
        shape = known.shapes[model.role]
        dropout = isinstance(config, SftConfig) and _drops(model, config)
        step = estimate.step(shape, arithmetic, load, dropout=dropout, checkpointing=checkpointing)
        found[f"{model.role}_step"] = before + step
        before += shape.trainable * arithmetic.weights.itemsize  # the critic's step comes second
    if isinstance(config, OnlineConfig):
        shape = known.shapes["policy"]
        found["sampling"] = estimate.decoding(
            shape, arithmetic, rows=config.rollout.batch_size, width=int(known.lengths.max())
        )
        if isinstance(config, PpoConfig) and known.inputs.second is not None:
            size = config.ptx.ratio * min(config.train.batch_size, config.rollout.batch_size)
            texts = _load([known.inputs.second], size, config.train.tokens_per_micro_batch)
            gradients = shape.trainable * arithmetic.weights.itemsize
            step = estimate.step(shape, arithmetic, texts, checkpointing=checkpointing)
            found["documents_step"] = gradients + step
    if SAMPLED in known.shapes and isinstance(config, RewardModelConfig):
        found["sampling"] = _normalising(known, config)
    found["saving"] = max(_saved_copy(known, known.shapes[m.role]) for m in known.learners)
    return found


def _normalising(known: Known, config: RewardModelConfig) -> int:
    """Bytes of the policy whose samples normalise the scores; there are no moments of Adam yet."""
    shape, options = known.shapes[SAMPLED], config.normalise
    width = int(known.lengths.max()) + options.max_new_tokens
    decoding = estimate.decoding(shape, known.arithmetic, rows=options.samples, width=width)
    adam = estimate.trained(known.shapes["model"], known.arithmetic, average=False).optimiser
    return max(0, estimate.frozen(shape, known.arithmetic) + decoding - adam)


def _saved_copy(known: Known, shape: Shape) -> int:
    """Bytes of the weights that are written where they are not those in training."""
    half = 2 if known.config.checkpoint.dtype == "bfloat16" else 0
    merged = known.arithmetic.weights.itemsize if known.config.lora is not None else 0
    return shape.parameters * (half + merged)


def heaviest(known: Known) -> Load:
    """The optimiser batch of the longest records, cut as the stage cuts it."""
    config, stores = known.config, [known.inputs.records.train]
    size, second = config.train.batch_size, known.inputs.second
    if isinstance(config, SftConfig) and second is not None:
        stores.append(second)
    if isinstance(config, OnlineConfig):
        size = min(size, config.rollout.batch_size)
    return _load(stores, size, config.train.tokens_per_micro_batch, known.answer)


def _load(stores: list[Store], size: int, budget: int, answer: int = 0) -> Load:
    lengths = np.concatenate([store.lengths for store in stores]) + answer
    order = np.argsort(-lengths, kind="stable")
    order = np.resize(order, size) if answer else order[:size]  # prompts repeat, records do not
    plan = micro_batches(lengths[order], budget)
    items = [_item(stores, int(order[n])) for n in plan[0]]
    targets = sum(answer or sum(lengths_of(item)[1]) for item in items)
    return Load(
        tokens=max(int(lengths[order[rows]].sum()) for rows in plan),
        keys=sum(_pairs(item, answer) for item in items) / int(lengths[order[plan[0]]].sum()),
        targets=targets,
        micro_batches=len(plan),
    )


def _item(stores: list[Store], n: int) -> Any:
    for store in stores:
        if n < len(store):
            return store[n]
        n -= len(store)
    raise IndexError(n)


def _pairs(item: Any, answer: int) -> int:
    """Pairs of a query and a key that are multiplied; an answer sees its prompt and itself."""
    prompt, answers = lengths_of(item)
    if isinstance(item, Group):
        return prompt**2 + sum(own * (prompt + own) for own in answers)
    return (prompt + (answer or sum(answers))) ** 2


def _drops(model: Model, config: SftConfig) -> bool:
    if config.train.dropout is not None:
        return config.train.dropout > 0
    return any(getattr(model.config, name, 0) for name in DROPOUT_NAMES)


def _mib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {name: size / MIB for name, size in sizes.items()}
