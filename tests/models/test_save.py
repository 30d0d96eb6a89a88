"""A saved folder is a plain model: the tool and transformers read the same numbers from it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from stages.batch import behind, pack
from stages.errors import CheckpointError
from stages.models.attention import NAME
from stages.models.folder import Identity, read_identity, write_identity
from stages.models.forward import response_logps, scores
from stages.models.load import Loading, load_policy, load_reward, load_tokenizer, with_fresh_head
from stages.models.save import PAD, apply_special_tokens, choose_pad, save_model
from tests.families import FAMILIES, arithmetic, save_tiny, tiny_tokenizer
from tests.models.alone import examples, logps_alone

FP32 = Loading(arithmetic(torch.float32))
each_family = pytest.mark.parametrize("family", FAMILIES)


def identity(kind: str = "policy", **facts) -> Identity:
    """What a stage would say of a model with the tiny tokenizer."""
    values = {
        "stage": "sft",
        "template_hash": "t",
        "vocabulary_hash": "v",
        "as_messages": False,
        "stop_ids": (1,),
        "pad_id": 0,
    }
    return Identity(kind=kind, **{**values, **facts})


def saved(network, folder, tokenizer=None, kind="policy", **options):
    facts = options.pop("facts", {})
    folder.mkdir()
    save_model(network, folder, tokenizer or tiny_tokenizer(), identity(kind, **facts), **options)
    return folder


def stored(folder) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def whole(auto, folder):
    """The folder as transformers loads it: nothing missing, nothing left over."""
    module, info = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return module.eval()


@each_family
def test_a_policy_comes_back_with_the_same_weights_and_log_probabilities(family, tmp_path):
    network = load_policy(str(save_tiny(tmp_path / "base", family)), FP32)
    batch = pack(examples((4, 6), (2, 3)))
    network.module.eval()
    before = response_logps(network, batch).logp
    folder = saved(network, tmp_path / "model")
    again = load_policy(str(folder), FP32)
    again.module.eval()
    for name, weight in network.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], weight), name
    assert torch.equal(response_logps(again, batch).logp, before)
    module = whole(AutoModelForCausalLM, folder)
    for row, example in enumerate(examples((4, 6), (2, 3))):
        theirs = logps_alone(module, example)
        assert torch.allclose(before[row, : len(theirs)], theirs, atol=2e-5)


@each_family
@pytest.mark.parametrize("kind", ["reward", "critic"])
def test_a_score_is_what_the_readme_of_the_folder_computes(family, kind, tmp_path):
    base = save_tiny(tmp_path / "base", family)
    network = with_fresh_head(str(base), FP32, seed=5)
    network.mean, network.std = 0.75, 1.5
    facts = {"mean": 0.75, "std": 1.5}
    folder = saved(network, tmp_path / "rm", kind=kind, facts=facts)
    data = examples((4, 6), (2, 3), (5, 1))
    again = load_reward(str(folder), FP32, kind=kind)
    assert (again.mean, again.std, again.kind) == (0.75, 1.5, kind)
    for n in (network, again):
        n.module.eval()
    ours = scores(network, pack(data))
    weights = again.module.state_dict()
    assert all(torch.equal(weights[k], v) for k, v in network.module.state_dict().items())
    # Products of unaligned weights, as files are mapped, differ in the last bit.
    assert torch.allclose(scores(again, pack(data)), ours, atol=1e-6)
    module = whole(AutoModelForSequenceClassification, folder)
    config = AutoConfig.from_pretrained(folder)
    assert (config.mean, config.std, config.num_labels) == (0.75, 1.5, 1)
    assert config.problem_type == "regression"
    theirs = [
        (module(input_ids=torch.from_numpy(e.ids)[None]).logits[0, 0] - config.mean) / config.std
        for e in data
    ]
    assert torch.allclose(ours, torch.stack(theirs), atol=2e-5)
    card = (folder / "README.md").read_text()
    assert "score = (logits - 0.75) / 1.5" in card
    assert "AutoModelForSequenceClassification" in card


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_tied_embeddings_stay_tied_and_are_written_once(family, dtype, tmp_path):
    network = load_policy(str(save_tiny(tmp_path / "base", family)), FP32)
    folder = saved(network, tmp_path / "model", dtype=dtype)
    assert not {"lm_head.weight", "embed_out.weight"} & stored(folder).keys()
    module = whole(AutoModelForCausalLM, folder)
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


@each_family
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_an_average_of_the_weights_is_saved_in_place_of_them(family, dtype, tmp_path):
    network = load_policy(str(save_tiny(tmp_path / "base", family)), FP32)
    before = {name: p.clone() for name, p in network.parameters()}
    average = {name: p.detach() * 0.5 + 0.25 for name, p in network.parameters()}
    folder = saved(network, tmp_path / "model_ema", weights=average, dtype=dtype)
    module = whole(AutoModelForCausalLM, folder)
    assert dict(module.named_parameters()).keys() == average.keys()
    for name, p in module.named_parameters():
        assert torch.equal(p, average[name].to(dtype or torch.float32).float()), name
    for name, p in network.parameters():
        assert torch.equal(p, before[name])


@each_family
def test_bfloat16_halves_the_file_and_leaves_the_network_in_fp32(family, tmp_path):
    network = load_policy(str(save_tiny(tmp_path / "base", family)), FP32)
    folder = saved(network, tmp_path / "model", dtype=torch.bfloat16)
    assert {w.dtype for w in stored(folder).values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    again = dict(load_policy(str(folder), FP32).parameters())
    for name, p in network.parameters():
        assert p.dtype == again[name].dtype == torch.float32
        assert torch.equal(again[name], p.bfloat16().float())


@each_family
def test_the_saved_config_knows_nothing_of_our_attention(family, tmp_path):
    network = load_policy(str(save_tiny(tmp_path / "base", family)), FP32)
    assert network.module.config._attn_implementation == NAME
    folder = saved(network, tmp_path / "model")
    for path in folder.glob("*.json"):
        assert "rlhf_segments" not in path.read_text(), path.name
    assert {p.name for p in folder.iterdir()} >= {
        "config.json", "generation_config.json", "model.safetensors", "rlhf.json",
        "README.md", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


def test_the_tokenizer_comes_back_with_its_template(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    network = load_policy(str(save_tiny(tmp_path / "base", "llama", tokenizer)), FP32)
    folder = saved(network, tmp_path / "model", tokenizer)
    again = load_tokenizer(str(folder))
    assert again.chat_template == tokenizer.chat_template
    assert again.get_vocab() == tokenizer.get_vocab()
    text = "hello wörld, abab"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


def byte_tokenizer(*specials: str, **named: str) -> PreTrainedTokenizerFast:
    """Bytes and the given special tokens, none of which pads unless it is named so."""
    vocabulary = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    return tokenizer


END = "<|end|>"


def test_pad_case_1_the_tokenizers_own_pad_token_stays():
    tokenizer = byte_tokenizer(END, "<pad>", eos_token=END, pad_token="<pad>")
    choice = choose_pad(tokenizer, 400, (tokenizer.eos_token_id,))
    assert choice.pad_id == tokenizer.convert_tokens_to_ids("<pad>")
    assert "own" in choice.how
    assert len(tokenizer) == 258


@pytest.mark.parametrize("spare", ["<|reserved_special_token_3|>", "<unused7>", "<unk>"])
def test_pad_case_2_an_unused_token_pads_where_the_pad_token_ends_answers(spare):
    tokenizer = byte_tokenizer(END, spare, eos_token=END, pad_token=END)
    choice = choose_pad(tokenizer, 400, (tokenizer.eos_token_id,))
    assert tokenizer.pad_token == spare
    assert choice.pad_id == tokenizer.convert_tokens_to_ids(spare) != tokenizer.eos_token_id
    assert spare in choice.how
    assert len(tokenizer) == 258


@pytest.mark.parametrize(("rows", "where"), [(400, "a spare embedding row"),
                                             (257, "a new embedding row")])  # fmt: skip
def test_pad_cases_3_and_4_a_new_token_pads_in_a_spare_or_a_new_row(rows, where):
    tokenizer = byte_tokenizer(END, eos_token=END, pad_token=END)
    choice = choose_pad(tokenizer, rows, (tokenizer.eos_token_id,))
    assert tokenizer.pad_token == PAD
    assert choice.pad_id == 257
    assert where in choice.how


def test_no_stop_token_pads_though_it_is_reserved_and_no_begin_token_either():
    tokenizer = byte_tokenizer(
        END, "<|reserved_a|>", "<|unused_begin|>", eos_token=END, bos_token="<|unused_begin|>"
    )
    stop = tokenizer.convert_tokens_to_ids("<|reserved_a|>")
    choice = choose_pad(tokenizer, 400, (tokenizer.eos_token_id, stop))
    assert tokenizer.pad_token == PAD
    assert choice.pad_id not in (stop, tokenizer.eos_token_id, tokenizer.bos_token_id)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("spare_rows", [0, 5])
def test_a_new_pad_token_gets_a_row_and_the_models_answers_stay(family, spare_rows, tmp_path):
    tokenizer = byte_tokenizer(END, eos_token=END, pad_token=END)
    base = save_tiny(tmp_path / "base", family, tokenizer, spare_rows=spare_rows)
    network = load_policy(str(base), FP32)
    network.module.eval()
    batch = pack(examples((4, 6)))
    before = response_logps(network, batch).logp
    stops = (tokenizer.eos_token_id,)
    rows = network.module.get_input_embeddings().weight.shape[0]
    choice = choose_pad(tokenizer, rows, stops)
    apply_special_tokens(network.module, tokenizer, choice.pad_id, stops)
    grown = network.module.get_input_embeddings().weight.shape[0]
    assert grown == rows + (0 if spare_rows else 1) > choice.pad_id
    if spare_rows:
        assert torch.equal(response_logps(network, batch).logp, before)
    folder = saved(network, tmp_path / "model", tokenizer, facts={"pad_id": choice.pad_id})
    module = whole(AutoModelForCausalLM, folder)
    assert module.config.vocab_size == grown
    tied = network.module.config.tie_word_embeddings
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == tied
    again = AutoTokenizer.from_pretrained(folder)
    settings = GenerationConfig.from_pretrained(folder)
    assert again.pad_token_id == module.config.pad_token_id == settings.pad_token_id
    assert again.pad_token_id == choice.pad_id
    assert again.eos_token_id == module.config.eos_token_id == settings.eos_token_id == stops[0]
    reward = with_fresh_head(str(folder), FP32, seed=0)
    assert reward.module.config.pad_token_id == choice.pad_id


def test_every_copy_of_a_model_gets_the_same_new_rows(tmp_path):
    tokenizer = byte_tokenizer(END, eos_token=END, pad_token=END)
    base = save_tiny(tmp_path / "base", "llama", tokenizer)
    choice = choose_pad(tokenizer, 257, (256,))
    rows = []
    for seed in (1, 2):
        network = load_policy(str(base), FP32)
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        apply_special_tokens(network.module, tokenizer, choice.pad_id, (256,))
        assert torch.equal(torch.random.get_rng_state(), state)
        rows.append(network.module.get_input_embeddings().weight[257])
    assert torch.equal(*rows)


def test_the_pooled_position_of_transformers_is_the_last_token_of_the_answer(tmp_path):
    """An answer keeps its end token; a padded batch of it is read there by other tools."""
    network = with_fresh_head(str(save_tiny(tmp_path / "base", "llama")), FP32, seed=0)
    folder = saved(network, tmp_path / "rm", kind="reward")
    network.module.eval()
    example = behind(np.array([7, 8, 9]), np.array([10, 11, 1]))
    ours = scores(network, pack([example]))
    module = whole(AutoModelForSequenceClassification, folder)
    padded = torch.tensor([[*example.ids.tolist(), 0, 0, 0]])
    assert torch.allclose(module(input_ids=padded).logits[:, 0], ours, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_invalid_generation_settings_of_the_base_model_are_repaired(family, tmp_path):
    base = save_tiny(tmp_path / "base", family)
    broken = {"do_sample": False, "temperature": 0.3, "top_p": 0.5, "num_beams": 1,
              "repetition_penalty": 2.0, "max_length": 7, "eos_token_id": 1}  # fmt: skip
    (base / "generation_config.json").write_text(json.dumps(broken))
    network = load_policy(str(base), FP32)
    apply_special_tokens(network.module, load_tokenizer(str(base)), 0, (1, 5))
    folder = saved(network, tmp_path / "model", facts={"stop_ids": (1, 5)})
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 5]
    assert settings["pad_token_id"] == 0
    assert not settings.keys() & {"temperature", "top_p", "repetition_penalty", "max_length"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == ([1, 5], 0)
    whole(AutoModelForCausalLM, folder).save_pretrained(tmp_path / "by_others")


def test_what_a_folder_says_of_itself_comes_back(tmp_path):
    facts = identity(
        "reward", stage="reward_model", as_messages=True, stop_ids=(1, 7), pad_id=3,
        mean=-0.25, std=2.0, normalised_on="reference", parent={"path": "runs/sft", "hash": "abc"},
    )  # fmt: skip
    write_identity(tmp_path, facts)
    assert read_identity(tmp_path) == facts
    values = json.loads((tmp_path / "rlhf.json").read_text())
    assert values["stop_ids"] == [1, 7]
    assert values["version"] == 1


def test_a_folder_of_another_tool_says_nothing_of_itself(tmp_path):
    assert read_identity(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"kind": "policy"}', "cannot be read"),
        (None, "layout 99"),
    ],
)
def test_a_broken_or_newer_description_is_refused_with_its_place(text, message, tmp_path):
    write_identity(tmp_path, identity(version=99))
    if text is not None:
        (tmp_path / "rlhf.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_identity(tmp_path)
    assert caught.value.where.endswith("rlhf.json")
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("std", "1"), ("std", None), ("std", 0), ("std", True), ("mean", "x"), ("mean", 10**350),
        ("vocabulary_hash", 5), ("template_hash", None), ("kind", 7), ("kind", "judge"),
        ("kind", []), ("stage", 1), ("as_messages", "no"), ("stop_ids", "x"), ("stop_ids", [-1]),
        ("stop_ids", [1.5]), ("stop_ids", [64]), ("pad_id", 999999), ("pad_id", None),
        ("normalised_on", 3), ("parent", []),
    ],
)  # fmt: skip
def test_a_fact_of_another_type_is_refused_by_name(name, value, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    write_identity(tmp_path, identity("reward"))
    values = json.loads((tmp_path / "rlhf.json").read_text())
    (tmp_path / "rlhf.json").write_text(json.dumps(values | {name: value}))
    with pytest.raises(CheckpointError, match=name) as caught:
        read_identity(tmp_path)
    assert caught.value.where.endswith("rlhf.json")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_description_never_holds_a_number_that_is_no_json(value, tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_identity(tmp_path, identity("reward", mean=value))
