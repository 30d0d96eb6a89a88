"""Rewards of type rule give the numbers that their descriptions say."""

from __future__ import annotations

from typing import Any

import pytest

from stages.config import InvalidConfig, resolve
from stages.runtime.rewards import rule
from stages.runtime.rewards.texts import Absent
from tests.runtime.asked import answer, term


def score(text: str, record: dict[str, Any] | None = None, **keys: Any) -> Any:
    placed = term(type="rule", **keys)
    return rule.scorer(placed.term)([answer(text, **(record or {}))])[0]


@pytest.mark.parametrize(
    ("text", "keys", "expected"),
    [
        ("12345", {"rule": "length", "target": 5}, 0.0),
        ("1234567890", {"rule": "length", "target": 5}, -1.0),
        ("", {"rule": "length", "target": 5}, -1.0),
        ("12", {"rule": "length", "max": 4}, 0.0),
        ("123456", {"rule": "length", "max": 4}, -0.5),
        ("is it 42?", {"rule": "regex", "pattern": r"\d+"}, 1.0),
        ("is it?", {"rule": "regex", "pattern": r"\d+"}, 0.0),
        ("The ART of a party, art", {"rule": "forbidden_words", "words": ["art", "of a"]}, -3.0),
        ("party", {"rule": "forbidden_words", "words": ["art"]}, 0.0),
        ("C++ and c++!", {"rule": "forbidden_words", "words": ["C++"]}, -2.0),
        ("a b c d", {"rule": "repetition", "n": 2}, 0.0),
        ("a b a b a b", {"rule": "repetition", "n": 2}, -0.6),  # ab ba ab ba ab: 2 of 5
        ("a", {"rule": "repetition", "n": 2}, 0.0),
    ],
)
def test_a_rule_gives_its_number(text: str, keys: dict[str, Any], expected: float) -> None:
    assert score(text, **keys) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "right", "extract", "expected"),
    [
        (" 42\n", "42", None, 1.0),
        ("42", 42, None, 1.0),
        ("42.", "42", None, 0.0),
        ("first 41, then 42", "42", r"\d+", 1.0),
        ("first 42, then 41", "42", r"\d+", 0.0),
        ("so #### 42", "6 * 7 = 42 #### 42", r"#### (\d+)", 1.0),
        ("nothing", "42", r"\d+", 0.0),
        ("two", ["2", "two"], None, 1.0),
    ],
)
def test_an_exact_match_compares_what_is_extracted(
    text: str, right: Any, extract: str | None, expected: float
) -> None:
    keys = {"rule": "exact_match", "field": "right", "extract": extract}
    assert score(text, {"right": right}, **keys) == expected


def test_a_line_without_the_field_has_no_judgement() -> None:
    found = score("42", {"other": "42"}, rule="exact_match", field="right")
    assert isinstance(found, Absent)


@pytest.mark.parametrize(
    ("keys", "where", "words"),
    [
        ({"rule": "length"}, "reward.target", "target or max"),
        ({"rule": "length", "target": 3, "max": 4}, "reward.target", "one of them"),
        ({"rule": "length", "max": 3, "n": 2}, "reward.n", "not read by rule: length"),
        ({"rule": "regex", "pattern": "("}, "reward.pattern", "no regular expression"),
        ({"rule": "exact_match", "extract": "x"}, "reward.field", "needs field"),
        ({"rule": "forbidden_words", "words": []}, "reward.words", "at least 1"),
        ({"rule": "repetition", "n": 0}, "reward.n", "at least 1"),
        ({"rule": "repetitions"}, "reward.rule", "did you mean repetition?"),
    ],
)
def test_keys_that_a_rule_lacks_or_does_not_read_are_named(
    keys: dict[str, Any], where: str, words: str
) -> None:
    base = {"stage": "ppo", "model": "m", "output": "o", "data": {"train": "d"}}
    with pytest.raises(InvalidConfig) as caught:
        resolve({**base, "reward": {"type": "rule", **keys}})
    assert str(caught.value).startswith(where)
    assert words in str(caught.value)
