"""Adapters change nothing at first, merge exactly, come off without a trace, and load in peft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from stages.batch import pack
from stages.config.shared import Lora
from stages.errors import ConfigError
from stages.models import lora
from stages.models.folder import Identity
from stages.models.forward import response_logps, response_values, scores
from stages.models.load import Loading, load_policy, load_reward, with_fresh_head
from stages.models.network import Network, casts_kept
from stages.models.save import save_model
from tests.families import (
    FAMILIES,
    arithmetic,
    save_tiny,
    tiny_policy,
    tiny_reward,
    tiny_tokenizer,
)
from tests.models.alone import examples, logps_alone, score_alone

FP64, FP32 = Loading(arithmetic()), Loading(arithmetic(torch.float32))
DATA = examples((4, 6), (2, 3), (5, 1))
BATCH = pack(DATA)
RANK_3 = Lora(rank=3, alpha=6.0)

each_family = pytest.mark.parametrize("family", FAMILIES)


def adapted(network: Network, options: Lora = RANK_3, *, seed: int = 1) -> Network:
    """The network with adapters and head away from where they start."""
    lora.attach(network, options, seed=seed)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, p in network.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p))
    return network


def saved(network: Network, folder: Path, **options: object) -> Path:
    facts = {"template_hash": "t", "vocabulary_hash": "v", "as_messages": False}
    identity = Identity(network.kind, "sft", stop_ids=(1,), pad_id=0, **facts)  # type: ignore[arg-type]
    folder.mkdir()
    save_model(network, folder, tiny_tokenizer(), identity, **options)  # type: ignore[arg-type]
    return folder


def copies(network: Network) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in network.module.state_dict().items()}


@torch.no_grad()
def logps(network: Network) -> Tensor:
    return response_logps(network, BATCH).logp


@each_family
def test_adapters_change_no_bit_before_the_first_step_and_come_off_without_a_trace(family):
    network, plain = tiny_policy(family), tiny_policy(family)
    before = logps(network)
    lora.attach(network, RANK_3, seed=1)
    assert torch.equal(logps(network), before)
    adapted(plain)
    base = lora.without(plain, "policy")
    assert (logps(plain) - before).abs().max() > 1e-3
    assert torch.equal(logps(base), before)
    assert base.module is plain.module
    assert all(p.requires_grad for name, p in plain.module.named_parameters() if "lora_" in name)


@each_family
@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_the_merged_folder_computes_what_base_and_adapters_compute(family, kind, tmp_path):
    base = str(save_tiny(tmp_path / "base", family, kind=kind, dtype=torch.float64))
    network = adapted((load_policy if kind == "policy" else load_reward)(base, FP64))
    running = copies(network)
    folder = saved(network, tmp_path / "model")
    for name, value in network.module.state_dict().items():
        assert torch.equal(value, running[name]), name
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    module, info = auto.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    module.set_attn_implementation("sdpa")
    with torch.no_grad():
        if kind == "policy":
            ours = response_logps(network, BATCH).logp
            theirs = [logps_alone(module.eval(), example) for example in DATA]
            ours = [row[: len(t)] for row, t in zip(ours, theirs, strict=True)]
        else:
            ours, theirs = list(scores(network, BATCH)), [score_alone(module, e) for e in DATA]
    # transformers' norms go through fp32, wherever they are.
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
    again = (load_policy if kind == "policy" else load_reward)(str(folder), FP64)
    with torch.no_grad():
        if kind == "policy":
            torch.testing.assert_close(logps(again), logps(network), rtol=0, atol=1e-9)
        else:
            a, b = scores(again, BATCH), scores(network, BATCH)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@each_family
def test_the_merged_weight_is_w_plus_alpha_over_r_b_a(family):
    network = adapted(tiny_policy(family))
    state = network.module.state_dict()
    merged = lora.merged(network.module, state)
    plain = tiny_policy(family).module
    assert merged.keys() == plain.state_dict().keys()
    changed = 0
    for name, value in plain.state_dict().items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" not in state:
            assert torch.equal(merged[name], value), name
            continue
        a, b = (state[f"{layer}.lora_{x}.default.weight"] for x in "AB")
        delta = (6.0 / 3) * b @ a
        delta = delta.T if family == "gpt2" else delta  # Conv1D stores [in, out]
        torch.testing.assert_close(merged[name], value + delta, rtol=1e-12, atol=1e-12)
        changed += 1
    assert changed == 2 * {"gpt2": 4, "gpt_neox": 4, "opt": 6}.get(family, 7)


@each_family
def test_what_is_trained_is_r_times_in_plus_out_of_each_layer_and_the_head(family):
    network = tiny_reward(family)
    sizes = {name: w.shape for name, w in network.module.named_parameters() if w.ndim == 2}
    lora.attach(network, RANK_3, seed=0)
    linear = [n for n in sizes if "embed" not in n and "wte" not in n and "wpe" not in n]
    expected = sum(3 * sum(sizes[n]) for n in linear if n != "score.weight") + 16
    assert sum(p.numel() for _, p in network.parameters()) == expected
    assert {n for n, _ in network.parameters() if "lora_" not in n} == {
        "score.modules_to_save.default.weight"
    }


def test_a_seed_gives_the_same_adapters_whatever_the_global_generator_has_done():
    values = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        state = torch.random.get_rng_state()
        network = lora.attach(tiny_policy("llama"), RANK_3, seed=5)
        assert torch.equal(torch.random.get_rng_state(), state)
        values.append(dict(network.parameters()))
    other = dict(lora.attach(tiny_policy("llama"), RANK_3, seed=6).parameters())
    for name, p in values[0].items():
        assert torch.equal(p, values[1][name])
        drawn = "lora_A" in name
        assert bool((p != 0).all()) == drawn
        assert torch.equal(p, other[name]) != drawn
        if drawn:
            assert p.abs().max() <= p.shape[1] ** -0.5
    rows = [tuple(p.flatten()[:3].tolist()) for n, p in values[0].items() if "lora_A" in n]
    assert len(set(rows)) == len(rows)


def test_a_rank_of_one_on_named_layers_adapts_those_alone():
    network = lora.attach(tiny_policy("llama"), Lora(rank=1, targets=["q_proj", "v_proj"]), seed=0)
    layers = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, _ in network.parameters()}
    assert layers == {"q_proj", "v_proj"}
    one = "model.layers.1.self_attn.o_proj"
    network = lora.attach(tiny_policy("llama"), Lora(targets=[one]), seed=0)
    assert {name.split(".lora_")[0] for name, _ in network.parameters()} == {one}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prj", "score", "norm", ""])
@pytest.mark.parametrize("make", [tiny_policy, tiny_reward])
def test_a_target_that_is_no_linear_layer_inside_the_model_is_refused(target, make):
    options = Lora.model_construct(rank=2, alpha=2.0, dropout=0.0, targets=("q_proj", target))
    with pytest.raises(ConfigError, match="is no linear layer inside a llama model") as caught:
        lora.attach(make("llama"), options, seed=0)
    assert "q_proj" in caught.value.do


def test_a_missing_package_is_said_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    lora.require(None)
    with pytest.raises(ConfigError, match="peft") as caught:
        lora.require(RANK_3)
    assert "rlhf-cli[lora]" in caught.value.do


@each_family
def test_gradients_reach_all_adapters_though_embeddings_are_frozen_and_layers_recomputed(family):
    found = []
    for frugal in (False, True):
        network = adapted(tiny_policy(family))
        if frugal:
            network.module.gradient_checkpointing_enable({"use_reentrant": False})
        network.module.train()
        with torch.enable_grad():
            response_logps(network, BATCH).logp.sum().backward()
        assert all(p.grad is None for p in network.module.parameters() if not p.requires_grad)
        found.append({name: p.grad for name, p in network.parameters()})
    for name, gradient in found[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)


def test_a_critic_shares_the_reward_model_and_leaves_its_scores_alone():
    judge = tiny_reward("qwen3", mean=0.5, std=2.0)
    with torch.no_grad():
        expected = scores(judge, BATCH)
    critic = adapted(tiny_reward("qwen3", mean=0.5, std=2.0, kind="critic"))
    reward = lora.without(critic, "reward")
    with torch.no_grad():
        assert torch.equal(scores(reward, BATCH), expected)
        values = response_values(critic, BATCH)
    loss = response_values(critic, BATCH).square().sum()
    with torch.no_grad():
        scores(reward, BATCH)  # between forward and backward
    loss.backward()
    assert all(p.grad is not None for _, p in critic.parameters())
    with torch.no_grad():
        for _, p in critic.parameters():
            p.sub_(0.01 * p.grad)
        assert torch.equal(scores(reward, BATCH), expected)
        assert not torch.allclose(response_values(critic, BATCH), values)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_averages_of_the_adapters_merge_as_the_adapters_do(family, dtype, tmp_path):
    base = str(save_tiny(tmp_path / "base", family, kind="reward"))
    network = adapted(load_reward(base, FP32))
    running = copies(network)
    average = {name: 0.5 * p.detach() for name, p in network.parameters()}
    folder = saved(network, tmp_path / "model_ema", weights=average, dtype=dtype)
    for name, value in network.module.state_dict().items():
        assert torch.equal(value, running[name])
    other = load_reward(base, FP32)
    lora.attach(other, RANK_3, seed=0)
    with torch.no_grad():
        for name, p in other.parameters():
            p.copy_(average[name])
    expected = lora.merged(other.module, other.module.state_dict())
    for name, p in load_reward(str(folder), FP32).module.named_parameters():
        assert torch.equal(p, expected[name].to(dtype or torch.float32).float()), name


@each_family
@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_peft_loads_the_adapter_onto_the_base_model(family, kind, tmp_path):
    base = save_tiny(tmp_path / "base", family, dtype=torch.float64)
    if kind == "policy":
        network, auto = load_policy(str(base), FP64), AutoModelForCausalLM
    else:
        network, auto = with_fresh_head(str(base), FP64, seed=3), AutoModelForSequenceClassification
    adapted(network)
    folder = tmp_path / "adapter"
    folder.mkdir()
    lora.save_adapter(network.module, folder, str(base))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    extra = {} if kind == "policy" else {"num_labels": 1}
    module = auto.from_pretrained(base, dtype=torch.float64, **extra)
    theirs = PeftModel.from_pretrained(module, folder).eval()
    merged = lora.merged(network.module, network.module.state_dict())
    for name, value in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(value, merged[name], rtol=1e-12, atol=1e-12)


def test_an_adapter_is_written_alike_whatever_the_order_of_sets(tmp_path):
    network = adapted(tiny_policy("llama"))
    lora.save_adapter(network.module, tmp_path, "hub/id")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert config["base_model_name_or_path"] == "hub/id"


def test_frozen_weights_are_cast_once_while_casts_are_kept():
    network = adapted(tiny_policy("llama", dtype=torch.float32))
    network.compute = torch.bfloat16
    frozen = {name for name, p in network.module.named_parameters() if not p.requires_grad}

    def casts() -> int:
        with torch.profiler.profile() as seen, torch.no_grad(), network.autocast():
            for _ in range(3):
                response_logps(network, BATCH)
        return sum(event.count for event in seen.key_averages() if event.key == "aten::_to_copy")

    apart = casts()
    with casts_kept(network):
        together = casts()
    assert together < apart - len(frozen)
    assert {name for name, p in network.module.named_parameters() if not p.requires_grad} == frozen
