"""What ``convert`` writes for each tool, by hand, and that it comes back as the same records."""

from __future__ import annotations

import gzip
import io
import json
import os
from dataclasses import replace

import pytest

from stages.data import files, formats
from stages.data.convert import TARGETS, convert
from stages.data.output import opened
from stages.data.records import Demonstration, Message, Prompt, Ranking, Response
from stages.errors import ConfigError
from tests.data.conftest import write_lines

HI = [{"role": "user", "content": "hi"}]
LONG = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "r"},
    *HI,
]
RANKING = {
    "id": "7",
    "prompt": "hi",
    "responses": [
        {"text": "b", "rank": 2, "score": 1.0},
        {"text": "a", "rank": 1, "score": 3.0, "model": "m"},
        {"text": "c", "rank": 2, "flags": ["cut"]},
        {"text": "d", "rank": None},
    ],
    "labeler": "someone",
    "source": "human",
}


def converted(tmp_path, to, *records, as_messages=False):
    path = write_lines(tmp_path / "in.jsonl", records)
    out = io.StringIO()
    done = convert(str(path), to, out, as_messages=as_messages)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert done.lines == len(lines)
    assert done.records == len(records)
    return lines, done


def read(path):
    return [replace(r, origin="") for r in formats.convert(files.rows(str(path)), "auto", False)[1]]


@pytest.mark.parametrize(
    ("to", "record", "line"),
    [
        ("canonical", {"instruction": "hi", "output": "a"}, {"prompt": "hi", "response": "a"}),
        (
            "canonical",
            {"messages": [*HI, {"role": "assistant", "content": "a"}]},
            {"prompt": HI, "response": "a"},
        ),
        ("canonical", {"text": "a"}, {"text": "a"}),
        ("trl", {"prompt": "hi", "response": "a"}, {"prompt": "hi", "completion": "a"}),
        (
            "trl",
            {"prompt": HI, "response": "a"},
            {"prompt": HI, "completion": [{"role": "assistant", "content": "a"}]},
        ),
        ("trl", {"prompt": HI}, {"prompt": HI}),
        ("trl", {"text": "a"}, {"text": "a"}),
        ("openrlhf", {"prompt": "hi", "response": "a"}, {"input": "hi", "output": "a"}),
        (
            "openrlhf",
            {"prompt": HI, "response": "a"},
            {"input": HI, "output": [{"role": "assistant", "content": "a"}]},
        ),
        ("openrlhf", {"prompt": "hi"}, {"input": "hi"}),
        (
            "llama-factory",
            {"prompt": "hi", "response": "a"},
            {"instruction": "hi", "input": "", "output": "a"},
        ),
        (
            "llama-factory",
            {"prompt": LONG, "response": "a"},
            {
                "instruction": "hi",
                "input": "",
                "system": "be kind",
                "history": [["q", "r"]],
                "output": "a",
            },
        ),
        ("llama-factory", {"prompt": "hi"}, {"instruction": "hi", "input": ""}),
    ],
)
def test_each_tool_gets_the_columns_that_it_reads(tmp_path, to, record, line):
    assert converted(tmp_path, to, record)[0] == [line]


def test_a_canonical_ranking_keeps_everything(tmp_path):
    assert converted(tmp_path, "canonical", RANKING)[0] == [RANKING]


@pytest.mark.parametrize("to", ["trl", "openrlhf"])
def test_a_ranking_becomes_its_strict_pairs(tmp_path, to):
    lines, _ = converted(tmp_path, to, RANKING)
    assert lines == [
        {
            "prompt": "hi",
            "chosen": "a",
            "rejected": "b",
            "score_chosen": 3.0,
            "score_rejected": 1.0,
        },
        {"prompt": "hi", "chosen": "a", "rejected": "c"},
    ]


def test_pairs_of_messages_have_answers_of_messages(tmp_path):
    answers = [{"text": "a", "rank": 1}, {"text": "b", "rank": 2}]
    record = {"prompt": HI, "responses": answers, "margin": 0.5}
    (line,), _ = converted(tmp_path, "trl", record)
    assert line == {
        "prompt": HI,
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
        "margin": 0.5,
    }
    (line,), _ = converted(tmp_path, "llama-factory", record)
    assert line == {
        "instruction": "hi",
        "input": "",
        "system": "",
        "history": [],
        "chosen": "a",
        "rejected": "b",
    }


