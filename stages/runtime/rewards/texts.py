"""What the types of rewards that read texts have in common: answers in, scores out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stages.config.rewards import Placed
from stages.data.records import PromptLike, prompt_text
from stages.errors import TrainingError

LARGEST = torch.finfo(torch.float32).max  # scores are kept in this format
_SHOWN = 60  # characters of a prompt in a message


class Answer(NamedTuple):
    """An answer to be judged.

    Attributes:
        prompt: as written.
        text: the answer without its end token.
        cut: whether it stops without having ended.
        rendered: the text of the prompt as the policy reads it.
        record: the fields of the prompt's line.
        origin: the place of that line.
        whole: whether every token of the answer has a text.
        ids: the token ids of the answer, where they are known.
        vocabulary: the hash of the vocabulary that they belong to, where it is known.
    """

    prompt: PromptLike
    text: str
    cut: bool
    rendered: str
    record: Mapping[str, Any]
    origin: str
    whole: bool = True
    ids: tuple[int, ...] | None = None
    vocabulary: str | None = None


@dataclass(frozen=True)
class Absent:
    """No judgement, and why."""

    why: str


Score = float | Absent
Scorer = Callable[[Sequence[Answer]], list[Score]]


def is_score(number: float) -> bool:
    """Whether a number is finite, also as it is kept."""
    return abs(number) <= LARGEST


def told(answer: Answer) -> str:
    """The prompt of an answer, as a message names it."""
    text = prompt_text(answer.prompt)
    short = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    place = f" at {answer.origin}" if answer.origin else ""
    return f"the prompt{place} ({json.dumps(short, ensure_ascii=False)})"


def failed(placed: Placed, what: str, *, do: str, where: str) -> TrainingError:
    """The error of a term that could not judge: the run ends, its state saved."""
    return TrainingError(f"the reward {placed.name} {what}", do=do, where=where)
