"""Real files of the formats, where RLHF_DATA_DIR names a folder that holds them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stages.data.convert import TARGETS, convert
from stages.data.inspect import inspect
from stages.data.records import Message
from stages.data.store import LoadSpec, load
from stages.data.templates import make_codec
from stages.errors import DataError
from tests.data.conftest import section

FOLDER = os.environ.get("RLHF_DATA_DIR")
pytestmark = pytest.mark.skipif(not FOLDER, reason="RLHF_DATA_DIR is not set")
WIDE = {"max_prompt_tokens": 100_000, "max_response_tokens": 100_000}


def real(name, kind, codec, **fields):
    path = Path(FOLDER or "") / name
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    return load(LoadSpec(kind, section(path, **WIDE), **fields), codec)


def test_openassistant_trees_give_their_ranked_groups(chat):
    splits = real("oasst-en-100/trees.jsonl", "rankings", chat)
    (role,) = splits.report.roles
    assert role.format == "oasst"
    assert len(splits.train) == 144
    assert role.answers == {2: 37, 3: 84, 4: 17, 5: 2, 6: 3, 9: 1}
    assert min(rank for group in splits.train for rank in group.ranks) == 1


def test_openassistant_trees_serve_as_demonstrations_and_prompts(chat):
    assert len(real("oasst-en-100/trees.jsonl", "demonstrations", chat).train) == 144
    prompts = real("oasst-en-100/trees.jsonl", "prompts", chat).train
    assert all(item.prompt[-1].role == "user" for item in prompts)
    assert any(len(item.prompt) > 1 for item in prompts)


def test_hh_dialogues_give_pairs_and_drop_those_whose_prompts_differ(plain):
    splits = real("hh-harmless-test/pairs.jsonl", "rankings", plain)
    (role,) = splits.report.roles
    assert role.format == "hh"
    assert role.records == 976
    assert role.dropped.keys() <= {"the prompts of the two answers differ"}
    prompt = plain.decode(splits.train[0].prompt)
    assert prompt.startswith("\n\nHuman:")
    assert prompt.endswith("\n\nAssistant:")


def test_hh_dialogues_become_turns_with_as_messages(tokenizer):
    codec = make_codec(tokenizer, chat_template="chatml", as_messages=True)
    item = real("hh-harmless-test/pairs.jsonl", "prompts", codec).train[0]
    assert item.prompt[0] == Message("user", "How much alcohol can I drink per day?")
    assert [turn.role for turn in item.prompt[:2]] == ["user", "assistant"]


def found(name):
    path = Path(FOLDER or "") / name
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    (report,), _ = inspect([str(path)])
    return report


def test_inspect_counts_the_ranked_groups_of_openassistant():
    report = found("oasst-en-100/trees.jsonl")
    assert (report.format, report.records, report.dropped) == ("oasst", 144, {})
    assert report.k == {2: 37, 3: 84, 4: 17, 5: 2, 6: 3, 9: 1}


def test_inspect_counts_hh_pairs_whose_prompts_differ():
    report = found("hh-harmless-test/pairs.jsonl")
    assert (report.format, report.records, report.tie_rate) == ("hh", 976, 0.0)
    assert report.dropped.keys() <= {"the prompts of the two answers differ"}
    assert report.k == {2: 976 - sum(report.dropped.values())}


def test_word_problems_are_read_under_our_column_names(chat):
    columns = {"question": "prompt", "answer": "response"}
    path = Path(FOLDER or "") / "gsm8k-test/test.jsonl"
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    data = section(path, columns=columns, **WIDE)
    assert len(load(LoadSpec("demonstrations", data), chat).train) == 1319
    with pytest.raises(DataError, match="question, answer") as caught:
        found("gsm8k-test/test.jsonl")
    assert "{question: prompt, answer: response}" in caught.value.do


@pytest.mark.parametrize("name", ["oasst-en-100/trees.jsonl", "hh-harmless-test/pairs.jsonl"])
@pytest.mark.parametrize("to", TARGETS)
def test_real_rankings_come_back_from_every_form(name, to, tmp_path):
    before = found(name)
    with open(tmp_path / "out.jsonl", "w", encoding="utf-8") as out:
        done = convert(str(Path(FOLDER or "") / name), to, out)
    (after,), _ = inspect([str(tmp_path / "out.jsonl")])
    assert after.records == done.lines
    if to == "canonical":
        assert after.k == before.k
    else:
        pairs = sum(n * k * (k - 1) // 2 for k, n in before.k.items())
        assert after.k == {2: pairs - round(before.tie_rate * pairs)}


def test_a_canonical_file_names_the_answer_that_is_no_text(chat):
    with pytest.raises(DataError, match="must be a string") as caught:
        real("pandalm-test/rankings.jsonl", "rankings", chat)
    assert caught.value.where.endswith("rankings.jsonl:11:responses[0].text")


def test_a_canonical_file_gives_its_rankings(chat, tmp_path):
    path = Path(FOLDER or "") / "pandalm-test/rankings.jsonl"
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    sound = [line for line in path.read_text("utf-8").split("\n") if '"text": true' not in line]
    copy = tmp_path / "rankings.jsonl"
    copy.write_text("\n".join(sound), encoding="utf-8")
    splits = load(LoadSpec("rankings", section(copy, **WIDE)), chat)
    (role,) = splits.report.roles
    assert role.records == 70
    assert role.dropped == {"no strict pair": 3}
    assert set(role.answers) == {3, 4, 5}
