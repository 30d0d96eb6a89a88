"""The written sample files are what their README says and what the stages need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "data_samples"
FILES = ("demonstrations.jsonl", "rankings.jsonl", "prompts.jsonl", "pretrain.jsonl")
WITH_PROMPTS = FILES[:3]


def lines_of(name: str) -> list[dict[str, Any]]:
    text = (FOLDER / name).read_bytes().decode("utf-8")
    assert text.endswith("\n")
    assert "\r" not in text
    return [json.loads(line) for line in text[:-1].split("\n")]


def prompts_of(name: str) -> list[str]:
    """The prompts without the white space and case that could hide a repetition."""
    prompts = (json.dumps(line["prompt"], ensure_ascii=False) for line in lines_of(name))
    return [" ".join(prompt.lower().split()) for prompt in prompts]


def test_each_file_has_enough_lines() -> None:
    least = {"demonstrations": 64, "rankings": 52, "prompts": 64, "pretrain": 64}
    for name, count in least.items():
        assert len(lines_of(f"{name}.jsonl")) >= count


@pytest.mark.parametrize("name", FILES)
def test_readme_states_the_number_of_lines(name: str) -> None:
    row = re.search(
        rf"^\| `{name}` \|.*\| (\d+) \|", (FOLDER / "README.md").read_text("utf-8"), re.M
    )
    assert row is not None
    assert int(row[1]) == len(lines_of(name))


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_no_prompt_occurs_twice_in_a_file(name: str) -> None:
    prompts = prompts_of(name)
    assert len(set(prompts)) == len(prompts)


def test_no_prompt_occurs_in_two_files() -> None:
    demonstrations, rankings, prompts = (set(prompts_of(name)) for name in WITH_PROMPTS)
    assert not demonstrations & rankings
    assert not demonstrations & prompts
    assert not rankings & prompts


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_prompts_are_conversations_that_end_with_the_user(name: str) -> None:
    for line in lines_of(name):
        roles = [message["role"] for message in line["prompt"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
        assert all(message["content"].strip() for message in line["prompt"])


def test_demonstrations_mix_single_turn_multi_turn_and_system_prompts() -> None:
    roles = [[message["role"] for message in line["prompt"]] for line in lines_of(FILES[0])]
    assert sum(r == ["user"] for r in roles) > len(roles) / 2
    assert sum("assistant" in r for r in roles) >= 3
    assert sum(r[0] == "system" for r in roles) >= 3


def test_demonstrations_have_an_answer_without_surrounding_space() -> None:
    for line in lines_of("demonstrations.jsonl"):
        assert set(line) == {"prompt", "response"}
        assert line["response"]
        assert line["response"] == line["response"].strip()


def test_rankings_have_from_four_to_nine_answers_and_every_number_occurs() -> None:
    assert {len(line["responses"]) for line in lines_of("rankings.jsonl")} == {4, 5, 6, 7, 8, 9}


def test_ranks_start_at_one_and_leave_no_gap() -> None:
    for line in lines_of("rankings.jsonl"):
        ranks = {answer["rank"] for answer in line["responses"]}
        assert ranks == set(range(1, len(ranks) + 1))
        assert len(ranks) > 1


def test_some_answers_tie_for_the_first_rank_and_some_below_it() -> None:
    tied = [
        rank
        for ranks in ([a["rank"] for a in line["responses"]] for line in lines_of("rankings.jsonl"))
        for rank in set(ranks)
        if ranks.count(rank) > 1
    ]
    assert tied.count(1) >= 5
    assert len(tied) - tied.count(1) >= 5


def test_answers_of_a_prompt_differ_and_ids_are_unique() -> None:
    rankings = lines_of("rankings.jsonl")
    assert len({line["id"] for line in rankings}) == len(rankings)
    for line in rankings:
        texts = [answer["text"].strip() for answer in line["responses"]]
        assert all(texts)
        assert len(set(texts)) == len(texts)


def test_order_of_answers_does_not_give_away_the_best() -> None:
    first = [line["responses"][0]["rank"] == 1 for line in lines_of("rankings.jsonl")]
    assert 0.1 < sum(first) / len(first) < 0.6


def test_pretraining_texts_are_distinct_paragraphs() -> None:
    texts = [line["text"] for line in lines_of("pretrain.jsonl")]
    assert len(set(texts)) == len(texts)
    assert all(100 <= len(text) <= 400 and "\n" not in text for text in texts)
