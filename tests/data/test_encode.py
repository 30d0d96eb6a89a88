"""Targets exact to the token, limits, rankings, margins, documents."""

from __future__ import annotations

import numpy as np
import pytest

from stages.data import encode, fit
from stages.data.fit import Limits
from stages.data.records import Demonstration, Document, Message, Prompt, Ranking, Response
from stages.errors import DataError

END, IM_END = 0, 3
DIALOGUE = (
    Message("user", "hello"),
    Message("assistant", "the cat"),
    Message("user", "colors"),
)


def demonstration(prompt, text, **response):
    return Demonstration(prompt, Response(text, **response), "f.jsonl:1")


def ranking(ranks, scores=None, texts=None, **fields):
    texts = texts or [f"answer {n}" for n in range(len(ranks))]
    scores = scores or [None] * len(ranks)
    rows = zip(texts, ranks, scores, strict=True)
    return Ranking("hello", tuple(Response(t, r, s) for t, r, s in rows), "f.jsonl:1", **fields)


def target_text(codec, example):
    return codec.decode(example.ids[example.targets], special=True)


def test_targets_are_the_answer_and_its_end_token_and_nothing_else(plain):
    example = encode.encode_demonstration(demonstration("h", "e mat"), plain, Limits())
    assert target_text(plain, example) == "e mat<|end|>"
    assert list(example.targets) == list(range(len(example.ids)))[-len(example.targets) :]


def test_an_end_token_equal_to_the_padding_token_keeps_its_loss(tokenizer, plain):
    tokenizer.pad_token = tokenizer.eos_token
    try:
        example = encode.encode_demonstration(demonstration("hello", "cat"), plain, Limits())
    finally:
        tokenizer.pad_token = None
    assert example.ids[example.targets[-1]] == END


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("last", "rainbow<|im_end|>"),
        ("assistant", "the cat<|im_end|>rainbow<|im_end|>"),
    ],
)
def test_earlier_answers_carry_loss_as_train_on_says(chat, train_on, expected):
    record = demonstration(DIALOGUE, "rainbow")
    example = encode.encode_demonstration(record, chat, Limits(), train_on=train_on)
    assert target_text(chat, example) == expected


@pytest.mark.parametrize("prompt", ["hello", DIALOGUE])
def test_train_on_all_takes_every_token_but_the_first(chat, prompt):
    example = encode.encode_demonstration(
        demonstration(prompt, "rainbow"), chat, Limits(), train_on="all"
    )
    assert list(example.targets) == list(range(1, len(example.ids)))


def test_the_first_token_of_a_sequence_is_never_a_target(plain):
    example = encode.encode_demonstration(demonstration("", "the cat"), plain, Limits())
    assert list(example.targets) == list(range(1, len(example.ids)))


def test_train_on_does_not_change_the_ids(chat):
    record = demonstration(DIALOGUE, "rainbow")
    ids = [
        list(encode.encode_demonstration(record, chat, Limits(), train_on=name).ids)
        for name in ("assistant", "last", "all")
    ]
    rollout = chat.encode_prompt(DIALOGUE).ids
    assert ids[0] == ids[1] == ids[2]
    assert ids[0][: len(rollout)] == list(rollout)


def test_a_cut_answer_gets_no_end_token(plain):
    record = demonstration("hello", "the cat", flags=("cut",))
    example = encode.encode_demonstration(record, plain, Limits())
    assert END not in example.ids


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(prompt=2), fit.PROMPT_OVER),
        (Limits(response=2), fit.ANSWER_OVER),
        (Limits(positions=8), fit.POSITIONS_OVER),
    ],
)
def test_what_is_over_a_limit_is_dropped_by_its_reason(plain, limits, reason):
    record = demonstration("xyzxyz", "zyxzyx")
    assert encode.encode_demonstration(record, plain, limits) == reason


