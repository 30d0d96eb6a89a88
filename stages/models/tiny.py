"""A base model small enough to train from nothing in seconds, for the demo and for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages.seeds import seed_of

VOCABULARY = 524
PAD, END = "<|pad|>", "<|end|>"


def make_base(folder: Path, texts: Iterable[str], *, seed: int = 0) -> None:
    """Write a random Llama of two layers of width 128 with tied embeddings and its own tokenizer.

    Args:
        folder: is made; holds model and tokenizer afterwards.
        texts: what the byte-level BPE learns its merges from, in a fixed order.
        seed: of the weights.
    """
    tokenizer = make_tokenizer(texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=8,
        initializer_range=0.09,  # with 0.02 the model learns to copy from its prompt late or never
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed_of(seed, "base"))
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(
    texts: Iterable[str], *, vocabulary: int = VOCABULARY
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a pad and an end token; the same texts give the same tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=END)
