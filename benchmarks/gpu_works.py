"""Steps of the three stages on random models and random text, with the arithmetic that each needs.

A step is what the stage does: its own loss, micro-batches, optimiser and rollout code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from benchmarks import cost
from stages.advantage import estimate
from stages.batch import Example, Group, behind
from stages.config import resolve
from stages.models import attention
from stages.models.generate import Sampling
from stages.models.network import Kind, Network
from stages.models.precision import Arithmetic
from stages.reward_model import Ranked
from stages.rollout import Readers, collect
from stages.runtime.loop import accumulate
from stages.runtime.optim import Trainee, clip, sum_gradients, take_step, trainee
from stages.runtime.processes import World
from stages.runtime.reporter import SilentReporter
from stages.runtime.session import Session
from stages.runtime.signals import StopRequest
from stages.sft import Supervised
from stages.update import Update

LEARNING_RATE = 1e-6
ALONE = World()
Step = Callable[[], float]  # takes a step; says how many floating-point operations it needed
Measurable = tuple[Step, int]  # a step, and the tokens of its data


@dataclass(frozen=True)
class Size:
    """A Llama's shape, and how many examples a step has: demonstrations, rankings, episodes."""

    hidden: int
    inner: int
    layers: int
    heads: int
    shared_heads: int
    vocabulary: int
    demonstrations: int
    rankings: int
    episodes: int
    new_tokens: int


SIZES = {
    "tiny": Size(64, 128, 2, 4, 2, 256, 8, 2, 4, 8),
    "135m": Size(576, 1536, 30, 9, 3, 49152, 256, 32, 256, 128),
    "1b": Size(2048, 8192, 16, 32, 8, 128256, 128, 16, 128, 128),
    "3b": Size(3072, 8192, 28, 24, 8, 128256, 64, 8, 64, 128),
}
"""Shapes of SmolLM2-135M, Llama-3.2-1B and Llama-3.2-3B; ``tiny`` is to try the script."""


def network(size: Size, kind: Kind, arithmetic: Arithmetic) -> Network:
    """A random Llama on the device, in the layout that the stages use for its family."""
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.shared_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    config.num_labels = 1
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    torch.manual_seed(0)
    with arithmetic.device:
        module = auto.from_config(config, dtype=arithmetic.weights)
    module.set_attn_implementation(attention.NAME)
    return Network(module, kind, "tree", arithmetic.compute)


def shape_of(network: Network) -> cost.Shape:
    """A network's shape as far as its arithmetic goes."""
    config = network.module.config.to_dict()
    shape = cost.shape_of(config)
    return shape if network.kind == "policy" else cost.with_head(shape, config["hidden_size"])


class Text:
    """Random ids whose lengths are log-normal, as in real instruction data."""

    def __init__(self, size: Size) -> None:
        self.rng, self.size = np.random.default_rng(0), size

    def ids(self, median: int, sigma: float, longest: int) -> np.ndarray:
        """Ids of one text; 0 pads and 1 ends, so neither occurs."""
        length = int(np.clip(self.rng.lognormal(0, sigma) * median, 2, longest))
        return self.rng.integers(2, self.size.vocabulary, length)

    def demonstrations(self) -> list[Example]:
        """A step's demonstrations."""
        return [behind(self.prompt(), self.answer()) for _ in range(self.size.demonstrations)]

    def rankings(self) -> list[Group]:
        """A step's rankings of four answers."""
        return [
            Group(self.prompt(), tuple(self.answer() for _ in range(4)), (1, 2, 3, 4))
            for _ in range(self.size.rankings)
        ]

    def prompt(self) -> np.ndarray:
        """A prompt of about 100 tokens."""
        return self.ids(100, 0.6, 512)

    def answer(self) -> np.ndarray:
        """An answer of about 200 tokens."""
        return self.ids(200, 0.7, 1024)


def session_of(config: Any, arithmetic: Arithmetic) -> Session:
    """A session without a folder: the tasks ask it for config, device and processes."""
    return Session(
        config=config,
        folder=Path(),
        world=ALONE,
        arithmetic=arithmetic,
        reporter=SilentReporter(),
        stop=StopRequest(),
        started=time.perf_counter(),
    )


