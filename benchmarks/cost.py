"""The arithmetic that a work needs at least, whatever computes it.

    factor · (layer weights · tokens + output weights · targets + 2 · layers · width · keys)

``factor`` is 2 for a forward pass and 6 with the backward pass; recomputation does not count. The
last term is attention: each query meets each of its keys in two products of ``width`` numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FORWARD, TRAINING = 2, 6


class Shape(NamedTuple):
    """A transformer as far as its arithmetic goes.

    Attributes:
        layers: how many.
        width: heads times their size.
        body: weights of all matrices in the layers.
        output: weights of the output layer.
    """

    layers: int
    width: int
    body: int
    output: int


class Load(NamedTuple):
    """What a pass reads.

    Attributes:
        tokens: positions that go through the layers.
        targets: positions that go through the output layer.
        keys: sum over the tokens of how many keys each attends to, itself included.
    """

    tokens: int
    targets: int
    keys: int


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a Llama from its ``config.json``."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    width, shared = heads * size, config["num_key_value_heads"] * size
    attention = 2 * hidden * width + 2 * hidden * shared
    layer = attention + 3 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    return Shape(layers, width, layers * layer, hidden * config["vocab_size"])


def with_head(shape: Shape, hidden: int) -> Shape:
    """The same layers under a scalar head."""
    return shape._replace(output=hidden)


def causal(before: int, tokens: int) -> int:
    """Keys of ``tokens`` positions that follow ``before`` others: Σ (before + 1 … before + n)."""
    return before * tokens + tokens * (tokens + 1) // 2


def sequence(prompt: int, answer: int) -> Load:
    """One answer behind its prompt; the answer's tokens are the targets."""
    tokens = prompt + answer
    return Load(tokens, answer, causal(0, tokens))


def ranking(prompt: int, answers: Sequence[int]) -> Load:
    """K answers that share their prompt, each with one target: its last token."""
    keys = causal(0, prompt) + sum(causal(prompt, answer) for answer in answers)
    return Load(prompt + sum(answers), len(answers), keys)


def total(loads: Sequence[Load]) -> Load:
    """The loads of several examples as one."""
    return Load(*(sum(part) for part in zip(*loads, strict=True)))


def flops(shape: Shape, load: Load, factor: int) -> float:
    """Floating-point operations of one pass."""
    attention = 2 * shape.layers * shape.width * load.keys
    return float(factor * (shape.body * load.tokens + shape.output * load.targets + attention))


def ppo_flops(policy: Shape, critic: Shape, episodes: Load, epochs: int) -> float:
    """An iteration of PPO: sampling, four models that read, and the updates of two.

    The head of reward model and critic counts at every answer token, which is next to nothing.

    Args:
        policy: of the policy and its reference.
        critic: of the critic and the reward model.
        episodes: prompts and answers.
        epochs: passes over the rollout.
    """
    reading = 3 * flops(policy, episodes, FORWARD) + 2 * flops(critic, episodes, FORWARD)
    updates = flops(policy, episodes, TRAINING) + flops(critic, episodes, TRAINING)
    return reading + epochs * updates
