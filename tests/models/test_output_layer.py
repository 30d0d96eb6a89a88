"""The projection onto the vocabulary is computed where its result is used, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from stages.batch import pack
from stages.models.forward import response_logps
from stages.models.generate import Sampling, generate, noise
from tests.families import tiny_policy
from tests.models.alone import examples

PROMPTS, ANSWERS = (9, 5, 12), (4, 1, 0)


def positions_projected(network):
    """The number of hidden states in each call of the output layer."""
    seen = []
    network.head.register_forward_hook(
        lambda module, inputs, out: seen.append(inputs[0].shape[:-1].numel())
    )
    return seen


@pytest.mark.parametrize("mode", ["tree", "packed", "padded"])
@pytest.mark.parametrize("entropy", ["none", "value"])
def test_no_prompt_position_has_a_distribution_over_the_vocabulary(mode, entropy):
    network = tiny_policy("llama")
    if mode == "padded":
        network.module.set_attn_implementation("sdpa")
    network.mode = mode
    seen = positions_projected(network)
    data = examples(*zip(PROMPTS, ANSWERS, strict=True))
    response_logps(network, pack(data), entropy=entropy)
    assert sum(seen) == sum(ANSWERS)


def test_sampling_projects_one_position_of_each_row_a_step():
    network = tiny_policy("llama")
    seen = positions_projected(network)
    prompts = [np.full(n, 7) for n in PROMPTS]
    rows = noise(0, [(n, 0) for n in range(3)], 4)
    generate(network, prompts, rows, Sampling(max_new_tokens=4, stop_ids=(97,)))
    assert seen == [3, 3, 3, 3]
