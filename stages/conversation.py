"""What was said between a person and one policy, and what the policy is given to read of it.

A policy that is asked in turns reads the system text and the earlier turns through its chat
template, built by the codec as in every other stage; one that is asked in plain text reads the text
alone, as it did in training. When a conversation outgrows the model, its oldest turns are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from stages.batch import Ids
from stages.data.records import Message, PromptLike
from stages.data.templates import Codec
from stages.errors import ConfigError
from stages.models.network import Network

Form = Literal["messages", "text"]


class Speaker(NamedTuple):
    """A policy under the name it was asked for, how it reads and writes text, and its network."""

    source: str
    codec: Codec
    network: Network


class Exchange(NamedTuple):
    """A turn of the person, the answer that stands behind it, and how many were drawn before it."""

    text: str
    answer: str
    attempt: int


class Question(NamedTuple):
    """What one policy is about to be asked.

    Attributes:
        conversation: it belongs to.
        turn: its place among the exchanges.
        text: what the person said.
        attempt: how many answers to it were drawn before.
        prompt: what the policy is given, as it would stand in a data file.
        ids: the tokens of the prompt.
    """

    conversation: Conversation
    turn: int
    text: str
    attempt: int
    prompt: PromptLike
    ids: Ids


@dataclass
class Conversation:
    """One policy's side of what was said.

    Attributes:
        speaker: the policy.
        form: whether it is asked in turns through its chat template, or in plain text.
        room: tokens that a prompt may have.
        exchanges: all turns so far.
        left_out: how many of the first ones no longer fit.
    """

    speaker: Speaker
    form: Form
    room: int
    exchanges: list[Exchange] = field(default_factory=list)
    left_out: int = 0

    def question(self, text: str, *, turn: int, attempt: int, system: str | None) -> Question:
        """The text behind the turns before it, as many of them as fit.

        Raises:
            ConfigError: the text does not fit even alone, or the template refuses the turns.
        """
        left_out = min(self.left_out, turn)
        while True:
            prompt = self._prompt(self.exchanges[left_out:turn], text, system)
            ids = self.speaker.codec.encode_prompt(prompt).ids
            if 0 < len(ids) <= self.room:
                break
            if self.form == "text" or left_out == turn:
                raise _does_not_fit(len(ids), self.room, self.speaker.source)
            left_out += 1
        self.left_out = left_out
        return Question(self, turn, text, attempt, prompt, ids)

    def record(self, question: Question, answer: str) -> None:
        """The answer stands behind its question; what stood there before is replaced."""
        said = Exchange(question.text, answer, question.attempt)
        self.exchanges[question.turn :] = [said]

    def _prompt(self, before: Sequence[Exchange], text: str, system: str | None) -> PromptLike:
        if self.form == "text":
            return text
        turns = [] if system is None else [Message("system", system)]
        for exchange in before:
            turns += [Message("user", exchange.text), Message("assistant", exchange.answer)]
        return (*turns, Message("user", text))


def in_form(speaker: Speaker, form: Form | None) -> tuple[Speaker, Form]:
    """The policy and how it is asked: as its folder says unless a form is given.

    Raises:
        ConfigError: it has no chat template for messages.
    """
    codec = speaker.codec
    if form == "messages" and codec.template is None:
        raise _no_template(speaker, where="command line: --form")
    if form is None:
        form = "messages" if codec.as_messages else "text"
    return speaker._replace(codec=replace(codec, as_messages=form == "messages")), form


def require_system(speaker: Speaker, form: Form, system: str, *, where: str) -> None:
    """The policy can be given a system text.

    Raises:
        ConfigError: it is asked in plain text, or its template has no place for one.
    """
    if speaker.codec.template is None:
        raise _no_template(speaker, where=where)
    if form == "text":
        raise ConfigError(
            f"{speaker.source} is asked in plain text, which has no place for a system text",
            where=where,
            do="start with --form messages, if the policy was trained on messages",
        )
    try:
        speaker.codec.render((Message("system", system), Message("user", "a")))
    except ConfigError as error:
        raise ConfigError(
            f"{speaker.source} takes no system text: {error.what}",
            where=where,
            do="leave the system text out, and say it in a turn of your own",
        ) from error


def _no_template(speaker: Speaker, *, where: str) -> ConfigError:
    return ConfigError(
        f"{speaker.source} has no chat template, which messages and a system text need",
        where=where,
        do="ask it in plain text, or name a policy that was trained on messages",
    )


def _does_not_fit(tokens: int, room: int, source: str) -> ConfigError:
    if not tokens:
        return ConfigError(
            "the text has no token that the model knows", where=source, do="write something else"
        )
    return ConfigError(
        f"the text has {tokens} tokens, and {room} fit beside an answer",
        where=source,
        do="shorten it, or lower --max-new-tokens",
    )
