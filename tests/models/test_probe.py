"""Which layouts an architecture bears, and what the simpler layouts compute."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, StableLmConfig

from stages.batch import pack, pack_groups
from stages.errors import CheckpointError
from stages.models import load, probe
from stages.models.forward import response_logps, response_values, scores
from stages.models.load import verdict_of
from stages.models.probe import Verdict
from tests.families import FAMILIES, WITH_DROPOUT, network_of, tiny_config
from tests.models.alone import (
    assert_close,
    assert_same_gradients,
    entropy_alone,
    examples,
    gradients,
    logps_alone,
    other_config,
    score_alone,
    states_alone,
    twin,
    weights_like,
)
from tests.models.test_packed_rows import GROUPS, SHAPES, apart

FALLBACKS = {"falcon": "packed", "bloom": "padded"}
LIMITS = {"falcon": 1e-9, "bloom": 1e-6}  # bloom computes its softmax in fp32


@pytest.mark.parametrize("family", FAMILIES)
def test_six_families_bear_trees_and_decode_with_the_cache(family):
    assert probe.probe(tiny_config(family)) == Verdict("tree", True)


@pytest.mark.parametrize("family", WITH_DROPOUT)
def test_dropout_in_the_config_does_not_blind_the_probe(family):
    assert probe.probe(tiny_config(family, dropout=0.5)) == Verdict("tree", True)


@pytest.mark.parametrize(("family", "mode"), FALLBACKS.items())
def test_a_family_that_bears_less_gets_the_simpler_layout(family, mode):
    assert probe.probe(other_config(family)).mode == mode


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_a_family_with_a_scaled_or_capped_head_bears_trees(family):
    assert probe.probe(other_config(family)) == Verdict("tree", True)


def test_a_family_that_does_not_hand_the_plan_on_runs_in_padded_rows():
    config = StableLmConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    assert probe.probe(config) == Verdict("padded", False)


def test_a_family_that_cannot_compute_in_float64_is_tried_in_fp32():
    config = MixtralConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    assert probe.probe(config) == Verdict("tree", True)


def test_a_window_shorter_than_the_text_is_tried_whatever_the_config_says():
    """The tiny text is short, so a long window would hide an attention that ignores it."""
    config = tiny_config("mistral")
    config.sliding_window = 4096
    assert probe._shallow(config).sliding_window == 4


def test_the_copy_keeps_one_layer_of_each_type():
    config = other_config("gemma2")
    config.num_hidden_layers = 26
    config.layer_types = ["sliding_attention"] * 25 + ["full_attention"]
    small = probe._shallow(config)
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_hidden_layers == 2
    assert config.num_hidden_layers == 26


@pytest.mark.parametrize("family", FALLBACKS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_fallback_gives_the_log_probabilities_of_separate_sequences(family, temperature):
    network = network_of(other_config(family), "policy")
    assert network.mode == FALLBACKS[family]
    module = twin(network)
    for data, batch in (
        (examples(*SHAPES), pack(examples(*SHAPES))),
        (apart(GROUPS), pack_groups(GROUPS).batch),
    ):
        got = response_logps(network, batch, temperature=temperature, entropy="gradient")
        ours, spread = got.logp[batch.mask], got.entropy[batch.mask]
        theirs = torch.cat([logps_alone(module, e, temperature=temperature) for e in data])
        other = torch.cat([entropy_alone(module, e, temperature=temperature) for e in data])
        assert_close(ours, theirs, torch.float64, limit=LIMITS[family])
        assert_close(spread, other, torch.float64, limit=LIMITS[family])
        a, b = weights_like([theirs, other])
        got_gradients = gradients(network.module, (a * ours + b * spread).sum())
        expected = gradients(module, (a * theirs + b * other).sum())
        assert_same_gradients(got_gradients, expected, torch.float64, limit=LIMITS[family])


@pytest.mark.parametrize("family", FALLBACKS)
def test_a_fallback_gives_the_scores_and_values_of_separate_sequences(family):
    network = network_of(other_config(family), "reward")
    module, data, batch = twin(network), apart(GROUPS), pack_groups(GROUPS).batch
    ours = scores(network, batch)
    theirs = torch.stack([score_alone(module, e) for e in data])
    assert_close(ours, theirs, torch.float64, limit=LIMITS[family])
    (a,) = weights_like([theirs])
    grads = gradients(network.module, (a * ours).sum()), gradients(module, (a * theirs).sum())
    assert_same_gradients(*grads, torch.float64, limit=LIMITS[family])
    values = response_values(network, batch)[batch.mask]
    truth = torch.cat([states_alone(module, e)[e.targets - 1] for e in data])
    assert_close(values, truth, torch.float64, limit=LIMITS[family])


def test_a_family_that_changes_its_logits_in_an_unknown_way_is_refused(monkeypatch):
    forward = AutoModelForCausalLM.from_config(tiny_config("llama")).__class__.forward

    def shifted(self, *args, **options):
        out = forward(self, *args, **options)
        out.logits = out.logits + torch.arange(out.logits.shape[-1])
        return out

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", shifted)
    with pytest.raises(CheckpointError, match="llama change their logits") as caught:
        probe.probe(tiny_config("llama"))
    assert caught.value.exit_code == 4


def test_a_config_of_which_no_small_copy_runs_is_refused_by_name(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(probe.AutoModelForCausalLM, "from_config", broken)
    with pytest.raises(CheckpointError, match="no small copy of a llama model"):
        probe.probe(tiny_config("llama"))


def test_the_probe_leaves_the_random_state_and_the_config_as_they_were():
    config = tiny_config("gpt2", dropout=0.1)
    before, text = torch.random.get_rng_state(), config.to_json_string(use_diff=False)
    probe.probe(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert config.to_json_string(use_diff=False) == text


def test_the_probe_is_asked_once_per_configuration(monkeypatch):
    asked = []

    def counting(config):
        asked.append(config.model_type)
        return Verdict("tree", True)

    monkeypatch.setattr(load, "_VERDICTS", {})
    monkeypatch.setattr(load, "probe", counting)
    for family in ("llama", "gpt2", "llama", "llama"):
        verdict_of(tiny_config(family))
    wider = tiny_config("llama")
    wider.hidden_size = 32
    verdict_of(wider)
    assert asked == ["llama", "gpt2", "llama"]
