"""The traps of the public data sets, and the variants in which their files are found."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.data import files, formats
from stages.data.encode import NO_STRICT_PAIR, encode_ranking, ranked_responses
from stages.data.fit import Limits
from stages.data.formats.pairs import DIFFER
from stages.data.records import Demonstration, Message, Prompt, Ranking, Response, Row, Useless
from stages.errors import DataError


def read(*rows, name="auto", as_messages=False):
    places = (Row(row, f"f:{n}") for n, row in enumerate(rows, start=1))
    entry, records = formats.convert(places, name, as_messages)
    return entry.name, list(records)


def read_file(path):
    entry, records = formats.convert(files.rows(str(path)), "auto", False)
    return entry.name, list(records)


def turn(role, content):
    return {"role": role, "content": content}


def order(record):
    """The answers and their ranks, as a reward model learns them."""
    return [(response.text, rank) for response, rank in ranked_responses(record)]


HI = (Message("user", "hi"),)
HELLO = turn("user", "hi")
HH = "\n\nHuman: hi\n\nAssistant:"


# OpenAssistant.


def message(name, parent, role, text, **fields):
    return {"message_id": name, "parent_id": parent, "role": role, "text": text, **fields}


FLAT = [
    message("r", None, "prompter", "hi", rank=None, deleted=False, lang="en"),
    message("a", "r", "assistant", "good", rank=0, deleted=False, lang="en"),
    message("b", "r", "assistant", "bad", rank=1, deleted=False, lang="en"),
    message("c", "r", "assistant", "gone", rank=2, deleted=True, lang="en"),
    message("d", "r", "assistant", "unranked", rank=None, deleted=False, lang="en"),
]


def test_oasst_rank_0_is_the_best_answer():
    replies = [{"role": "assistant", "text": t, "rank": n} for t, n in (("bad", 1), ("good", 0))]
    name, (record,) = read({"prompt": {"role": "prompter", "text": "hi", "replies": replies}})
    assert name == "oasst"
    assert order(record) == [("bad", 2), ("good", 1)]


def test_flat_oasst_messages_are_joined_whatever_their_order():
    name, (record,) = read(*reversed(FLAT))
    assert name == "oasst_flat"
    assert record.prompt == HI
    assert sorted(order(record)) == [("bad", 2), ("good", 1)]
    assert {r.text for r in record.responses} == {"good", "bad", "unranked"}


def test_flat_oasst_messages_from_parquet_have_float_ranks(tmp_path):
    rows = [row | {"rank": None if row["rank"] is None else float(row["rank"])} for row in FLAT]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    name, (record,) = read_file(tmp_path / "f.parquet")
    assert (name, order(record)) == ("oasst_flat", [("good", 1), ("bad", 2)])


def test_flat_oasst_messages_from_a_table_are_read_by_their_meaning(tmp_path):
    with open(tmp_path / "f.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FLAT[0])
        writer.writeheader()
        writer.writerows(FLAT)  # None becomes an empty cell, False the word
    name, (record,) = read_file(tmp_path / "f.csv")
    assert (name, order(record)) == ("oasst_flat", [("good", 1), ("bad", 2)])


def test_flat_oasst_replies_without_their_parent_are_counted():
    _, records = read(*FLAT, message("x", "lost", "assistant", "text"))
    assert records[1:] == [Useless("the message that these reply to is missing", "f:6")]


# Nectar, UltraFeedback, distilabel.


def test_nectar_ranks_are_floats_and_its_prompt_a_dialogue():
    answers = [
        {"answer": "bad", "model": "m", "rank": 2.0},
        {"answer": "good", "model": "n", "rank": 1.0},
        {"answer": "bad too", "model": "o", "rank": 2.0},
    ]
    row = {"prompt": HH, "answers": answers, "turns": 1, "num_responses": 3, "source": ["x"]}
    name, (record,) = read(row)
    assert (name, record.prompt) == ("nectar", HH)
    assert order(record) == [("bad", 2), ("good", 1), ("bad too", 2)]
    assert [r.model for r in record.responses] == ["m", "n", "o"]
    assert read(row, as_messages=True)[1][0].prompt == HI


def ultra(*completions):
    return {"source": "flan", "instruction": "hi", "models": [], "completions": list(completions)}


def test_ultrafeedback_ratings_may_be_not_available():
    rated = {"helpfulness": {"Rating": "4"}, "honesty": {"Rating": "N/A"}}
    nothing = {"helpfulness": {"Rating": "N/A"}}
    _, (record,) = read(
        ultra(
            {"response": "a", "annotations": rated, "overall_score": 1},
            {"response": "b", "annotations": {"helpfulness": {"Rating": 5}}},
            {"response": "c", "annotations": nothing},
        )
    )
    assert [r.score for r in record.responses] == [4.0, 5.0, None]
    assert order(record) == [("a", 2), ("b", 1)]
    assert record.source == "flan"


def test_ultrafeedback_rows_whose_overall_score_was_10_for_1_are_ordered_by_their_ratings():
    low = {aspect: {"Rating": "1"} for aspect in ("helpfulness", "honesty")}
    high = {aspect: {"Rating": "5"} for aspect in ("helpfulness", "honesty")}
    _, (record,) = read(
        ultra(
            {"response": "bad", "annotations": low, "overall_score": 10.0},
            {"response": "good", "annotations": high, "overall_score": 8.5},
        )
    )
    assert order(record) == [("bad", 2), ("good", 1)]


def test_ultrafeedback_rescored_rows_may_have_lists_of_judgements_or_only_an_overall_score():
    _, (record,) = read(
        ultra(
            {"response": "a", "annotations": {"honesty": [{"Rating": "3"}]}},
            {"response": "b", "annotations": {}, "overall_score": "2.5"},
            {"response": "c", "annotations": None, "overall_score": "N/A"},
        )
    )
    assert [r.score for r in record.responses] == [3.0, 2.5, None]


def test_distilabel_lists_stand_side_by_side_with_nulls_where_a_step_failed():
    row = {"instruction": "hi", "generations": ["a", None, "c"], "ratings": [1.0, None, 5.0]}
    name, (record,) = read(row, row | {"ratings": None})[0], read(row)[1]
    assert name == "distilabel"
    assert order(record) == [("a", 2), ("c", 1)]
    _, (_, unrated) = read(row, row | {"ratings": None})
    assert order(unrated) == []
    with pytest.raises(DataError, match="2 ratings for 3 generations") as caught:
        read(row | {"ratings": [1, 2]})
    assert caught.value.where == "f:1:ratings"


def test_distilabel_pairs_with_their_generations_keep_the_system_text():
    row = {
        "system": "be kind",
        "input": "hi",
        "generations": ["a", "b"],
        "rating": [4.0, 4.0],
        "chosen": "a",
        "rejected": "b",
    }
    name, (record,) = read(row)
    assert name == "distilabel"
    assert record.prompt == (Message("system", "be kind"), *HI)
    assert order(record) == [("a", 1), ("b", 1)]


# Votes.


def test_hh_transcripts_whose_prompts_differ_are_dropped():
    other = "\n\nHuman: ho\n\nAssistant:"
    name, (record,) = read({"chosen": HH + " a", "rejected": other + " b"})
    assert (name, record) == ("hh", Useless(DIFFER, "f:1"))


def test_hh_in_two_columns_is_read_as_the_dialogue_it_is():
    row = {"prompt": HH, "response": " a", "chosen": " a", "rejected": " b"}
    name, (record,) = read(row)
    assert (name, record.prompt) == ("pairs", HH)
    assert order(record) == [(" a", 1), (" b", 2)]
    _, (record,) = read(row, as_messages=True)
    assert (record.prompt, order(record)) == (HI, [("a", 1), ("b", 2)])


@pytest.mark.parametrize("winner", ["tie", "tie (bothbad)", "both_bad"])
def test_arena_ties_are_ties(winner, chat):
    row = {
        "conversation_a": [turn("user", "hi"), turn("assistant", "a")],
        "conversation_b": [turn("user", "hi"), turn("assistant", "b")],
        "winner": winner,
    }
    name, (record,) = read(row)
    assert (name, order(record)) == ("arena", [("a", 1), ("b", 1)])
    assert encode_ranking(record, chat, Limits(), ties="half").ranks == (1, 1)


def test_the_arena_table_has_lists_as_text_and_a_column_per_outcome(tmp_path):
    text = (
        "id,model_a,model_b,prompt,response_a,response_b,"
        "winner_model_a,winner_model_b,winner_tie\n"
        '1,m,n,"[""hi""]","[""a""]","[""b""]",0,1,0\n'
        '2,m,n,"[""hi""]","[""a""]","[""b""]",0,0,1\n'
        '3,m,n,"[""hi""]","[null]","[""b""]",0,1,0\n'
        '4,m,n,"[""hi"",""more""]","[""a"",""c""]","[""b"",""d""]",1,0,0\n'
    )
    (tmp_path / "f.csv").write_text(text, encoding="utf-8")
    name, records = read_file(tmp_path / "f.csv")
    assert name == "arena"
    assert [order(record) for record in records[:2]] == [
        [("a", 2), ("b", 1)],
        [("a", 1), ("b", 1)],
    ]
    assert [record.reason for record in records[2:]] == ["an answer is missing", DIFFER]
    assert [r.model for r in records[0].responses] == ["m", "n"]


def shp(post, a, b, label, scores=(None, None)):
    names = ("post_id", "history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B")
    return dict(zip(names, (post, f"post {post}", a, b, label, *scores), strict=True))


def test_shp_rows_are_merged_by_post_even_where_other_posts_stand_between():
    name, records = read(
        shp("x", "best", "good", 1, (9, 5)),
        shp("y", "bad", "good", 0, (1, 2)),
        shp("x", "bad", "best", 0, (2, 9)),
    )
    assert name == "shp"
    assert [(r.id, r.prompt, r.origin) for r in records] == [
        ("x", "post x", "f:1"),
        ("y", "post y", "f:2"),
    ]
    assert order(records[0]) == [("best", 1), ("good", 2), ("bad", 3)]
    assert order(records[1]) == [("bad", 2), ("good", 1)]


def test_shp_rows_without_votes_stay_pairs_and_those_whose_label_contradicts_them_go():
    _, records = read(shp("x", "a", "b", 1), shp("x", "c", "d", 0), shp("x", "e", "f", 0, (9, 5)))
    assert [order(record) for record in records[:2]] == [
        [("a", 1), ("b", 2)],
        [("c", 2), ("d", 1)],
    ]
    assert records[2] == Useless("the label contradicts the votes", "f:3")


def test_webgpt_ties_have_equal_scores(plain):
    row = {
        "question": {"dataset": "eli5", "id": "1", "full_text": "hi"},
        "quotes_0": {"title": [], "extract": []},
        "answer_0": "a",
        "answer_1": "b",
        "score_0": 0.0,
        "score_1": 0.0,
    }
    name, (record,) = read(row)
    assert (name, record.prompt) == ("webgpt", "hi")
    assert order(record) == [("a", 1), ("b", 1)]
    assert encode_ranking(record, plain, Limits()) == NO_STRICT_PAIR
    assert encode_ranking(record, plain, Limits(), ties="half").ranks == (1, 1)


@pytest.mark.parametrize(("choice", "ranks"), [(0, [1, 2]), (1, [2, 1])])
def test_summarize_from_feedback_prefers_the_summary_that_choice_counts_from_0(choice, ranks):
    row = {
        "info": {"id": "t", "post": "p", "title": "t", "subreddit": "tifu", "article": None},
        "summaries": [{"text": " b", "policy": "ref"}, {"text": " c", "policy": "sup1"}],
        "choice": choice,
        "worker": "w",
        "extra": {"confidence": 1},
    }
    name, (record,) = read(row)
    assert name == "summarize_from_feedback"
    assert record == Ranking(
        "SUBREDDIT: r/tifu\n\nTITLE: t\n\nPOST: p\n\nTL;DR:",
        (Response(" b", ranks[0], model="ref"), Response(" c", ranks[1], model="sup1")),
        "f:1",
        labeler="w",
    )


@pytest.mark.parametrize("choice", [2, -1, True, None, "1"])
def test_a_choice_that_is_neither_0_nor_1_is_refused(choice):
    row = {"info": {"post": "p"}, "summaries": [{"text": "b"}, {"text": "c"}], "choice": choice}
    with pytest.raises(DataError, match="must be 0 or 1") as caught:
        read(row)
    assert caught.value.where == "f:1:choice"


# Pairs.


def test_h4_pairs_repeat_the_prompt_as_the_first_turn_of_both_answers():
    row = {
        "prompt": "hi",
        "prompt_id": "1",
        "chosen": [turn("user", "hi"), turn("assistant", "a")],
        "rejected": [turn("user", "hi"), turn("assistant", "b")],
        "messages": [turn("user", "hi"), turn("assistant", "a")],
        "score_chosen": 8.5,
        "score_rejected": 7.0,
    }
    name, (record,) = read(row)
    assert name == "pairs"
    assert record == Ranking(HI, (Response("a", 1, 8.5), Response("b", 2, 7.0)), "f:1")


def test_a_system_turn_may_stand_in_the_prompt_column_alone():
    prompt = [turn("system", "be kind"), turn("user", "hi")]
    chosen, rejected = ([turn("user", "hi"), turn("assistant", text)] for text in "ab")
    _, (record,) = read({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert record.prompt == (Message("system", "be kind"), *HI)


@pytest.mark.parametrize("asked", ["prompt", "question", "instruction", "input"])
def test_the_prompt_of_a_pair_may_have_other_names(asked):
    name, (record,) = read({asked: "hi", "chosen": "an a", "rejected": "an e"})
    assert (name, record.prompt) == ("pairs", "hi")
    assert order(record) == [("an a", 1), ("an e", 2)]


def test_orca_pairs_have_a_system_text_beside_the_question():
    row = {"system": "", "question": "hi", "chosen": "a", "rejected": "b"}
    name, records = read(row, row | {"system": "be kind"})
    assert name == "pairs"
    assert [record.prompt for record in records] == [HI, (Message("system", "be kind"), *HI)]


def test_llama_factory_pairs_are_read_in_both_of_its_forms():
    alpaca = {"instruction": "hi", "input": "you", "chosen": "a", "rejected": "b"}
    assert read(alpaca)[1][0].prompt == "hi\n\nyou"
    sharegpt = {
        "conversations": [{"from": "human", "value": "hi"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    name, (record,) = read(sharegpt)
    assert (name, record.prompt, order(record)) == ("pairs", HI, [("a", 1), ("b", 2)])


def test_a_long_prompt_that_both_answers_repeat_stands_once():
    prompt = "What is the capital of the country that borders Spain in the west?"
    _, (record,) = read(
        {"prompt": prompt, "chosen": prompt + " Lisbon", "rejected": prompt + " Oz"}
    )
    assert (record.prompt, order(record)) == (prompt, [(" Lisbon", 1), (" Oz", 2)])
    _, (short,) = read({"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi!"})
    assert order(short) == [("Hi there", 1), ("Hi!", 2)]


def test_scores_of_pairs_are_known_under_their_usual_names():
    for names in ("{}_score", "{}-rating", "{}_rating"):
        row = {"prompt": "hi", "chosen": "a", "rejected": "b"}
        row |= {names.format("chosen"): 5, names.format("rejected"): 2.5}
        _, (record,) = read(row)
        assert [r.score for r in record.responses] == [5.0, 2.5], names
        _, (record,) = read(row | {names.format("chosen"): 10**400})
        assert [r.score for r in record.responses] == [None, 2.5], names


# Demonstrations.


@pytest.mark.parametrize(
    ("row", "name", "prompt"),
    [
        ({"conversation": [turn("user", "hi"), turn("assistant", "a")]}, "messages", HI),
        (
            {
                "prompt": "hi",
                "prompt_id": "1",
                "messages": [turn("user", "hi"), turn("assistant", "a")],
            },
            "messages",
            HI,
        ),
        (
            {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"}]},
            "messages",
            HI,
        ),
        ({"conversations": [turn("User", "hi"), turn("model", "a")]}, "sharegpt", HI),
        (
            {
                "messages": [
                    turn("developer", "be kind"),
                    turn("user", "hi"),
                    turn("assistant", "a"),
                ]
            },
            "messages",
            (Message("system", "be kind"), *HI),
        ),
        ({"prompt": turn("user", "hi"), "response": "a"}, "canonical", HI),
        (
            {"prompt": json.dumps([turn("user", "hi")]), "response": "a"},
            "canonical",
            HI,
        ),
        (
            {"messages": json.dumps([turn("user", "hi"), turn("assistant", "a")])},
            "messages",
            HI,
        ),
        ({"input": "hi", "output": "a"}, "prompt_completion", "hi"),
        (
            {"input": [turn("user", "hi")], "output": [turn("assistant", "a")]},
            "prompt_completion",
            HI,
        ),
        ({"instruction": "hi", "input": None, "output": "a", "text": "x"}, "alpaca", "hi"),
        ({"instruction": "hi", "output": "a", "system": "", "history": []}, "alpaca", HI),
        (
            {"instruction": "hi", "output": "a", "history": [["q", "r"]], "system": "be kind"},
            "alpaca",
            (Message("system", "be kind"), Message("user", "q"), Message("assistant", "r"), *HI),
        ),
        (
            {"prompt": "[1, 2] is a list. And", "response": "a"},
            "canonical",
            "[1, 2] is a list. And",
        ),
        ({"prompt": "hi", "response": "a", "responses": None}, "canonical", "hi"),
    ],
)
def test_variants_of_demonstrations_are_recognised(row, name, prompt):
    found, (record,) = read(row)
    assert (found, record.prompt) == (name, prompt)
    assert isinstance(record, Demonstration)
    assert record.response.text == "a"


def test_a_null_answer_is_an_error_and_not_a_prompt():
    for row in ({"prompt": "hi", "response": None}, {"prompt": "hi", "responses": None}):
        with pytest.raises(DataError, match="not null"):
            read(row)


def test_the_pair_of_a_row_counts_more_than_its_response():
    name, (record,) = read({"prompt": "hi", "response": "a", "chosen": "a", "rejected": "b"})
    assert name == "pairs"
    assert isinstance(record, Ranking)


# Files.

LINES = [{"prompt": "h\u2028i", "response": "a"}, {"prompt": "ho", "response": "b"}]
EXPECTED = [
    ("h\u2028i", "a"),
    ("ho", "b"),
]


def layouts():
    lines = [json.dumps(record, ensure_ascii=False) for record in LINES]
    text = "\n".join(lines)
    yield "f.jsonl", text.encode()
    yield "f.jsonl", b"\xef\xbb\xbf" + text.encode()
    yield "f.jsonl", ("\r\n".join(lines) + "\r\n").encode()
    yield "f.jsonl.gz", gzip.compress(text.encode())
    yield "f.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + text.encode())
    yield "f.jsonl", gzip.compress(text.encode())  # compressed under a plain name
    yield "f.json", json.dumps(LINES, ensure_ascii=False, indent=2).encode()
    yield "f.json.gz", gzip.compress(b"\xef\xbb\xbf" + json.dumps(LINES).encode())
    yield "f.csv", "prompt,response\nh\u2028i,a\nho,b\n".encode()
    yield "f.csv", "\ufeffprompt,response\r\nh\u2028i,a\r\nho,b\r\n".encode()
    yield "f.tsv", "prompt\tresponse\nh\u2028i\ta\nho\tb\n".encode()
    yield "f.csv.gz", gzip.compress("prompt,response\nh\u2028i,a\nho,b\n".encode())


# Numbered: the bytes of a compressed file would name the second in which they were made.
@pytest.mark.parametrize(("name", "data"), list(layouts()), ids=itertools.count())
def test_the_same_records_come_out_of_every_layout(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    found, records = read_file(tmp_path / name)
    assert found == "canonical"
    assert [(r.prompt, r.response.text) for r in records] == EXPECTED
    assert all(type(r.prompt) is str for r in records)


def test_parquet_columns_of_every_type_are_read_or_passed_over(tmp_path):
    table = pa.table(
        {
            "prompt": pa.array(["h\u2028i", "ho"], pa.large_string()),
            "response": pa.array(["a", "b"]).dictionary_encode(),
            "at": pa.array([1, 2], pa.timestamp("ns")),
            "image": pa.array([b"\xff", None], pa.binary()),
            "responses": pa.array([None, None], pa.list_(pa.string())),
        }
    )
    pq.write_table(table, tmp_path / "f.parquet")
    name, records = read_file(tmp_path / "f.parquet")
    assert name == "canonical"
    assert [(r.prompt, r.response.text) for r in records] == EXPECTED


def test_parquet_rankings_have_structs_in_lists(tmp_path):
    answers = [{"text": "b", "rank": 2, "score": None}, {"text": "c", "rank": 1, "score": None}]
    pq.write_table(
        pa.Table.from_pylist([{"prompt": [turn("user", "hi")], "responses": answers}]),
        tmp_path / "f.parquet",
    )
    _, (record,) = read_file(tmp_path / "f.parquet")
    assert (record.prompt, order(record)) == (HI, [("b", 2), ("c", 1)])


@pytest.mark.parametrize(
    "cell",
    [
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]',
        "[{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'a'}]",
    ],
)
def test_lists_in_the_cells_of_a_table_are_read(tmp_path, cell):
    with open(tmp_path / "f.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "messages"], [1, cell]])
    name, (record,) = read_file(tmp_path / "f.csv")
    assert (name, record.prompt, record.response.text) == ("messages", HI, "a")


def test_numbers_in_the_cells_of_a_table_are_read_and_empty_cells_are_null(tmp_path):
    text = "prompt,chosen,rejected,margin,score_chosen,id\n1,2,3,0.5,4,7\nx,y,z,,,\n"
    (tmp_path / "f.csv").write_text(text, encoding="utf-8")
    _, (first, second) = read_file(tmp_path / "f.csv")
    assert first == Ranking(
        "1", (Response("2", 1, 4.0), Response("3", 2)), first.origin, id="7", margin=0.5
    )
    assert (second.margin, second.id, second.responses[0].score) == (None, None, None)


@pytest.mark.parametrize("field", ["rank", "score"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_whole_number_beyond_every_float_is_named(field, sign):
    answers = [{"text": "a", field: sign * 10**400}, {"text": "b", field: 2}]
    with pytest.raises(DataError, match=r"below 1\.8e308") as caught:
        read({"prompt": "hi", "responses": answers})
    assert caught.value.where == f"f:1:responses[0].{field}"


def test_a_margin_beyond_every_float_is_named():
    row = {"prompt": "hi", "chosen": "a", "rejected": "b", "margin": 10**400}
    with pytest.raises(DataError, match=r"below 1\.8e308") as caught:
        read(row)
    assert caught.value.where == "f:1:margin"


def test_decimals_of_a_parquet_file_are_numbers(tmp_path):
    path = tmp_path / "f.parquet"
    answers = [{"text": t, "score": Decimal(s)} for t, s in (("a", "0.25"), ("b", "1.50"))]
    pq.write_table(pa.table({"prompt": ["hi"], "responses": [answers]}), path)
    _, [record] = read_file(path)
    assert [(r.text, r.score) for r in record.responses] == [("a", 0.25), ("b", 1.5)]


def test_a_cell_that_is_no_number_is_named(tmp_path):
    text = "prompt,chosen,rejected,margin\nx,y,z,much\n"
    (tmp_path / "f.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="must be a number, not 'much'") as caught:
        read_file(tmp_path / "f.csv")
    assert caught.value.where.endswith("f.csv:2:margin")


def test_a_cell_that_holds_no_list_says_how_to_write_one(tmp_path):
    printed = "messages\n\"[{'role': 'user'}\n {'role': 'assistant'}]\"\n"  # as numpy prints it
    (tmp_path / "f.csv").write_text(printed, encoding="utf-8")
    with pytest.raises(DataError, match="must be a list, not a text") as caught:
        read_file(tmp_path / "f.csv")
    assert "JSON" in caught.value.do


def test_an_answer_that_is_no_text_is_an_error_that_says_what_to_write():
    with pytest.raises(DataError, match="must be a string, not true") as caught:
        read({"prompt": "hi", "responses": [{"text": True, "rank": 1}]})
    assert caught.value.where == "f:1:responses[0].text"
    assert "(a text stands in quotes), or delete this record" in caught.value.do


def test_unknown_columns_come_with_a_suggestion():
    with pytest.raises(DataError, match="question, answer") as caught:
        read({"question": "hi", "answer": "a"})
    assert "{question: prompt, answer: response}" in caught.value.do


def test_a_table_of_true_or_false_labels_holds_labelled_answers(tmp_path):
    table = "prompt,completion,label\nhi,a,True\nhi,b,false\n"
    (tmp_path / "f.csv").write_text(table, encoding="utf-8")
    name, records = read_file(tmp_path / "f.csv")
    assert name == "labelled"
    assert [(r.response.text, r.desirable) for r in records] == [("a", True), ("b", False)]


def test_prompts_may_stand_in_a_column_called_input():
    assert read({"input": "hi"}) == ("prompts", [Prompt("hi", "f:1")])


def test_a_record_over_several_lines_is_named_for_what_it_is(tmp_path):
    (tmp_path / "f.json").write_text('{\n "prompt": "hi"\n}\n', encoding="utf-8")
    with pytest.raises(DataError, match="broken JSON") as caught:
        read_file(tmp_path / "f.json")
    assert "JSON Lines" in caught.value.do


def test_parquet_under_another_name_is_named_for_what_it_is(tmp_path):
    pq.write_table(pa.table({"prompt": ["hi"]}), tmp_path / "f.jsonl")
    with pytest.raises(DataError, match="Parquet") as caught:
        read_file(tmp_path / "f.jsonl")
    assert ".parquet" in caught.value.do
