"""Every format: recognised by its columns, and read into the right records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from stages.config import shared
from stages.data import formats
from stages.data.records import Document, Labelled, Message, Prompt, Ranking, Response, Row, Useless
from stages.errors import ConfigError, DataError


def read(*rows, name="auto", as_messages=False):
    """The recognised format and the records of some rows."""
    places = (Row(row, f"f.jsonl:{n}") for n, row in enumerate(rows, start=1))
    entry, records = formats.convert(places, name, as_messages)
    return entry.name, list(records)


def turn(role, content):
    return {"role": role, "content": content}


def ranked(record):
    return [(r.text, r.rank) for r in record.responses]


USER, ASSISTANT = turn("user", "hi"), turn("assistant", "hello")
HI = (Message("user", "hi"),)
HH = "\n\nHuman: hi\n\nAssistant: yes?\n\nHuman: tell\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "name", "prompt", "response"),
    [
        ({"prompt": "a", "response": "b"}, "canonical", "a", "b"),
        ({"prompt": [USER], "response": "b"}, "canonical", HI, "b"),
        ({"messages": [USER, ASSISTANT]}, "messages", HI, "hello"),
        ({"messages": [USER, ASSISTANT, USER]}, "messages", HI, "hello"),
        (
            {"messages": [USER, ASSISTANT, USER, turn("assistant", "b")]},
            "messages",
            (*HI, Message("assistant", "hello"), *HI),
            "b",
        ),
        (
            {"messages": [turn("user", [{"type": "text", "text": "hi"}]), ASSISTANT]},
            "messages",
            HI,
            "hello",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "hello"},
                ],
                "system": "be kind",
            },
            "sharegpt",
            (Message("system", "be kind"), *HI),
            "hello",
        ),
        ({"prompt": "a", "completion": " b"}, "prompt_completion", "a", " b"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt_completion", HI, "hello"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca", "a", "b"),
        ({"instruction": "a", "input": "c", "output": "b"}, "alpaca", "a\n\nc", "b"),
        ({"instruction": "a", "context": "c", "response": "b"}, "dolly", "a\n\nc", "b"),
    ],
)
def test_demonstrations_are_recognised_and_read(row, name, prompt, response):
    found, (record,) = read(row)
    assert found == name
    assert record.prompt == prompt
    assert record.response.text == response
    assert record.origin == "f.jsonl:1"


@pytest.mark.parametrize(
    ("row", "name", "prompt", "expected"),
    [
        (
            {"prompt": "a", "responses": [{"text": "b", "rank": 2}, {"text": "c", "rank": 1.0}]},
            "canonical",
            "a",
            [("b", 2), ("c", 1)],
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "pairs", "a", [("b", 1), ("c", 2)]),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is black."},
            "pairs",
            "The sky is",
            [(" blue.", 1), (" black.", 2)],
        ),
        (
            {"chosen": "It is so", "rejected": "It is so much"},
            "pairs",
            "It is",
            [(" so", 1), (" so much", 2)],
        ),
        (
            {"chosen": [USER, ASSISTANT], "rejected": [USER, turn("assistant", "no")]},
            "pairs",
            HI,
            [("hello", 1), ("no", 2)],
        ),
        (
            {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [turn("assistant", "no")]},
            "pairs",
            HI,
            [("hello", 1), ("no", 2)],
        ),
        (
            {
                "prompt": "hi",
                "chosen": [USER, ASSISTANT],
                "rejected": [USER, turn("assistant", "no")],
            },
            "pairs",
            HI,
            [("hello", 1), ("no", 2)],
        ),
        (
            {"chosen": HH + " a story", "rejected": HH + " no"},
            "hh",
            HH,
            [(" a story", 1), (" no", 2)],
        ),
        (
            {
                "prompt": "a",
                "answers": [{"answer": "b", "rank": 2.0}, {"answer": "c", "rank": 1.0}],
            },
            "nectar",
            "a",
            [("b", 2), ("c", 1)],
        ),
        (
            {
                "info": {"subreddit": "tifu", "title": "t", "post": "p"},
                "summaries": [{"text": "b"}, {"text": "c"}],
                "choice": 1,
            },
            "summarize_from_feedback",
            "SUBREDDIT: r/tifu\n\nTITLE: t\n\nPOST: p\n\nTL;DR:",
            [("b", 2), ("c", 1)],
        ),
        (
            {
                "conversation_a": [USER, ASSISTANT],
                "conversation_b": [USER, turn("assistant", "no")],
                "winner": "tie (bothbad)",
            },
            "arena",
            HI,
            [("hello", 1), ("no", 1)],
        ),
        (
            {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 0},
            "shp",
            "a",
            [("b", 2), ("c", 1)],
        ),
    ],
)
def test_rankings_are_recognised_and_read(row, name, prompt, expected):
    found, (record,) = read(row)
    assert found == name
    assert record.prompt == prompt
    assert ranked(record) == expected


@pytest.mark.parametrize(
    ("row", "name", "prompt", "scores"),
    [
        (
            {
                "instruction": "a",
                "completions": [
                    {"response": "b", "overall_score": 7.5},
                    {"response": "c", "annotations": {"h": {"Rating": "4"}, "t": {"Rating": "5"}}},
                    {"response": "d", "annotations": {"h": {"Rating": "N/A"}}},
                ],
            },
            "ultrafeedback",
            "a",
            [7.5, 4.5, None],
        ),
        (
            {"instruction": "a", "generations": ["b", "c"], "ratings": [1, None]},
            "distilabel",
            "a",
            [1.0, None],
        ),
        (
            {
                "question": {"full_text": "a"},
                "answer_0": "b",
                "answer_1": "c",
                "score_0": -0.5,
                "score_1": 0.5,
            },
            "webgpt",
            "a",
            [-0.5, 0.5],
        ),
    ],
)
def test_scored_rankings_are_recognised_and_read(row, name, prompt, scores):
    found, (record,) = read(row)
    assert found == name
    assert record.prompt == prompt
    assert [response.score for response in record.responses] == scores


def test_the_canonical_line_keeps_its_details():
    row = {
        "id": 7,
        "prompt": "a",
        "responses": [
            {"text": "b", "rank": None, "score": 1, "model": "m", "flags": ["cut"]},
            {"text": "c", "ids": [1, 2], "vocabulary": "v"},
        ],
        "labeler": "someone",
        "source": "human",
        "margin": 0.5,
    }
    _, (record,) = read(row)
    assert record == Ranking(
        "a",
        (
            Response("b", None, 1.0, flags=("cut",), model="m"),
            Response("c", ids=(1, 2), vocabulary="v"),
        ),
        "f.jsonl:1",
        id="7",
        source="human",
        labeler="someone",
        margin=0.5,
    )


def test_pairs_keep_margin_and_scores():
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2, "score_chosen": 4.0}
    _, (record,) = read(row)
    assert record.margin == 2.0
    assert [response.score for response in record.responses] == [4.0, None]


def test_dialogues_become_turns_with_as_messages():
    _, (record,) = read({"chosen": HH + " a story", "rejected": HH + " no"}, as_messages=True)
    roles = [(m.role, m.content) for m in record.prompt]
    assert roles == [("user", "hi"), ("assistant", "yes?"), ("user", "tell")]
    assert ranked(record) == [("a story", 1), ("no", 2)]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": HH + " a", "rejected": HH.replace("tell", "show") + " b"},
        {"chosen": [USER, ASSISTANT], "rejected": [turn("user", "ho"), ASSISTANT]},
        {
            "conversation_a": [USER, ASSISTANT],
            "conversation_b": [turn("user", "ho"), ASSISTANT],
            "winner": "model_a",
        },
    ],
)
def test_answers_to_different_prompts_are_useless(row):
    _, (record,) = read(row)
    assert isinstance(record, Useless)


def node(role, text, *replies, **fields):
    return {"role": role, "text": text, "replies": list(replies), **fields}


TREE = node(
    "prompter",
    "root",
    node("assistant", "second", rank=1),
    node(
        "assistant",
        "best",
        node(
            "prompter",
            "more",
            node("assistant", "x", rank=0),
            node("assistant", "y", rank=1),
            node("assistant", "unranked"),
            node("assistant", "gone", rank=2, deleted=True),
        ),
        rank=0,
    ),
)
PATH = (Message("user", "root"), Message("assistant", "best"), Message("user", "more"))


def test_trees_give_one_ranking_for_each_group_with_its_whole_path():
    name, (top, deep) = read({"message_tree_id": "t", "prompt": TREE})
    assert name == "oasst"
    assert top.prompt == (Message("user", "root"),)
    assert ranked(top) == [("second", 2), ("best", 1)]
    assert deep.prompt == PATH
    assert ranked(deep) == [("x", 1), ("y", 2), ("unranked", None)]


def test_a_flat_file_gives_the_same_rankings_as_its_trees():
    rows = []

    def flatten(value, parent):
        name = f"m{len(rows)}"
        fields = {key: v for key, v in value.items() if key != "replies"}
        rows.append({"message_id": name, "parent_id": parent, **fields})
        for reply in value["replies"]:
            flatten(reply, name)

    flatten(TREE, None)
    name, flat = read(*reversed(rows))
    _, nested = read({"prompt": TREE})
    assert name == "oasst_flat"
    assert {(r.prompt, frozenset(ranked(r))) for r in flat} == {
        (r.prompt, frozenset(ranked(r))) for r in nested
    }


def test_prompts_and_texts_are_read():
    assert read({"prompt": "a", "note": 1}) == ("prompts", [Prompt("a", "f.jsonl:1")])
    assert read({"text": "a"}) == ("text", [Document("a", "f.jsonl:1")])


def test_a_conversation_without_answer_is_a_prompt():
    assert read({"messages": [USER]}) == ("messages", [Prompt(HI, "f.jsonl:1")])


def test_a_named_format_is_taken_instead_of_the_recognised_one():
    name, (record,) = read({"text": "a", "prompt": "b"}, name="text")
    assert name == "text"
    assert record.text == "a"
    with pytest.raises(ConfigError, match="unknown format"):
        read({"text": "a"}, name="tekst")


@pytest.mark.parametrize(
    ("row", "field", "what"),
    [
        ({"prompt": "a", "response": 3}, "response", "must be a string"),
        ({"prompt": None, "response": "b"}, "prompt", "must be a list"),
        ({"prompt": [], "response": "b"}, "prompt", "no messages"),
        ({"prompt": [ASSISTANT], "response": "b"}, "prompt", "ends with an answer"),
        ({"prompt": "a", "responses": {"text": "b"}}, "responses", "must be a list"),
        ({"prompt": "a", "responses": [{"rank": 1}]}, "responses[0].text", "missing"),
        ({"prompt": "a", "responses": [{"text": "b", "rank": 0}]}, "responses[0].rank", "from 1"),
        ({"prompt": "a", "responses": [{"text": "b", "rank": 1.5}]}, "responses[0].rank", "whole"),
        ({"prompt": "a", "responses": [{"text": "b", "rank": "1"}]}, "responses[0].rank", "number"),
        ({"prompt": "a", "responses": [{"text": "b", "rank": True}]}, "responses[0].rank", "true"),
        ({"prompt": "a", "responses": [{"text": "b", "ids": [-1]}]}, "responses[0].ids[0]", "id"),
        ({"prompt": "a\ud800", "response": "b"}, "prompt", "surrogate"),
        ({"messages": [turn("tool", "x")]}, "messages[0].role", "tool calls"),
        ({"messages": [turn("narrator", "x")]}, "messages[0].role", "unknown role"),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[1].tool_calls",
            "tool calls",
        ),
        (
            {"messages": [turn("user", [{"type": "image_url"}])]},
            "messages[0].content[0].type",
            "only text",
        ),
        (
            {"conversations": [{"from": "observation", "value": "x"}]},
            "conversations[0].from",
            "tool",
        ),
        ({"chosen": [USER], "rejected": [ASSISTANT]}, "chosen[0].role", "assistant"),
        ({"prompt": {"role": "x", "text": "a", "replies": []}}, "prompt.role", "unknown role"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(row, field, what):
    with pytest.raises(DataError, match=what) as caught:
        read(row)
    assert caught.value.where == f"f.jsonl:1:{field}"


def test_a_field_that_a_later_line_lacks_is_named():
    with pytest.raises(DataError) as caught:
        read({"instruction": "a", "output": "b"}, {"instruction": "a"})
    assert caught.value.where == "f.jsonl:2:output"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "single steps"),
        ({"foo": 1, "bar": 2}, "foo, bar"),
    ],
)
def test_labels_that_no_stage_reads_are_refused_with_an_explanation(row, what):
    with pytest.raises(DataError, match=what):
        read(row)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a", "response": "b", "label": False}, "a"),
        ({"prompt": "a", "completion": "b", "label": False}, "a"),
        (
            {
                "prompt": [USER],
                "completion": [turn("assistant", "b")],
                "label": False,
            },
            HI,
        ),
    ],
)
def test_an_answer_with_a_label_is_a_labelled_answer(row, prompt):
    name, (record,) = read(row)
    assert name == "labelled"
    assert record == Labelled(prompt, Response("b"), False, "f.jsonl:1")


def test_a_label_that_is_neither_true_nor_false_is_an_error_with_its_place():
    rows = [{"prompt": "a", "response": "b", "label": n} for n in (True, 1)]
    with pytest.raises(DataError, match="must be true or false, not 1") as caught:
        read(*rows)
    assert caught.value.where == "f.jsonl:2:label"


def test_the_documentation_lists_every_format_in_the_order_of_recognition():
    table = (Path(__file__).parents[2] / "docs" / "data-formats.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| `(\w+)` \| .* \| (?:rankings|dem|labelled|prompts|doc)", table, re.MULTILINE
    )
    assert listed == list(formats.FORMATS)


def test_the_config_admits_every_format():
    assert set(get_args(shared.Format)) == {"auto", *formats.FORMATS}
