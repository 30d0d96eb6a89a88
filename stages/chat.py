"""``rlhf chat``: talk to one policy, or to two side by side, with scores beside the answers.

The noise of an answer is named by the seed, its turn and how many answers to this turn were drawn
before, so equal sessions repeat, and two policies are compared under equal noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stages.batch import Ids, behind, pack
from stages.conversation import (
    Conversation,
    Form,
    Question,
    Speaker,
    in_form,
    require_system,
)
from stages.data.incremental import IncrementalText
from stages.data.records import PromptLike
from stages.errors import CheckpointError, ConfigError, TrainingError
from stages.models.configured import max_positions
from stages.models.folder import model_folder, read_identity
from stages.models.forward import scores
from stages.models.generate import Sampling, generate, noise
from stages.models.load import Loading, load_policy, load_reward, load_tokenizer
from stages.models.network import casts_kept
from stages.models.precision import choose
from stages.runtime.reporter import Reporter
from stages.runtime.start import own_codec

UNLIMITED = 1 << 20  # positions of a model that does not limit them
MAX_NEW_TOKENS = 256
"""Tokens of an answer where no limit is given and the model has twice as many positions."""


@dataclass(frozen=True)
class ChatOptions:
    """Who talks, and how answers are drawn.

    Attributes:
        policy: run folder, model folder or hub id.
        reward: a reward model that reads the same ids, or None.
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
    reward: str | None = None
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
        score: what the reward model says of prompt and answer; None without one, or interrupted.
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
    """A session: the conversations with one or two policies, and the reward model."""

    def __init__(self, options: ChatOptions, reporter: Reporter) -> None:
        """Load what the options name.

        Raises:
            CheckpointError: a model cannot be used, or the reward model reads another vocabulary.
            ConfigError: a chat template is needed and missing, or an answer leaves no room.
        """
        self.options, self.reporter = options, reporter
        self.arithmetic = choose(options.device, options.precision)
        speaker, form = self._speaker(options.policy)
        self.reward = (
            None
            if options.reward is None
            else load_reward(options.reward, Loading(self.arithmetic)).freeze()
        )
        half = max(self._positions(speaker) // 2, 1)
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
        score = None if interrupted else self._score(question.ids, ids)
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
            CheckpointError: it cannot be used, or the reward model reads another vocabulary.
            ConfigError: it takes no system text, and there is one; or an answer leaves no room.
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
            CheckpointError: the reward model reads another vocabulary.
            ConfigError: an answer leaves no room for a prompt.
        """
        if self.options.reward is not None:
            _require_reads(self.options.reward, speaker, self.reporter)
        room = self._positions(speaker) - self.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"{self.max_new_tokens} leaves no room for a prompt in {self._positions(speaker)} "
                "positions",
                where="command line: --max-new-tokens",
                do=f"give less than {self._positions(speaker)}",
            )
        return Conversation(speaker, form, room)

    def _positions(self, speaker: Speaker) -> int:
        """The longest sequence that the policy and the reward model have positions for."""
        networks = [speaker.network, *([] if self.reward is None else [self.reward])]
        return min(max_positions(network.module.config) or UNLIMITED for network in networks)

    @torch.no_grad()
    def _score(self, prompt: Ids, answer: Ids) -> float | None:
        if self.reward is None:
            return None
        batch = pack([behind(prompt, answer)]).to(self.reward.device)
        score = float(scores(self.reward, batch)[0])
        if not math.isfinite(score):
            raise TrainingError(
                f"the score of an answer is {score}",
                where=str(self.options.reward),
                do="use an earlier checkpoint of the reward model",
            )
        return score


def _require_reads(reward: str, speaker: Speaker, reporter: Reporter) -> None:
    """A reward model reads the tokens of a policy; another template is told.

    Raises:
        CheckpointError: its vocabulary is another.
    """
    mine, its = speaker.codec.tokenizer, load_tokenizer(reward)
    # A stage may have given its tokenizer a pad token, which no text contains.
    pads = {(t.pad_token, t.pad_token_id) for t in (mine, its)}
    if (mine.get_vocab().items() ^ its.get_vocab().items()) - pads:
        raise CheckpointError(
            f"its vocabulary is not that of {speaker.source}",
            where=reward,
            do="name a reward model that comes from the same base model",
        )
    folder = model_folder(reward)
    identity = read_identity(folder) if folder.is_dir() else None
    if identity is not None and identity.template_hash != speaker.codec.template_hash:
        reporter.warn(
            f"{reward} was trained with another chat template, or another data.as_messages, than "
            f"{speaker.source}: its scores may mean little"
        )
