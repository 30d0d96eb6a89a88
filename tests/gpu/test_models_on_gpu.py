"""Kernels, packed rows, trees, scores and sampling on a GPU against the same on a CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from stages.batch import pack, pack_groups
from stages.models.forward import response_logps, scores
from stages.models.generate import generate
from stages.models.network import Network
from tests.families import FAMILIES, tiny_policy, tiny_reward
from tests.functional.adapters import ADAPTERS
from tests.functional.golden import read_suites, run
from tests.gpu.device import DEVICE, on_gpu
from tests.models.alone import assert_close, examples, tokens
from tests.models.test_generate import assert_same, sampling, uniforms
from tests.models.test_packed_rows import GROUPS, SHAPES, apart

pytestmark = on_gpu
CASES = [pytest.param(case, id=case.id) for cases in read_suites().values() for case in cases]
each_family = pytest.mark.parametrize("family", FAMILIES)


def moved(network: Network, compute: torch.dtype | None = None) -> Network:
    """A copy on the GPU."""
    other = copy.copy(network)
    other.module, other.compute = copy.deepcopy(network.module).to(DEVICE), compute
    return other


@pytest.mark.parametrize("case", CASES)
def test_a_golden_case_gives_its_numbers_in_fp32(case):
    with DEVICE:
        assert run(case, ADAPTERS, "float32") == []


@each_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logps_and_their_gradients_are_those_of_a_cpu(family, dtype):
    network, batch = tiny_policy(family, dtype=dtype), pack(examples(*SHAPES))
    other = moved(network)
    own, expected = (
        response_logps(n, batch.to(n.device), entropy="gradient") for n in (other, network)
    )
    assert_close(own.logp.cpu(), expected.logp, dtype)
    assert_close(own.entropy.cpu(), expected.entropy, dtype)
    own.logp.sum().backward()
    expected.logp.sum().backward()
    pairs = zip(other.module.named_parameters(), network.module.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        if theirs.grad is not None:
            assert mine.grad is not None, name
            assert_close(mine.grad.cpu(), theirs.grad, dtype, limit=1e-4)


@each_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_tree_gives_the_scores_of_separate_sequences(family, dtype):
    network = moved(tiny_reward(family, dtype=dtype))
    tree = scores(network, pack_groups(GROUPS).batch.to(DEVICE))
    alone = [scores(network, pack([e]).to(DEVICE)) for e in apart(GROUPS)]
    assert_close(tree, torch.cat(alone), dtype)


@each_family
def test_in_bf16_a_tree_and_packed_rows_stay_within_its_rounding(family):
    """Half precision is held against float64 by what rounding to 8 bits explains."""
    exact = tiny_reward(family)
    rough = moved(tiny_reward(family, dtype=torch.float32), torch.bfloat16)
    batch = pack_groups(GROUPS).batch
    truth = scores(exact, batch)
    difference = (scores(rough, batch.to(DEVICE)).double().cpu() - truth).abs().max()
    assert float(difference) <= 0.05 * max(1.0, float(truth.abs().max()))


@each_family
def test_sampled_answers_are_those_of_a_cpu_in_float64(family):
    policy, rng = tiny_policy(family), np.random.default_rng(0)
    prompts = [tokens(rng, n) for n in (5, 1, 9, 5, 3, 14, 2)]
    drawn, rows = sampling(temperature=0.8, top_p=0.9), uniforms(7)
    expected = generate(policy, prompts, rows, drawn)
    assert_same(generate(moved(policy), prompts, rows, drawn), expected)
