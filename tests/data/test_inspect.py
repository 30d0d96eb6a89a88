"""What ``inspect`` counts, by hand."""

from __future__ import annotations

import gzip
import json

import pytest

from stages.data.inspect import find, inspect
from stages.errors import ConfigError, DataError
from tests.data.conftest import write_lines


def look(tmp_path, records, codec=None, name="d.jsonl"):
    path = write_lines(tmp_path / name, records)
    (report,), overlap = inspect([str(path)], codec)
    assert overlap == 0
    return report


def answers(*ranks):
    return [{"text": f"answer {n}", "rank": rank} for n, rank in enumerate(ranks)]


def test_rankings_are_counted_by_k_ties_and_reasons(tmp_path):
    report = look(
        tmp_path,
        [
            {"prompt": "a", "responses": answers(1, 2, 3)},  # 3 pairs
            {"prompt": "b", "responses": answers(1, 1, 2)},  # 3 pairs, 1 tie
            {"prompt": "c", "responses": answers(1, 1)},  # 1 pair, 1 tie
            {"prompt": "d", "responses": answers(1, None)},
            {"prompt": "a", "responses": answers(1, 2, 3)},  # 3 pairs, a whole duplicate
            {"prompt": "a", "responses": answers(2, 1)},  # 1 pair, the same prompt only
        ],
    )
    assert report.format == "canonical"
    assert report.records == 6
    assert report.dropped == {"no strict pair": 1, "fewer than two ranked answers": 1}
    assert report.k == {2: 2, 3: 3}
    assert report.tie_rate == pytest.approx(2 / 11)
    assert report.duplicates == 1
    assert (report.prompt_tokens, report.response_tokens) == (None, None)


def test_demonstrations_have_neither_k_nor_ties(tmp_path):
    one = {"prompt": "a", "response": "b"}
    report = look(tmp_path, [one, one, one, {"prompt": "a", "response": " "}])
    assert (report.k, report.tie_rate) == ({}, None)
    assert report.dropped == {"empty answer": 1}
    assert report.duplicates == 2


def test_repeated_prompts_would_be_dropped(tmp_path):
    report = look(tmp_path, [{"prompt": "a"}, {"prompt": "a"}, {"prompt": ""}])
    assert report.format == "prompts"
    assert report.dropped == {"duplicate prompt": 1, "empty prompt": 1}
    assert report.duplicates == 1


def test_conversations_without_an_answer_and_unlike_prompts_are_counted(tmp_path):
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    report = look(tmp_path, [{"messages": [user, answer]}, {"messages": [user]}])
    assert report.dropped == {"no answer": 1}
    sides = {"chosen": [user, answer], "rejected": [{**user, "content": "c"}, answer]}
    report = look(tmp_path, [sides])
    assert (report.records, report.duplicates) == (1, 0)
    assert report.dropped == {"the prompts of the two answers differ": 1}


def test_tokens_are_counted_with_a_tokenizer(tmp_path, plain):
    report = look(tmp_path, [{"prompt": "xyz", "responses": answers(1, 2)}], plain)
    assert report.prompt_tokens["max"] == len(plain.encode_prompt("xyz").ids)
    assert report.response_tokens["max"] == len(plain.encode_response("answer 0"))


def test_messages_are_counted_without_a_template_but_their_tokens_are_not(tmp_path, plain, chat):
    records = [{"prompt": [{"role": "user", "content": "a"}], "response": "b"}]
    assert look(tmp_path, records).records == 1
    assert look(tmp_path, records, chat).prompt_tokens["max"] > 1
    with pytest.raises(ConfigError, match="no chat template"):
        look(tmp_path, records, plain)


def test_prompts_in_common_are_counted_over_files(tmp_path):
    for name, prompts in (("a", "xyz"), ("b", "yzzw"), ("c", "z")):
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": p, "response": "r"} for p in prompts])
    reports, overlap = inspect(list(find([f"{tmp_path}/*.jsonl"])))
    assert [report.file[-7:] for report in reports] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [report.overlap for report in reports] == [2, 2, 1]
    assert overlap == 2


def test_a_prompt_is_the_same_as_a_string_and_as_one_user_turn(tmp_path):
    turn = [{"role": "user", "content": "x"}]
    write_lines(tmp_path / "a.jsonl", [{"prompt": "x"}])
    write_lines(tmp_path / "b.jsonl", [{"prompt": turn, "response": "y"}])
    assert inspect([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"])[1] == 1


def test_tables_and_compressed_files_are_looked_at_too(tmp_path):
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b"prompt,chosen,rejected\na,b,c\n"))
    (report,), _ = inspect([f"{tmp_path}/d.csv.gz"])
    assert (report.format, report.records, report.k) == ("pairs", 1, {2: 1})


def test_a_broken_line_is_named(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": "a", "response": "b"}])
    path.write_text(path.read_text() + json.dumps({"prompt": "a", "response": 3}), encoding="utf-8")
    with pytest.raises(DataError, match="not a number") as caught:
        inspect([str(path)])
    assert caught.value.where == f"{path}:2:response"
