"""Texts far over every limit: read in part, with the ids, the reasons and the cuts of the whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.batch import Example
from stages.data import encode, fit, long_text
from stages.data.fit import Limits
from stages.data.records import Demonstration, Message, Prompt, Response
from stages.data.templates import EncodedPrompt, make_codec
from tests.data.conftest import CORPUS, build_tokenizer

WHOLE = 1 << 40  # characters: nothing is that long, so nothing is read in part


def trained(model, trainer, splitter) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.pre_tokenizer = splitter
    backend.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", unk_token="[UNK]")


def tokenizers_of_every_kind():
    special = {"special_tokens": ["<|end|>", "[UNK]"], "show_progress": False}
    return {
        "byte-level": build_tokenizer(),
        "with a begin token": build_tokenizer(bos=True),
        "word pieces": trained(
            models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=10),
            trainers.WordPieceTrainer(vocab_size=80, **special),
            pre_tokenizers.Whitespace(),
        ),
        "unigram": trained(
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=80, unk_token="[UNK]", **special),
            pre_tokenizers.Metaspace(),
        ),
        "merges without words": trained(
            models.BPE(unk_token="[UNK]", fuse_unk=True),
            trainers.BpeTrainer(vocab_size=120, **special),
            pre_tokenizers.Metaspace(split=False),
        ),
    }


def texts(draw: random.Random) -> list[str]:
    """Words, one word without end, blanks, unknown characters, end tokens at and before the end."""
    words = " ".join(draw.choices(["hello", "world", "the", "cat", "mat", "abab", "ab"], k=500))
    return [
        words,
        "ab" * 700,
        "a" * 1401,
        "cat" + " " * 1400 + "sat",
        "☃" * 1400,
        "hello" + "<|end|>" * 250,
        "ab " * 40 + "<|end|> " + words,
        "hello",
        "",
    ]


def encoded(codec, limits: Limits, text: str) -> list:
    """What a demonstration and a prompt of a text become, and a conversation about it."""
    turns = (Message("user", "hello"), Message("assistant", text), Message("user", "cat " + text))
    prompts = [text, turns] if codec.template else [text]
    found = [
        encode.encode_demonstration(Demonstration(prompt, Response(answer), "f:1"), codec, limits)
        for prompt in prompts
        for answer in ("cat", text or "sat")
    ]
    found += [encode.encode_prompt(Prompt(p, "f:1"), codec, limits, reserve=4) for p in prompts]
    return [_plain(item) for item in found]


def _plain(item):
    if isinstance(item, Example):
        return item.ids.tolist(), item.targets.tolist()
    if isinstance(item, EncodedPrompt):
        return item.ids.tolist(), [tuple(span) for span in item.spans]
    return item


@pytest.mark.parametrize("kind", tokenizers_of_every_kind())
def test_a_long_text_becomes_what_it_would_become_if_all_of_it_were_read(kind, monkeypatch):
    tokenizer = tokenizers_of_every_kind()[kind]
    chat = "chatml" if kind.startswith(("byte", "with")) else None
    codec = make_codec(tokenizer, chat_template=chat, as_messages=False)
    draw = random.Random(1)
    for text in texts(draw):
        for truncate in (False, True):
            for sizes in ((20, 9, 25), (40, None, 30), (None, 30, 12)):
                limits = Limits(*sizes, truncate=truncate)
                monkeypatch.setattr(long_text, "LEAST", WHOLE)
                expected = encoded(codec, limits, text)
                monkeypatch.setattr(long_text, "LEAST", 16)
                monkeypatch.setattr(long_text, "PER_TOKEN", 2)
                monkeypatch.setattr(long_text, "FACTOR", 4)
                assert encoded(codec, limits, text) == expected, (text[:20], limits)


class Counting:
    """Counts the characters that are tokenised."""

    def __init__(self, codec, monkeypatch) -> None:
        self.characters = 0
        real = type(codec)._ids

        def counted(this, text):
            self.characters += len(text)
            return real(this, text)

        monkeypatch.setattr(type(codec), "_ids", counted)


@pytest.mark.parametrize("truncate", [False, True])
def test_a_huge_record_costs_no_more_than_the_limits_could_keep(plain, truncate, monkeypatch):
    huge = "the cat sat on the mat " * 50_000
    limits = Limits(prompt=64, response=64, positions=128, truncate=truncate)
    counting = Counting(plain, monkeypatch)
    answer = encode.encode_demonstration(
        Demonstration("hello", Response(huge), "f:1"), plain, limits
    )
    prompt = encode.encode_prompt(Prompt(huge, "f:1"), plain, limits, reserve=8)
    assert counting.characters < 150_000
    if not truncate:
        assert (answer, prompt) == (fit.ANSWER_OVER, fit.PROMPT_OVER)
    else:
        assert len(answer.targets) == len(prompt.ids) == 64
        assert np.array_equal(prompt.ids[-3:], plain.encode_prompt("on the mat ").ids[-3:])


def test_a_conversation_of_very_many_turns_costs_no_more_either(chat, monkeypatch):
    turns = tuple(
        Message(("user", "assistant")[n % 2], f"the cat sat on mat {n} " * 20) for n in range(2001)
    )
    limits = Limits(prompt=700, truncate=True)
    counting = Counting(chat, monkeypatch)
    found = encode.encode_prompt(Prompt(turns, "f:1"), chat, limits)
    assert counting.characters < 500_000
    longest = max(
        n for n in range(1, 40, 2) if len(chat.encode_prompt(turns[-n:]).ids) <= limits.prompt
    )
    assert np.array_equal(found.ids, chat.encode_prompt(turns[-longest:]).ids)
    assert found.spans == chat.encode_prompt(turns[-longest:]).spans


def test_a_prompt_without_a_limit_of_its_own_is_over_the_positions(plain, monkeypatch):
    """As in ``rlhf sample``, whose prompts may have any length that the model has room for."""
    huge = "the cat sat on the mat " * 20_000
    counting = Counting(plain, monkeypatch)
    limits = Limits(prompt=1 << 30, positions=128)
    assert encode.encode_prompt(Prompt(huge, "f:1"), plain, limits) == fit.POSITIONS_OVER
    assert counting.characters < 100_000