def config_of(stage: str, size: Size, budget: int) -> Any:
    """The stage's config with its defaults; nothing is read from the places it names."""
    values: dict[str, Any] = {
        "stage": stage,
        "model": "random",
        "data": {"train": "random"},
        "output": "nowhere",
        "train": {"tokens_per_micro_batch": budget, "batch_size": size.episodes},
    }
    if stage == "ppo":
        values["reward"] = {"path": "random"}
        values["rollout"] = {"batch_size": size.episodes, "max_new_tokens": size.new_tokens}
    return resolve(values)


def task_step(task: Any, items: list[Any], lengths: list[int], budget: int) -> None:
    """One optimiser step of a stage that learns from files."""
    trained: Trainee = task.trained
    denominator = task.denominator(items).to(trained.network.device)

    def backward(micro_batch: list[Any]) -> dict[str, torch.Tensor]:
        loss, sums = task.loss(micro_batch, denominator)
        loss.backward()
        return {"loss": loss, **sums}

    accumulate(items, np.array(lengths), world=ALONE, budget=budget, backward=backward)
    sum_gradients(trained, ALONE)
    clip(trained, what="benchmark")
    take_step(trained, lr=LEARNING_RATE)


def sft_work(size: Size, arithmetic: Arithmetic, budget: int) -> Measurable:
    """A step of supervised fine-tuning and its tokens."""
    config = config_of("sft", size, budget)
    policy = network(size, "policy", arithmetic)
    policy.module.train()
    trained = trainee(policy, config.train)
    task = Supervised(session_of(config, arithmetic), config, None, trained, None, None)  # type: ignore[arg-type]
    items = Text(size).demonstrations()
    lengths = [len(item.ids) for item in items]
    loads = [cost.sequence(len(e.ids) - len(e.targets), len(e.targets)) for e in items]

    def step() -> float:
        task_step(task, items, lengths, budget)
        return cost.flops(shape_of(policy), cost.total(loads), cost.TRAINING)

    return step, sum(lengths)


def reward_work(size: Size, arithmetic: Arithmetic, budget: int) -> Measurable:
    """A step of reward training on rankings of four, and its tokens: each prompt counts once."""
    config = config_of("reward_model", size, budget)
    reward = network(size, "reward", arithmetic)
    reward.module.train()
    trained = trainee(reward, config.train)
    task = Ranked(session_of(config, arithmetic), config, None, trained, None, None)  # type: ignore[arg-type]
    items = Text(size).rankings()
    lengths = [item.tokens for item in items]
    loads = [cost.ranking(len(g.prompt), [len(a) for a in g.answers]) for g in items]

    def step() -> float:
        task_step(task, items, lengths, budget)
        return cost.flops(shape_of(reward), cost.total(loads), cost.TRAINING)

    return step, sum(lengths)


def ppo_work(size: Size, arithmetic: Arithmetic, budget: int) -> Measurable:
    """An iteration of PPO: rollout, four readings, and one step of policy and critic."""
    config = config_of("ppo", size, budget)
    readers = Readers(
        network(size, "policy", arithmetic),
        network(size, "policy", arithmetic).freeze(),
        {"model": network(size, "reward", arithmetic).freeze()},
        network(size, "critic", arithmetic),
    )
    assert readers.critic is not None
    policy, critic = trainee(readers.policy, config.train), trainee(readers.critic, config.train)
    update = Update(config, policy, critic, ALONE, total_steps=1000)
    text = Text(size)
    prompts = [text.prompt() for _ in range(size.episodes)]
    keys = [(n, 0) for n in range(size.episodes)]
    sampling = Sampling(size.new_tokens, stop_ids=(1,))

    def step() -> float:
        rollout = collect(
            readers, prompts, keys, sampling,
            seed=0, budget=budget, after_last=False, world=ALONE,
        ).rollout  # fmt: skip
        targets = estimate(rollout, config, kl_coef=config.kl.coef).targets
        update.step(rollout, targets, list(range(size.episodes)), [], 0)
        loads = [
            cost.sequence(len(p), len(a)) for p, a in zip(prompts, rollout.answers, strict=True)
        ]
        whole = cost.total(loads)
        return cost.ppo_flops(shape_of(readers.policy), shape_of(readers.reward), whole, 1)

    return step, sum(map(len, prompts)) + size.episodes * size.new_tokens


STAGES = {"sft": sft_work, "reward": reward_work, "ppo": ppo_work}
