"""What is loaded from a folder, and what is refused with a sentence that names the cause."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from stages.errors import CheckpointError, ConfigError, RlhfError
from stages.models import precision
from stages.models.configured import (
    is_reward_model,
    max_positions,
    read_model_config,
    reward_config,
)
from stages.models.folder import Identity, model_folder, write_identity
from stages.models.load import (
    Loading,
    has_residual_dropout,
    load_policy,
    load_reward,
    load_tokenizer,
    with_fresh_head,
)
from stages.models.network import score_head, without_dropout
from tests.families import (
    FAMILIES,
    POSITIONS,
    WITH_DROPOUT,
    arithmetic,
    random_module,
    save_tiny,
    tiny_config,
    tiny_policy,
)
from tests.models.alone import other_config

FP32 = Loading(arithmetic(torch.float32))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    save_tiny(folder / "policy", "llama")
    save_tiny(folder / "reward", "llama", kind="reward")
    return folder


@pytest.fixture
def policy(originals, tmp_path):
    return shutil.copytree(originals / "policy", tmp_path / "policy")


@pytest.fixture
def reward(originals, tmp_path):
    return shutil.copytree(originals / "reward", tmp_path / "reward")


def refused(load, source, *fragments: str) -> CheckpointError:
    """Loading ends with exit code 4; the message names the source, and says what to do."""
    with pytest.raises(CheckpointError) as caught:
        load(str(source))
    error = caught.value
    assert error.exit_code == 4
    assert str(source) in f"{error.where} {error.what}"
    assert error.do
    for fragment in fragments:
        assert fragment in error.what, error.what
    return error


def policy_of(source: str):
    return load_policy(source, FP32)


def reward_of(source: str):
    return load_reward(source, FP32)


def headed(source: str):
    return with_fresh_head(source, FP32, seed=0)


def change_weights(folder, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("load", [policy_of, reward_of, headed])
def test_a_missing_folder_is_refused(load, tmp_path):
    refused(load, tmp_path / "runs" / "sft", "no such folder")


@pytest.mark.parametrize("load", [policy_of, headed])
def test_a_folder_without_config_is_refused(load, policy):
    (policy / "config.json").unlink()
    assert "config.json" in refused(load, policy, "missing").where


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_broken_config_is_refused_with_its_place(text, policy):
    (policy / "config.json").write_text(text)
    assert "config.json" in refused(policy_of, policy).where


@pytest.mark.parametrize("text", ["[1]", "3", "null"])
def test_generation_settings_that_are_no_object_are_refused_by_name(text, policy):
    (policy / "generation_config.json").write_text(text)
    refused(policy_of, policy, "generation_config.json")


@pytest.mark.parametrize("load", [policy_of, headed])
def test_missing_weights_are_refused(load, policy):
    (policy / "model.safetensors").unlink()
    refused(load, policy, "weights")


@pytest.mark.parametrize("keep", [0, 4, 200, 0.5, -1])
def test_a_truncated_file_is_refused(keep, policy):
    path = policy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(policy_of, policy, "model.safetensors")


@pytest.mark.parametrize("place", [0, 7, 8, 40, 300])
def test_a_flipped_byte_in_the_header_is_refused(place, policy):
    path = policy / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(bytes(data))
    refused(policy_of, policy)


def test_pickled_weights_are_refused_unopened(policy):
    (policy / "model.safetensors").unlink()
    (policy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    refused(policy_of, policy, "pickle")


def test_a_pickle_beside_the_weights_is_never_read(policy):
    (policy / "pytorch_model.bin").write_bytes(b"not a model")
    policy_of(str(policy))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_weight_that_is_not_finite_is_refused_by_name(value, name, policy):
    change_weights(policy, lambda weights: weights[name].view(-1)[3].fill_(value))
    refused(policy_of, policy, name, "not finite")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_weight_is_refused_by_name(name, policy):
    change_weights(policy, lambda weights: weights.pop(name))
    refused(policy_of, policy, name, "1 weights are missing")


def test_a_weight_of_another_shape_is_refused_by_name(policy):
    def shorten(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"][:8].clone()

    change_weights(policy, shorten)
    refused(policy_of, policy, "model.norm.weight")


def test_a_reward_model_without_its_head_is_refused(reward):
    change_weights(reward, lambda weights: weights.pop("score.weight"))
    refused(reward_of, reward, "score.weight")


def test_a_head_with_a_bias_is_refused_because_it_would_be_left_out(reward):
    change_weights(reward, lambda weights: weights.update({"score.bias": torch.ones(1)}))
    refused(reward_of, reward, "score.bias")


def test_a_reward_model_is_no_policy(reward):
    refused(policy_of, reward, "reward model", "policy")
    refused(headed, reward, "reward model")
    assert is_reward_model(str(reward))


def test_a_policy_is_no_reward_model(policy):
    refused(reward_of, policy, "policy", "reward model")
    assert not is_reward_model(str(policy))


@pytest.mark.parametrize(("kind", "is_reward"), [("policy", False), ("reward", True),
                                                 ("critic", True)])  # fmt: skip
def test_a_folder_of_ours_is_believed_over_its_architecture(kind, is_reward, policy):
    write_identity(policy, Identity(kind, "sft", "t", "v", False, (1,), 0))
    assert is_reward_model(str(policy)) is is_reward


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    config = tiny_config("llama", vocab=262)
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "m")
    refused(reward_of, tmp_path / "m", "3 labels")


def test_a_family_without_a_classifier_is_refused_with_those_that_have_one(tmp_path):
    config = other_config("granite")
    random_module(config, "policy", dtype=torch.float32, seed=0).save_pretrained(tmp_path / "m")
    error = refused(headed, tmp_path / "m", "granite")
    assert "llama" in error.do
    policy_of(str(tmp_path / "m"))


def test_a_model_that_continues_no_text_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "m")
    with pytest.raises(RlhfError):
        policy_of(str(tmp_path / "m"))


def test_an_unknown_model_type_is_refused(policy):
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "model_type": "quantum"}))
    refused(policy_of, policy, "quantum")


def test_a_model_that_brings_python_is_refused_until_it_is_trusted(policy):
    config = json.loads((policy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (policy / "config.json").write_text(json.dumps(config))
    (policy / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match="Python code of its own") as caught:
        policy_of(str(policy))
    assert caught.value.exit_code == 2
    assert caught.value.where == "trust_remote_code"


def test_missing_tokenizer_files_are_refused_by_name(policy):
    for path in policy.glob("tokenizer*"):
        path.unlink()
    error = refused(load_tokenizer, policy, "tokenizer")
    assert "tokenizer.json" in error.do


def test_a_broken_tokenizer_file_is_refused(policy):
    (policy / "tokenizer.json").write_text('{"version": "1.0"')
    refused(load_tokenizer, policy, "tokenizer")


@pytest.mark.parametrize(
    "name", [300 * "x", "runs/" + 300 * "x", "run s/x", "/nowhere/x", "./x/y", "../x", "runs/-x"]
)
def test_a_name_that_neither_a_folder_nor_the_hub_can_have_is_no_such_folder(
    name, tmp_path, monkeypatch
):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_tokenizer(name)


def test_the_advice_on_a_broken_tokenizer_names_the_model_folder(policy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(policy, run / "model")
    (run / "model" / "tokenizer.json").write_text("{")
    assert refused(load_tokenizer, run, "tokenizer").do.endswith(f"into {run}/model")


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_set_where_a_family_has_it_and_refused_where_not(family, tmp_path):
    source = str(save_tiny(tmp_path / "m", family))
    asked = Loading(arithmetic(torch.float32), dropout=0.3)
    assert has_residual_dropout(tiny_config(family)) is (family in WITH_DROPOUT)
    if family not in WITH_DROPOUT:
        with pytest.raises(ConfigError, match="no residual dropout") as caught:
            load_policy(source, asked)
        assert (caught.value.where, caught.value.exit_code) == ("train.dropout", 2)
        optional = Loading(arithmetic(torch.float32), dropout=0.3, dropout_optional=True)
        load_policy(source, optional)
        return
    module = load_policy(source, asked).module.train()
    seen = {
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, float) and (name in ("p", "dropout"))
    }
    assert 0.3 in seen
    ids = torch.tensor([[3, 4, 5, 6]])
    network = load_policy(source, asked)
    assert not torch.equal(_logits(network, ids), _logits(network, ids))
    silenced = without_dropout(network)
    assert torch.equal(_logits(silenced, ids), _logits(silenced, ids))


def _logits(network, ids):
    """In training mode, where dropout acts."""
    network.module.train()
    network.module.set_attn_implementation("eager")
    return network.module(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_head_is_normal_with_the_papers_deviation_seeded_and_without_bias(
    family, tmp_path, monkeypatch
):
    source = str(save_tiny(tmp_path / "m", family))
    torch.manual_seed(1)
    first = score_head(with_fresh_head(source, FP32, seed=3).module)
    torch.manual_seed(2)
    again = score_head(with_fresh_head(source, FP32, seed=3).module)
    other = score_head(with_fresh_head(source, FP32, seed=4).module)
    assert getattr(first, "bias", None) is None
    assert first.weight.shape == (1, 16)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    heads = [score_head(with_fresh_head(source, FP32, seed=s).module).weight for s in range(40)]
    numbers = torch.cat(heads).flatten().detach()  # 640 draws
    assert abs(float(numbers.std()) * math.sqrt(17) - 1.0) < 0.12
    assert abs(float(numbers.mean())) * math.sqrt(17) < 0.16


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_head_sits_on_the_policys_own_backbone(family, tmp_path):
    source = str(save_tiny(tmp_path / "m", family))
    policy, reward = load_policy(source, FP32), headed(source)
    theirs = policy.backbone.state_dict()
    for name, weight in reward.backbone.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    assert (reward.mean, reward.std, reward.kind) == (0.0, 1.0, "reward")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [({}, (0.0, 1.0)), ({"mean": 0.5, "std": 2.0}, (0.5, 2.0)), ({"mean": 3}, (3.0, 1.0))],
)
def test_a_reward_model_of_another_tool_has_the_mean_and_std_of_its_config(facts, expected, reward):
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | facts))
    network = reward_of(str(reward))
    assert (network.mean, network.std) == expected


@pytest.mark.parametrize("facts", [{"std": 0.0}, {"std": -1.0}, {"mean": math.nan}, {"std": "1"}])
def test_a_score_that_cannot_be_scaled_is_refused(facts, reward):
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | facts))
    refused(reward_of, reward, "std")
    refused(lambda source: reward_config(source, False), reward, "std")


def test_rlhf_json_wins_over_the_config(reward):
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | {"mean": 9.0, "std": 9.0}))
    facts = Identity("reward", "reward_model", "t", "v", False, (1,), 0, mean=0.5, std=2.0)
    write_identity(reward, facts)
    network = reward_of(str(reward))
    assert (network.mean, network.std) == (0.5, 2.0)


def test_a_run_folder_stands_for_the_model_in_it(policy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(policy, run / "model")
    assert model_folder(str(run)) == run / "model"
    assert model_folder(str(policy)) == policy
    policy_of(str(run))
    assert len(load_tokenizer(str(run))) == 262


def test_loading_keeps_the_dtype_asked_for_whatever_the_file_has(tmp_path):
    source = str(save_tiny(tmp_path / "m", "llama", dtype=torch.bfloat16))
    for dtype in (torch.float32, torch.float64):
        network = load_policy(source, Loading(arithmetic(dtype)))
        assert {p.dtype for _, p in network.parameters()} == {dtype}


def test_positions_are_those_of_the_config(policy):
    assert max_positions(read_model_config(str(policy), False)) == POSITIONS
    assert max_positions(tiny_config("gpt2")) == POSITIONS
    assert max_positions(other_config("bloom")) is None


def test_a_frozen_network_holds_no_gradient_and_evaluates():
    network = tiny_policy("gpt2", dropout=0.1)
    network.module.train()
    frozen = network.freeze()
    assert frozen is network
    assert list(network.parameters()) == []
    assert not network.module.training


def test_the_kind_of_arithmetic_follows_from_two_words(monkeypatch):
    cpu = torch.device("cpu")
    assert precision.choose("cpu", "fp64") == (cpu, torch.float64, None)
    assert precision.choose("cpu", "fp32") == (cpu, torch.float32, None)
    assert precision.choose("cpu", "bf16") == (cpu, torch.float32, torch.bfloat16)
    for fast, compute in ((True, torch.bfloat16), (False, None)):
        monkeypatch.setattr(precision, "fast_bf16", lambda _, fast=fast: fast)
        assert precision.choose("cpu", "auto") == (cpu, torch.float32, compute)


def test_a_device_that_is_not_there_is_a_config_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert precision.choose("auto", "fp32").device.type == "cpu"
    for name in ("cuda", "mps"):
        with pytest.raises(ConfigError, match=name) as caught:
            precision.choose(name, "fp32")
        assert caught.value.where == "device"


def test_each_process_takes_the_gpu_of_its_own_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision.choose("auto", "fp32", local_rank=3).device == torch.device("cuda", 3)


def test_recomputing_activations_is_switched_on_by_its_key(policy):
    plain = load_policy(str(policy), FP32).module
    saving = load_policy(str(policy), Loading(FP32.arithmetic, gradient_checkpointing=True)).module
    assert not plain.is_gradient_checkpointing
    assert saving.is_gradient_checkpointing