def test_what_gives_no_line_is_counted_by_reason(tmp_path):
    tied = {"prompt": "a", "responses": [{"text": t, "rank": 1} for t in "xy"]}
    unranked = {"prompt": "a", "responses": [{"text": t} for t in "xy"]}
    lines, done = converted(tmp_path, "trl", tied, unranked, RANKING)
    assert len(lines) == 2
    assert done.dropped == {"no strict pair": 1, "fewer than two ranked answers": 1}
    assert converted(tmp_path, "canonical", tied, unranked)[1].dropped == {}
    twice = {"prompt": HI + HI, "response": "a"}
    _, done = converted(tmp_path, "llama-factory", twice)
    assert done.dropped == {"turns that do not alternate between user and assistant": 1}


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("prompt", ["hi", HI, LONG], ids=["text", "one turn", "turns"])
def test_records_come_back_as_they_were(tmp_path, to, prompt):
    def turns(value):
        if isinstance(value, str):
            return value
        return tuple(Message(turn["role"], turn["content"]) for turn in value)

    answers = [{"text": "a\u2028", "rank": 1}, {"text": " b", "rank": 2}]
    expected = {
        "demonstration": Demonstration(turns(prompt), Response("a\u2028"), ""),
        "ranking": Ranking(turns(prompt), (Response("a\u2028", 1), Response(" b", 2)), ""),
        "prompt": Prompt(turns(prompt), ""),
    }
    given = {
        "demonstration": {"prompt": prompt, "response": "a\u2028"},
        "ranking": {"prompt": prompt, "responses": answers},
        "prompt": {"prompt": prompt},
    }
    for name, record in given.items():
        if name == "prompt" and to == "llama-factory":
            continue  # an instruction without an output is no format of ours
        lines, _ = converted(tmp_path, to, record)
        assert read(write_lines(tmp_path / "out.jsonl", lines)) == [expected[name]], name


def test_every_prompt_becomes_turns_where_asked(tmp_path):
    dialogue = "\n\nHuman: hi\n\nAssistant:"
    pair = {"chosen": dialogue + " a", "rejected": dialogue + " b"}
    (line,), _ = converted(tmp_path, "canonical", pair, as_messages=True)
    assert line["prompt"] == HI
    (line,), _ = converted(tmp_path, "trl", {"prompt": "hi", "response": "a"}, as_messages=True)
    assert line == {"prompt": HI, "completion": [{"role": "assistant", "content": "a"}]}


def test_an_output_is_there_only_when_it_is_complete(tmp_path):
    path = tmp_path / "out.jsonl"
    with opened(path, "in", force=False) as out:
        out.write("line\n")
        assert not path.exists()
    assert path.read_text() == "line\n"
    half = opened(path, "in", force=True)
    half.__enter__().write("half")
    with pytest.raises(RuntimeError):
        half.gen.throw(RuntimeError())
    assert path.read_text() == "line\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_is_compressed_where_its_name_says_so(tmp_path):
    with opened(tmp_path / "out.jsonl.gz", "in", force=False) as out:
        out.write("é\n")
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).decode() == "é\n"


def test_an_output_that_is_a_link_is_written_where_it_leads(tmp_path):
    for name in ("there.jsonl", "new.jsonl"):
        link = tmp_path / f"link-to-{name}"
        link.symlink_to(name)
    (tmp_path / "there.jsonl").write_text("old\n", encoding="utf-8")
    for name in ("there.jsonl", "new.jsonl"):
        with opened(tmp_path / f"link-to-{name}", "in", force=True) as out:
            out.write("line\n")
        assert (tmp_path / f"link-to-{name}").is_symlink()
        assert (tmp_path / name).read_text() == "line\n"


def test_an_output_that_is_no_regular_file_is_refused_and_left_alone(tmp_path):
    pipe, folder, loop = tmp_path / "pipe", tmp_path / "folder", tmp_path / "loop"
    os.mkfifo(pipe)
    folder.mkdir()
    loop.symlink_to(loop)
    (tmp_path / "link").symlink_to(pipe)
    for path, what in (
        (pipe, "a device or a pipe"),
        (tmp_path / "link", "a device or a pipe"),
        (folder, "is a folder"),
        (loop, "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=what), opened(path, "in", force=True) as out:
            out.write("line\n")
    assert pipe.is_fifo()
    assert folder.is_dir()
    assert loop.is_symlink()
    assert len(list(tmp_path.iterdir())) == 4


def test_outputs_that_would_do_harm_are_refused(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("x", encoding="utf-8")
    for source, force, what in (("in", False, "already"), (str(path), True, "that is read")):
        with pytest.raises(ConfigError, match=what), opened(path, source, force=force):
            pass
    with pytest.raises(ConfigError, match="cannot be written"):
        opened(tmp_path / "no" / "d.jsonl", "in", force=False).__enter__()
    assert path.read_text() == "x"