def test_a_record_exactly_at_its_limits_is_kept(plain):
    limits = Limits(prompt=6, response=7, positions=13)
    example = encode.encode_demonstration(demonstration("xyzxyz", "zyxzyx"), plain, limits)
    assert len(example.ids) == 13


def test_truncation_takes_prompt_tokens_from_the_left_and_the_end_token_of_a_cut_answer(plain):
    limits = Limits(prompt=2, response=3, truncate=True)
    example = encode.encode_demonstration(demonstration("xyzxyz", "zyxzyx"), plain, limits)
    assert plain.decode(example.ids, special=True) == "yzzyx"
    assert target_text(plain, example) == "zyx"


def test_truncation_to_the_positions_shortens_the_prompt_first(plain):
    limits = Limits(positions=9, truncate=True)
    example = encode.encode_demonstration(demonstration("xyzxyz", "zyxzyx"), plain, limits)
    assert plain.decode(example.ids, special=True) == "yzzyxzyx<|end|>"


def test_truncation_keeps_the_begin_token():
    from stages.data.templates import make_codec
    from tests.data.conftest import build_tokenizer

    codec = make_codec(build_tokenizer(bos=True), chat_template=None, as_messages=False)
    limits = Limits(prompt=3, truncate=True)
    fitted = encode.encode_prompt(Prompt("xyzxyz", "f:1"), codec, limits)
    assert codec.decode(fitted.ids, special=True) == "<s>yz"


def test_truncation_drops_the_oldest_turns_and_keeps_the_system_turn(chat):
    turns = (Message("system", "be kind"), *DIALOGUE)
    shorter = (Message("system", "be kind"), DIALOGUE[-1])
    limits = Limits(prompt=len(chat.encode_prompt(shorter).ids) + 1, truncate=True)
    fitted = encode.encode_prompt(Prompt(turns, "f:1"), chat, limits)
    assert list(fitted.ids) == list(chat.encode_prompt(shorter).ids)


def test_spans_move_with_a_prompt_that_is_cut_inside_its_last_turns(chat):
    whole = chat.encode_prompt(DIALOGUE)
    cut = fit.last_ids(whole, len(whole.ids) - 3, ())
    (before,), (after,) = whole.spans, cut.spans
    assert list(cut.ids[after.start : after.stop]) == list(whole.ids[before.start : before.stop])


def test_a_prompt_leaves_room_for_its_answer(plain):
    record = Prompt("xyzxyz", "f:1")
    limits = Limits(positions=10)
    assert len(encode.encode_prompt(record, plain, limits, reserve=4).ids) == 6
    assert encode.encode_prompt(record, plain, limits, reserve=5) == fit.POSITIONS_OVER


def test_a_prompt_without_any_token_is_dropped(plain):
    assert encode.encode_prompt(Prompt("", "f:1"), plain, Limits()) == encode.EMPTY_PROMPT


def test_an_empty_answer_is_no_demonstration(plain):
    record = demonstration("hello", " \n")
    assert encode.encode_demonstration(record, plain, Limits()) == encode.EMPTY_ANSWER


def test_answers_without_rank_are_no_part_of_k(plain):
    group = encode.encode_ranking(ranking([2, None, 1, 2]), plain, Limits())
    assert group.ranks == (2, 1, 2)
    assert [plain.decode(ids) for ids in group.answers] == ["answer 0", "answer 2", "answer 3"]
    assert all(ids[-1] == END for ids in group.answers)
    assert plain.decode(group.prompt) == "hello"


def test_scores_rank_where_no_answer_has_a_rank(plain):
    group = encode.encode_ranking(
        ranking([None] * 4, [0.5, 2.0, None, 0.5], ["a", "b", "c", "d"]), plain, Limits()
    )
    assert group.ranks == (2, 1, 2)


def test_ranks_win_over_scores(plain):
    group = encode.encode_ranking(ranking([1, 2], [0.0, 9.0]), plain, Limits())
    assert group.ranks == (1, 2)


