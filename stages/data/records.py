"""The records that every data format is read into, before any tokenizer is involved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; ``role`` is system, user or assistant."""

    role: str
    content: str


Turns = tuple[Message, ...]
PromptLike = str | Turns


@dataclass(frozen=True)
class Response:
    """One answer to a prompt.

    Attributes:
        text: the answer without its end token.
        rank: 1 = best, equal = tie, None = not rankable.
        score: higher is better; counts where no answer of the ranking has a rank.
        ids: the sampled token ids, valid for the vocabulary whose hash is ``vocabulary``.
        flags: ``cut`` marks an answer that hit the length limit and so has no end token.
        model: who wrote it.
    """

    text: str
    rank: int | None = None
    score: float | None = None
    ids: tuple[int, ...] | None = None
    vocabulary: str | None = None
    flags: tuple[str, ...] = ()
    model: str | None = None

    @property
    def cut(self) -> bool:
        """Whether the answer stops without having ended."""
        return "cut" in self.flags


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the answer to imitate; ``origin`` is ``file:line``."""

    prompt: PromptLike
    response: Response
    origin: str


@dataclass(frozen=True)
class Ranking:
    """A prompt and its ranked answers; ``margin`` belongs to the one pair of two answers."""

    prompt: PromptLike
    responses: tuple[Response, ...]
    origin: str
    id: str | None = None
    source: str | None = None
    labeler: str | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Labelled:
    """A prompt and an answer that is desirable, or is not."""

    prompt: PromptLike
    response: Response
    desirable: bool
    origin: str


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered; ``fields``: its whole line, where that is asked for."""

    prompt: PromptLike
    origin: str
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class Document:
    """A text without prompt and answer, such as pretraining text."""

    text: str
    origin: str


@dataclass(frozen=True)
class Useless:
    """A well-formed record that nothing can be learnt from, and why."""

    reason: str
    origin: str


Record = Demonstration | Ranking | Labelled | Prompt | Document | Useless


class Cell(str):
    """The text of a table's cell, whose type is not known: ``"1"`` may be a number."""

    __slots__ = ()


class Row(NamedTuple):
    """One object of a data file, as it was read."""

    fields: dict[str, Any]
    origin: str

    def at(self, field: str) -> str:
        """The place of a field: ``file:line:field``."""
        return f"{self.origin}:{field}"


def to_json(prompt: PromptLike) -> str | list[dict[str, str]]:
    """A prompt as it stands in a canonical line: the string, or the list of its messages."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": turn.role, "content": turn.content} for turn in prompt]


def from_json(value: str | list[dict[str, str]]) -> PromptLike:
    """The inverse of :func:`to_json`."""
    if isinstance(value, str):
        return value
    return tuple(Message(turn["role"], turn["content"]) for turn in value)


def prompt_text(prompt: PromptLike) -> str:
    """A text that equal prompts share, whether written as a string or as a single user turn."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0].role == "user":
        return prompt[0].content
    return json.dumps(to_json(prompt), ensure_ascii=False)


def opening(prompt: PromptLike) -> str:
    """What decides the side of a held-out split: the first user turn, or the whole string.

    A conversation and its own continuation open alike, so neither trains on what the other tests.
    """
    if isinstance(prompt, str):
        return prompt
    return next((turn.content for turn in prompt if turn.role == "user"), prompt_text(prompt))
