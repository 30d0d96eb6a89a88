"""Equal passes give equal bits, with several threads and sizes at which torch splits its work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from stages.batch import Group, pack_groups
from stages.models.forward import response_logps, scores
from stages.models.precision import order_sums
from tests.families import FAMILIES, network_of, tiny_policy, tiny_reward

PROMPTS, ANSWERS = 8, 4


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def rankings():
    """Trees whose prompts have several answers, so that keys are read by several queries' rows."""
    rng = np.random.default_rng(0)

    def ids(shortest, longest):
        return rng.integers(2, 97, rng.integers(shortest, longest))

    ranks = tuple(range(1, ANSWERS + 1))
    groups = [Group(ids(8, 20), tuple(ids(4, 14) for _ in ranks), ranks) for _ in range(PROMPTS)]
    return pack_groups(groups).batch


def gradients(network, read):
    network.module.zero_grad(set_to_none=True)
    read(network, rankings()).square().sum().backward()
    return {n: p.grad.clone() for n, p in network.parameters() if p.grad is not None}


def differing(network, read, repeats=1):
    """Names of the weights whose gradients are not the same in every repetition."""
    first = gradients(network, read)
    return {
        name
        for _ in range(repeats)
        for name, grad in gradients(network, read).items()
        if not torch.equal(grad, first[name])
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_of_rankings_is_the_same_bit_for_bit(name):
    assert differing(tiny_reward(name, dtype=torch.float32), scores) == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_of_log_probabilities_is_the_same_bit_for_bit(name):
    network = tiny_policy(name, dtype=torch.float32)
    assert differing(network, lambda n, b: response_logps(n, b, entropy="gradient").logp) == set()


def test_a_wider_model_whose_sums_are_split_among_threads_has_equal_gradients_too():
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=8,
        pad_token_id=0,
    )
    network = network_of(config, "reward", dtype=torch.float32)
    assert differing(network, scores, repeats=20) == set()


def test_a_cpu_adds_in_a_fixed_order_in_operations_of_others_too():
    try:
        order_sums(torch.device("cpu"))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