@pytest.mark.parametrize(
    ("ranks", "ties", "reason"),
    [
        ([1], "drop", encode.UNRANKED),
        ([1, None], "half", encode.UNRANKED),
        ([None, None], "drop", encode.UNRANKED),
        ([1, 1], "drop", encode.NO_STRICT_PAIR),
    ],
)
def test_rankings_without_a_pair_are_dropped_by_their_reason(plain, ranks, ties, reason):
    assert encode.encode_ranking(ranking(ranks), plain, Limits(), ties=ties) == reason


def test_a_tie_counts_half_where_the_config_says_so(plain):
    assert encode.encode_ranking(ranking([1, 1]), plain, Limits(), ties="half").ranks == (1, 1)


def test_one_answer_over_the_limit_drops_the_whole_ranking(plain):
    record = ranking([1, 2], texts=["z", "zyxzyx"])
    assert encode.encode_ranking(record, plain, Limits(response=3)) == fit.ANSWER_OVER


@pytest.mark.parametrize(
    ("margin", "expected"),
    [
        (0.0, None),
        (0.5, [[0, 0.5, 0.5], [0, 0, 0], [0, 0, 0]]),
        ({"per_rank": 0.25}, [[0, 0.5, 0.5], [0, 0, 0], [0, 0, 0]]),
        ("data", [[0, 2.0, 3.0], [0, 0, 0], [0, 0, 0]]),
    ],
)
def test_margins_stand_at_preferred_and_other(plain, margin, expected):
    record = ranking([1, 3, 3], [4.0, 2.0, 1.0])
    group = encode.encode_ranking(record, plain, Limits(), margin=margin)
    if expected is None:
        assert group.margins is None
    else:
        np.testing.assert_allclose(group.margins, expected)


def test_the_margin_of_a_pair_comes_from_its_line(plain):
    record = ranking([2, 1], margin=1.5)
    group = encode.encode_ranking(record, plain, Limits(), margin="data")
    np.testing.assert_allclose(group.margins, [[0, 0], [1.5, 0]])


def test_a_margin_that_the_data_do_not_give_is_an_error(plain):
    with pytest.raises(DataError) as caught:
        encode.encode_ranking(ranking([1, 2]), plain, Limits(), margin="data")
    assert caught.value.where == "f.jsonl:1"


def test_sampled_ids_are_used_where_the_vocabulary_matches(plain):
    odd = (5, 6, END)  # not what the text would encode to
    same = Response("cat", 1, ids=odd, vocabulary=plain.vocabulary_hash)
    other = Response("cat", 2, ids=odd, vocabulary="another")
    group = encode.encode_ranking(Ranking("hello", (same, other), "f:1"), plain, Limits())
    assert tuple(group.answers[0]) == odd
    assert list(group.answers[1]) == list(plain.encode_response("cat"))


def test_sampled_ids_that_were_cut_get_no_end_token_and_others_get_one(plain):
    own = plain.vocabulary_hash
    cut = Response("cat", 1, ids=(5, 6), vocabulary=own, flags=("cut",))
    bare = Response("cat", 2, ids=(5, 6), vocabulary=own)
    group = encode.encode_ranking(Ranking("hello", (cut, bare), "f:1"), plain, Limits())
    assert [tuple(ids) for ids in group.answers] == [(5, 6), (5, 6, END)]


def test_a_document_is_cut_into_pieces_whose_first_tokens_are_no_targets(plain):
    pieces = encode.encode_document(Document("xyzxyzx", "f:1"), plain, 3)
    assert [plain.decode(p.ids, special=True) for p in pieces] == ["xyz", "xyz", "x<|end|>"]
    assert [list(p.targets) for p in pieces] == [[1, 2], [1, 2], [1]]


def test_the_best_answer_is_the_first_of_the_best_ranked():
    assert encode.best_response(ranking([2, 1, 1])).text == "answer 1"
    assert encode.best_response(ranking([None, None])) is None
    assert encode.best_response(ranking([None])).text == "answer 0"
