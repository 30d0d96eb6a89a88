"""A reward model of another tokenizer reads the text as its own training did, or says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from stages.data.chat_template import CHATML
from stages.data.records import Message
from stages.data.templates import make_codec
from stages.errors import ConfigError
from stages.models.load import Loading, load_reward
from stages.models.precision import choose
from stages.models.probe import reads_last_token
from stages.runtime.rewards.model import (
    NO_TEXT,
    TOO_LONG,
    UNKNOWN,
    Reader,
    opened,
    require_readable,
)
from stages.runtime.rewards.texts import Absent, Answer
from stages.runtime.start import own_codec
from tests.families import FAMILIES, POSITIONS, save_tiny, tiny_config
from tests.runtime.asked import answer
from tests.stages.project import TOKENIZER, ids_of
from tests.stages.results import classifier, raw_score


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model of letters."""
    path = tmp_path_factory.mktemp("judge")
    save_tiny(path, "llama", TOKENIZER, kind="reward", dtype=torch.float64)
    return str(path)


@pytest.fixture(scope="module")
def reader(folder: str) -> Reader:
    network = load_reward(folder, Loading(choose("cpu", "fp64"))).freeze()
    return Reader(network, own_codec(folder), 40)


def alone(folder: str, ids: list[int]) -> float:
    return raw_score(classifier(folder), ids)


def test_each_answer_scores_as_alone_whatever_stands_beside_it(folder: str, reader: Reader) -> None:
    cut = answer("dcba", "b:")._replace(cut=True)
    asked = [answer("cd", "ab:"), cut, answer("", "cab:")]
    expected = [
        alone(folder, ids_of("ab:cd", end=True)),
        alone(folder, ids_of("b:dcba")),
        alone(folder, ids_of("cab:", end=True)),
    ]
    assert reader(asked) == pytest.approx(expected, rel=1e-9)
    assert reader(asked[1:] + asked[:1]) == pytest.approx(expected[1:] + expected[:1], rel=1e-9)
    assert reader([]) == []


def test_ids_of_its_own_vocabulary_go_before_the_text(folder: str, reader: Reader) -> None:
    ids = (*ids_of("ab"), 3, 1)  # a token that the text does not show
    given = answer("ab", "b:")._replace(ids=ids, vocabulary=reader.codec.vocabulary_hash)
    other = given._replace(vocabulary="of another model")
    assert reader([given, other]) == pytest.approx(
        [alone(folder, ids_of("b:") + list(ids)), alone(folder, ids_of("b:ab", end=True))],
        rel=1e-9,
    )


def test_of_a_text_that_is_too_long_the_oldest_part_of_the_prompt_goes(
    folder: str, reader: Reader
) -> None:
    prompt = "abcde" * 60
    (found,) = reader([answer("xyz", prompt)])
    room = POSITIONS - 4
    assert found == pytest.approx(
        alone(folder, ids_of(prompt)[-room:] + ids_of("xyz", end=True)), rel=1e-9
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (answer("x" * POSITIONS), TOO_LONG),
        (answer("ab")._replace(whole=False), NO_TEXT),
        (answer("ΔΩ"), UNKNOWN),
    ],
)
def test_a_text_that_cannot_be_read_has_no_judgement(
    asked: Answer, why: str, reader: Reader
) -> None:
    found = reader([answer("ab", "b:"), asked])
    assert isinstance(found[0], float)
    assert found[1] == Absent(why)


def test_messages_are_read_in_the_template_of_the_model(
    folder: str, reader: Reader, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(CHATML)
    codec = make_codec(
        AutoTokenizer.from_pretrained(folder), chat_template=str(template), as_messages=True
    )
    own = Reader(reader.network, codec, 100)
    turns = [{"role": "user", "content": "ab"}]
    text = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>"
    assert own([answer("cd", turns)]) == pytest.approx([alone(folder, ids_of(text))], rel=1e-9)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["ΔΩ", "ΨΦ"], "knows none of the text"),
        (["ab", (Message("user", "ab"),)], "has no chat template"),
    ],
)
def test_prompts_that_it_cannot_read_are_refused_at_start(
    prompts: Any, words: str, folder: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        require_readable(own_codec(folder), iter(prompts), folder, "reward.1")
    assert caught.value.where == f"reward.1.path: {folder}"


def test_one_prompt_that_it_knows_a_word_of_is_enough(folder: str) -> None:
    require_readable(own_codec(folder), iter(["ΔΩ", "Δb"]), folder, "reward")


# Encoders, which read prompt and answer as a whole.


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT with 40 positions and one label."""
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        num_labels=1,
        initializer_range=0.3,
        mean=0.5,
        std=2.0,
    )
    BertForSequenceClassification(config).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


def of_pair(folder: str, prompt: str, text: str) -> float:
    module = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        pair = AutoTokenizer.from_pretrained(folder)(prompt, text, return_tensors="pt")
        return (float(module(**pair).logits) - 0.5) / 2.0


def test_an_encoder_scores_pairs_of_texts_as_transformers_does(encoder: str) -> None:
    read = opened(encoder, Loading(choose("cpu", "fp32")), 50)
    turns = [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}]
    asked = [answer("cd", "ab:"), answer("e", "a b c d:"), answer("fg", turns), answer("x" * 41)]
    found = read(asked)
    assert found[:3] == pytest.approx(
        [
            of_pair(encoder, "ab:", "cd"),
            of_pair(encoder, "a b c d:", "e"),
            of_pair(encoder, "ab\n\ncd", "fg"),
        ],
        rel=2e-5,
    )
    assert found[3] == Absent(TOO_LONG)
    assert read([]) == []


def test_an_encoder_loses_the_oldest_part_of_a_long_prompt(encoder: str) -> None:
    read = opened(encoder, Loading(choose("cpu", "fp32")), 100)
    prompt = "abcdefghij" * 5
    assert read([answer("xyz", prompt)]) == pytest.approx(
        [of_pair(encoder, prompt[-37:], "xyz")], rel=2e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_reads_its_score_at_the_last_token_is_known_by_trying(family: str) -> None:
    assert reads_last_token(tiny_config(family))
    assert not reads_last_token(BertConfig(num_labels=1))
