"""A frozen network stores its matrices as its passes read them, and says exactly what it said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stages.batch import pack, pack_groups
from stages.models.forward import response_logps, scores
from stages.models.network import Network
from tests.families import FAMILIES, tiny_policy, tiny_reward
from tests.models.alone import examples
from tests.models.test_packed_rows import GROUPS

each_family = pytest.mark.parametrize("family", FAMILIES)


def in_bf16(network: Network) -> Network:
    network.compute = torch.bfloat16
    return network


@each_family
@torch.no_grad()
def test_a_frozen_policy_gives_the_same_bits(family):
    network = in_bf16(tiny_policy(family, dtype=torch.float32))
    batch = pack(examples((5, 4), (3, 9), (1, 1)))
    before = response_logps(network, batch, entropy="value")
    after = response_logps(network.freeze(), batch, entropy="value")
    assert torch.equal(after.logp, before.logp)
    assert torch.equal(after.entropy, before.entropy)


@each_family
@torch.no_grad()
def test_a_frozen_reward_model_gives_the_same_bits(family):
    network = in_bf16(tiny_reward(family, dtype=torch.float32))
    batch = pack_groups(GROUPS).batch
    before = scores(network, batch)
    assert torch.equal(scores(network.freeze(), batch), before)


@each_family
def test_matrices_are_halved_and_embeddings_are_not(family):
    module = in_bf16(tiny_policy(family, dtype=torch.float32)).freeze().module
    embedding = module.get_input_embeddings().weight
    assert embedding.dtype == torch.float32
    output = module.get_output_embeddings().weight
    assert output.dtype == (torch.float32 if output is embedding else torch.bfloat16)
    layers = [m for m in module.base_model.modules() if isinstance(m, nn.Linear)]
    assert all(layer.weight.dtype == torch.bfloat16 for layer in layers)
    wide = sum(p.numel() for p in module.parameters() if p.dtype == torch.float32 and p.ndim == 2)
    tables = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    assert wide == sum(p.numel() for p in tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_network_that_computes_as_stored_keeps_its_weights(dtype):
    frozen = tiny_policy("llama", dtype=dtype).freeze()
    assert {p.dtype for p in frozen.module.parameters()} == {dtype}
