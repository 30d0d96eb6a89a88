"""Answers and terms for the tests of rewards."""

from __future__ import annotations

from typing import Any

from stages.config import ScoreConfig
from stages.config.rewards import Placed, placed
from stages.data.records import from_json
from stages.runtime.rewards.texts import Answer


def term(**values: Any) -> Placed:
    """The one term of a reward."""
    return placed(ScoreConfig.model_validate({"reward": values}).reward)[0]


def answer(text: str, prompt: Any = "a question", **record: Any) -> Answer:
    """An answer that ended by itself; its prompt stands at line 1."""
    record = {"prompt": prompt, **record}
    return Answer(from_json(prompt), text, False, f"<{prompt}>", record, "p.jsonl:1")
