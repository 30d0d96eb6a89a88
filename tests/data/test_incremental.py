"""The text of an answer while its tokens come: no half characters, and in the end all of it."""

from __future__ import annotations

import numpy as np
import pytest

from stages.data.incremental import UNFINISHED, IncrementalText
from stages.data.templates import Codec, make_codec
from tests.families import tiny_tokenizer

TEXTS = ["naïve 日本語", "👩‍🔬 hello", "a\n\tb", "", "\x1b[2J", "é", "hello world, the cat"]


@pytest.fixture(scope="module")
def codec() -> Codec:
    """A token for most bytes."""
    return make_codec(tiny_tokenizer(), chat_template=None, as_messages=False)


def pieces(codec: Codec, ids: list[int]) -> list[str]:
    told = IncrementalText(codec)
    return [*(told.add(token) for token in ids), told.rest()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_make_up_the_text_and_none_is_half_a_character(codec: Codec, text: str) -> None:
    found = pieces(codec, codec.encode_response(text).tolist())
    assert "".join(found) == text
    assert UNFINISHED not in "".join(found)
    assert found[-1] == "", "nothing is held back longer than it must"


def test_a_character_is_told_with_its_last_token(codec: Codec) -> None:
    ids = codec.encode_response("日a", cut=True).tolist()
    assert len(ids) == 4
    assert pieces(codec, ids) == ["", "", "日", "a", ""]


def test_a_character_that_is_never_completed_is_told_at_the_end_as_it_is_decoded(
    codec: Codec,
) -> None:
    ids = codec.encode_response("a日", cut=True).tolist()[:-1]
    assert pieces(codec, ids) == ["a", "", "", codec.decode(ids)[1:]]


def test_any_tokens_whatever_make_up_what_they_decode_to(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        ids = rng.integers(2, 262, 12).tolist()
        assert "".join(pieces(codec, ids)) == codec.decode(ids)
