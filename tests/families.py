"""Tiny random models of the families that tests run on, and folders that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
)

from stages.models.attention import NAME
from stages.models.load import verdict_of
from stages.models.network import Kind, Network
from stages.models.precision import Arithmetic
from stages.models.tiny import make_tokenizer

FAMILIES: tuple[str, ...] = ("llama", "gpt2", "gpt_neox", "qwen3", "mistral", "opt")
"""Rotary with shared keys, learned positions, parallel layers, normed queries, a window, offset."""

WITH_DROPOUT: tuple[str, ...] = ("gpt2", "gpt_neox", "opt")
"""The families whose configuration has a residual dropout."""

WINDOW = 6  # tokens that mistral sees
POSITIONS = 256
TEXTS = ("hello world, the cat sat on the mat", "name three colors of the rainbow", "abab ab")

_WIDE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,  # far enough from uniform that a wrong answer shows
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_SHARED = {**_WIDE, "num_key_value_heads": 2}


def tiny_config(name: str, *, dropout: float = 0.0, vocab: int = 97) -> PreTrainedConfig:
    """Two layers, four heads of width 4 (qwen3: 8); token 0 pads, token 1 ends.

    Args:
        name: one of FAMILIES.
        dropout: of embeddings, residuals and attention, in the families of WITH_DROPOUT.
        vocab: rows of the embedding.
    """
    if dropout and name not in WITH_DROPOUT:
        raise ValueError(f"{name} has no residual dropout")
    return _CONFIGS[name](dropout, vocab)


def _llama(_: float, vocab: int) -> PreTrainedConfig:
    return LlamaConfig(vocab_size=vocab, **_SHARED)


def _qwen3(_: float, vocab: int) -> PreTrainedConfig:
    return Qwen3Config(vocab_size=vocab, head_dim=8, tie_word_embeddings=True, **_SHARED)


def _mistral(_: float, vocab: int) -> PreTrainedConfig:
    return MistralConfig(vocab_size=vocab, sliding_window=WINDOW, **_SHARED)


def _gpt2(dropout: float, vocab: int) -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=vocab,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        initializer_range=0.3,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def _gpt_neox(dropout: float, vocab: int) -> PreTrainedConfig:
    return GPTNeoXConfig(
        vocab_size=vocab,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tie_word_embeddings=False,
        **_WIDE,
    )


def _opt(dropout: float, vocab: int) -> PreTrainedConfig:
    return OPTConfig(
        vocab_size=vocab,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        init_std=0.3,
        dropout=dropout,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


_CONFIGS = {
    "llama": _llama,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "opt": _opt,
}


def random_module(config: PreTrainedConfig, kind: Kind, *, dtype: torch.dtype, seed: int) -> Any:
    """A random transformers model of a configuration, in evaluation mode.

    One seed gives the same weights in every dtype. Biases and norms are moved off their 0 and 1,
    so that one left out is seen.
    """
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    if kind != "policy":
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = auto.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    module.config.dtype = dtype
    return module.to(dtype).eval()


def tiny_policy(
    name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, dropout: float = 0.0
) -> Network:
    """A random policy of a family, laid out as its probe found."""
    return network_of(tiny_config(name, dropout=dropout), "policy", dtype=dtype, seed=seed)


def tiny_reward(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    dropout: float = 0.0,
    kind: Kind = "reward",
    mean: float = 0.0,
    std: float = 1.0,
) -> Network:
    """A random reward model or critic of a family; its score is (head output - mean) / std."""
    network = network_of(tiny_config(name, dropout=dropout), kind, dtype=dtype, seed=seed)
    network.mean, network.std = mean, std
    return network


def network_of(
    config: PreTrainedConfig, kind: Kind, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Network:
    """A random model of any configuration, laid out as its probe found; exact in float64."""
    module = random_module(config, kind, dtype=dtype, seed=seed)
    if dtype == torch.float64:
        _make_norms_exact(module)
    verdict = verdict_of(config)
    if verdict.mode != "padded":
        module.set_attn_implementation(NAME)
    return Network(module, kind, verdict.mode, cached=verdict.cached)


def _make_norms_exact(module: Any) -> None:
    """Root mean square norms that keep float64.

    Those of transformers go through fp32, and gradients then agree to 1e-7 at best.
    """
    for norm in module.modules():
        if hasattr(norm, "variance_epsilon"):
            kind = type(norm)
            norm.__class__ = type(f"Exact{kind.__name__}", (kind,), {"forward": _rms_norm})


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    return norm.weight * hidden * torch.rsqrt(variance + norm.variance_epsilon)


def arithmetic(dtype: torch.dtype = torch.float64) -> Arithmetic:
    """A CPU that stores and computes in one dtype."""
    return Arithmetic(torch.device("cpu"), dtype, None)


def tiny_tokenizer(vocabulary: int = 262) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer: token 0 pads, token 1 ends."""
    return make_tokenizer(TEXTS, vocabulary=vocabulary)


def save_tiny(
    folder: Path,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    kind: Kind = "policy",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    dropout: float = 0.0,
    spare_rows: int = 0,
) -> Path:
    """Write a random model of a family and a tokenizer, as any other tool would.

    Args:
        folder: is made.
        name: one of FAMILIES.
        tokenizer: a tiny byte-level one where none is given.
        kind: a language model, or a sequence classification model with one label.
        dtype: of the weights.
        seed: of the weights.
        dropout: as in ``tiny_config``.
        spare_rows: rows of the embedding beyond the tokenizer's tokens.

    Returns:
        The folder.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    config = tiny_config(name, dropout=dropout, vocab=len(tokenizer) + spare_rows)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    folder.mkdir(parents=True, exist_ok=True)
    random_module(config, kind, dtype=dtype, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
