"""A tiny byte-level tokenizer in several guises, a data section, and an own cache folder."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stages.data.templates import make_codec

CORPUS = ["hello world, the cat sat on the mat", "name three colors of the rainbow", "abab ab"]
SPECIALS = ["<|end|>", "<s>", "<|im_start|>", "<|im_end|>"]


def build_tokenizer(*, bos: bool = False, chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 300 tokens; with ``bos`` it puts <s> in front of a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS if chat else SPECIALS[:2],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", bos_token="<s>" if bos else None
    )


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def plain(tokenizer):
    """A codec without a chat template."""
    return make_codec(tokenizer, chat_template=None, as_messages=False)


@pytest.fixture(scope="session")
def chat(tokenizer):
    """A codec with ChatML."""
    return make_codec(tokenizer, chat_template="chatml", as_messages=False)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("RLHF_CACHE", str(folder))
    return folder


def section(train, **changes) -> SimpleNamespace:
    """The ``data`` section of a config with wide limits."""
    values = {
        "train": train if isinstance(train, list) else str(train),
        "eval": None,
        "format": "auto",
        "columns": None,
        "as_messages": False,
        "chat_template": None,
        "max_prompt_tokens": 512,
        "max_response_tokens": 512,
        "overlong": "drop",
        "max_dropped": 0.5,
        "limit": None,
    }
    return SimpleNamespace(**{**values, **changes})


def write_lines(path, records):
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path
