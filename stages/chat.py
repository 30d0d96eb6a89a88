"""``rlhf chat``: talk to one policy, or to two side by side, with scores beside the answers.

The noise of an answer is named by the seed, its turn and how many answers to this turn were drawn
before, so equal sessions repeat, and two policies are compared under equal noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stages.batch import Ids
from stages.config.rewards import Placed
from stages.conversation import (
    Conversation,
    Form,
    Question,
    Speaker,
    in_form,
    require_system,
)
from stages.data.incremental import IncrementalText
from stages.data.records import PromptLike, to_json
from stages.errors import ConfigError
from stages.models.configured import max_positions
from stages.models.generate import Sampling, generate, noise
from stages.models.load import Loading, load_policy
from stages.models.network import casts_kept
from stages.models.precision import choose
from stages.runtime.reporter import Reporter
from stages.runtime.rewards.texts import Answer
from stages.runtime.start import own_codec
from stages.text_reward import open_terms

UNLIMITED = 1 << 20  # positions of a model that does not limit them
MAX_NEW_TOKENS = 256
"""Tokens of an answer where no limit is given and the model has twice as many positions."""


@dataclass(frozen=True)
class ChatOptions:
    """Who talks, and how answers are drawn.

    Attributes:
        policy: run folder, model folder or hub id.
        reward: the terms that score the answers; none where nothing does.
        system: the system text that a conversation begins with.
        form: how policies are asked; None = as their folders say.
        max_new_tokens: longest answer in tokens; None = 256, or half of the positions if fewer.
        temperature: of the softmax; 0 takes the most likely token.
        top_p: share of probability that is sampled from.
        seed: equal seeds and equal turns give equal answers.
        device: ``auto | cpu | cuda | mps``.
        precision: ``auto | bf16 | fp32 | fp64``.
    """

    policy: str
    reward: tuple[Placed, ...] = ()
    system: str | None = None
    form: Form | None = None
    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"


class Reply(NamedTuple):
    """An answer.

    Attributes:
        policy: who gave it.
        prompt: what the policy read, as it would stand in a data file.
        response: the text without its stop token.
        ids: the tokens, with it.
        ended: whether it ended by itself.
        interrupted: whether the person ended it.
        score: what the reward says of prompt and answer; None without a judgement, or interrupted.
    """

    policy: str
    prompt: PromptLike
    response: str
    ids: Ids
    ended: bool
    interrupted: bool
    score: float | None


class _Interruption(Exception):
    """The person does not want to read on."""


class Chat:
    """A session: the conversations with one or two policies, and the reward."""

    def __init__(self, options: ChatOptions, reporter: Reporter) -> None:
        """Load what the options name.

        Raises:
            CheckpointError: a model cannot be used.
            ConfigError: a chat template is needed and missing, an answer leaves no room, or a term
                of the reward cannot be opened.
        """
        self.options, self.reporter = options, reporter
        self.arithmetic = choose(options.device, options.precision)
        speaker, form = self._speaker(options.policy)
        loading = Loading(self.arithmetic)
        self.reward = open_terms(options.reward, loading, reporter) if options.reward else None
        half = max(_positions(speaker) // 2, 1)
        self.max_new_tokens = options.max_new_tokens or min(MAX_NEW_TOKENS, half)
        self.conversations = [self._conversation(speaker, form)]
        self.system: str | None = None
        self.set_system(options.system, where="command line: --system")

    def ask(self, text: str) -> list[Question]:
        """A new turn, for each policy; nothing is answered yet.

        Raises:
            ConfigError: a policy cannot read it.
        """
        return self._questions(text, turn=len(self.conversations[0].exchanges), attempt=0)

    def ask_again(self) -> list[Question]:
        """The last turn once more, for another answer to it.

        Raises:
            ConfigError: there is none.
        """
        said = self.conversations[0].exchanges
        if not said:
            raise ConfigError(
                "there is no answer yet", where="/regenerate", do="say something first"
            )
        last = said[-1]
        return self._questions(last.text, turn=len(said) - 1, attempt=last.attempt + 1)

    def answer(
        self,
        question: Question,
        hear: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """Draw the answer to a question, and keep it in the conversation.

        Args:
            question: of this session.
            hear: is told the text, piece by piece.
            stopped: is asked with each token whether to leave it at what was said before.
        """
        source, codec, network = question.conversation.speaker
        key = (question.turn, question.attempt)
        uniforms = noise(self.options.seed, [key], self.max_new_tokens)
        sampling = Sampling(
            self.max_new_tokens, codec.stop_ids, self.options.temperature, self.options.top_p
        )
        told, interrupted = IncrementalText(codec), False

        def each(token: int) -> None:
            if stopped():
                raise _Interruption
            hear(told.add(token))

        try:
            with casts_kept(network):
                generate(network, [question.ids], uniforms, sampling, hear=each)
        except _Interruption:
            interrupted = True
        hear(told.rest())
        response, ids = codec.decode(told.ids), np.array(told.ids, dtype=np.int64)
        question.conversation.record(question, response)
        ended = bool(told.ids) and told.ids[-1] in codec.stop_ids
        score = None if interrupted else self._score(question, response, ids, ended=ended)
        return Reply(source, question.prompt, response, ids, ended, interrupted, score)

    def set_system(self, system: str | None, *, where: str = "/system") -> None:
        """Give the policies a system text from the next turn on; None takes it away.

        Raises:
            ConfigError: a policy takes none.
        """
        for conversation in self.conversations:
            if system is not None:
                require_system(conversation.speaker, conversation.form, system, where=where)
        self.system = system

    def compare(self, source: str) -> None:
        """Let a second policy answer as well; it takes over the turns so far.

        Raises:
            CheckpointError: it cannot be used.
            ConfigError: it takes no system text, and there is one; a term of the reward cannot read
                its turns; or an answer leaves no room.
        """
        speaker, form = self._speaker(source)
        other = self._conversation(speaker, form)
        if self.system is not None:
            require_system(speaker, form, self.system, where="/compare")
        other.exchanges = list(self.conversations[0].exchanges)
        self.conversations = [self.conversations[0], other]

    def compare_no_more(self) -> None:
        """Only the first policy answers from now on."""
        del self.conversations[1:]

    def reset(self) -> None:
        """Forget what was said, not the system text: the session begins again."""
        for conversation in self.conversations:
            conversation.exchanges, conversation.left_out = [], 0

    def _questions(self, text: str, *, turn: int, attempt: int) -> list[Question]:
        before = any(conversation.left_out for conversation in self.conversations)
        asked = [
            conversation.question(text, turn=turn, attempt=attempt, system=self.system)
            for conversation in self.conversations
        ]
        if not before and any(conversation.left_out for conversation in self.conversations):
            self.reporter.note(
                "the conversation has outgrown the model: it no longer reads the oldest turns"
            )
        return asked

    def _speaker(self, source: str) -> tuple[Speaker, Form]:
        network = load_policy(source, Loading(self.arithmetic)).freeze()
        speaker, form = in_form(Speaker(source, own_codec(source), network), self.options.form)
        if form == "text":
            hint = "; --form messages asks it in turns" if speaker.codec.template else ""
            self.reporter.note(
                f"{source} is asked in plain text: it reads a turn alone, not those before{hint}"
            )
        return speaker, form

    def _conversation(self, speaker: Speaker, form: Form) -> Conversation:
        """A conversation without turns.

        Raises:
            ConfigError: an answer leaves no room for a prompt, or a term cannot read the turns.
        """
        if self.reward is not None:
            self.reward.beside(speaker.codec)
        positions = _positions(speaker)
        room = positions - self.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"{self.max_new_tokens} leaves no room for a prompt in {positions} positions",
                where="command line: --max-new-tokens",
                do=f"give less than {positions}",
            )
        return Conversation(speaker, form, room)

    def _score(self, question: Question, text: str, ids: Ids, *, ended: bool) -> float | None:
        if self.reward is None:
            return None
        codec, prompt = question.conversation.speaker.codec, question.prompt
        answer = Answer(
            prompt=prompt,
            text=text,
            cut=not ended,
            rendered=codec.decode(question.ids),
            record={"prompt": to_json(prompt)},
            origin="",
            ids=tuple(ids.tolist()),
            vocabulary=codec.vocabulary_hash,
        )
        return self.reward.beside(codec).judge([answer]).scores[0]


def _positions(speaker: Speaker) -> int:
    """The longest sequence that a policy has positions for."""
    return max_positions(speaker.network.module.config) or UNLIMITED
