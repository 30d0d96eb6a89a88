"""Rewards of type ``model`` that have a tokenizer or template of their own: they read the text.

Prompt and answer are written once more, in the model's own template and tokens, and read as its
training read them: the score stands at the last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.batch import Example, Ids, behind, pack
from stages.data.encode import encode_prompt
from stages.data.fit import Limits, response_ids
from stages.data.plan import micro_batches
from stages.data.records import Prompt, PromptLike, Response, prompt_text
from stages.data.templates import Codec
from stages.errors import ConfigError
from stages.models.configured import max_positions, reads_whole
from stages.models.forward import scores
from stages.models.load import Loading, load_reward, load_tokenizer, load_whole
from stages.models.network import Network
from stages.runtime.rewards.encoder import TOO_LONG, Encoder
from stages.runtime.rewards.texts import Absent, Answer, Score, Scorer
from stages.runtime.start import own_codec

UNKNOWN = "none of its text is known to the tokenizer of the reward model"
NOTHING = "neither prompt nor answer has a token"
NO_TEXT = "it holds token ids that are no text in the policy's tokenizer"


@dataclass(frozen=True)
class Reader:
    """A scorer that reads texts with a reward model.

    Attributes:
        network: the model.
        codec: its tokenizer and template.
        budget: tokens of a micro-batch.
    """

    network: Network
    codec: Codec
    budget: int

    def __call__(self, answers: Sequence[Answer]) -> list[Score]:
        """A score for each answer that can be written in the model's tokens."""
        found: list[Any] = [self._encoded(answer) for answer in answers]
        places = [n for n, example in enumerate(found) if isinstance(example, Example)]
        read = read_scores(self.network, [found[n] for n in places], self.budget)
        for n, score in zip(places, read, strict=True):
            found[n] = score
        return found

    def _encoded(self, answer: Answer) -> Example | Absent:
        """Prompt and answer; of what is too long the oldest part of the prompt is left out."""
        ids = self._ids(answer)
        if isinstance(ids, Absent):
            return ids
        positions = max_positions(self.network.module.config)
        if positions is not None and len(ids) >= positions:
            return Absent(TOO_LONG)
        limits = Limits(positions=positions, truncate=True)
        asked = Prompt(answer.prompt, answer.origin)
        prompt = encode_prompt(asked, self.codec, limits, reserve=len(ids))
        start = ids[:0] if isinstance(prompt, str) else prompt.ids
        return behind(start, ids) if len(start) + len(ids) else Absent(NOTHING)

    def _ids(self, answer: Answer) -> Ids | Absent:
        """The ids that an answer was sampled with, where they are of this vocabulary; its text's.

        Ids whose vocabulary is not told are taken for this one where they say the answer's text.
        """
        codec = self.codec
        end = codec.end_of(answer.prompt)
        flags = ("cut",) if answer.cut else ()
        if answer.ids is not None and answer.vocabulary == codec.vocabulary_hash:
            given = Response(answer.text, None, None, answer.ids, answer.vocabulary, flags)
            return response_ids(given, codec, end)
        if answer.ids and answer.vocabulary is None and _say(codec, answer.ids, answer.text):
            return np.array(answer.ids, dtype=np.int32)
        if not answer.whole:
            return Absent(NO_TEXT)
        ids = response_ids(Response(answer.text, flags=flags), codec, end)
        return ids if _is_known(codec, ids, answer.text) else Absent(UNKNOWN)


def _say(codec: Codec, ids: Sequence[int], text: str) -> bool:
    return max(ids) < len(codec.tokenizer) and codec.decode(ids) == text


def _is_known(codec: Codec, ids: Ids, text: str) -> bool:
    """Whether anything of a text is left in its ids but special tokens, such as the unknown one."""
    return not text.strip() or bool(codec.decode(ids).strip())


@torch.no_grad()
def read_scores(network: Network, examples: Sequence[Example], budget: int) -> list[float]:
    """The score of each sequence, read in packed rows of at most ``budget`` tokens."""
    found = [0.0] * len(examples)
    network.module.eval()
    for rows in micro_batches([len(example.ids) for example in examples], budget):
        batch = pack([examples[n] for n in rows]).to(network.device)
        for n, score in zip(rows, scores(network, batch).tolist(), strict=True):
            found[int(n)] = score
    return found


def opened(source: str, loading: Loading, budget: int) -> Scorer:
    """A reward model as a scorer of texts.

    Raises:
        CheckpointError: it cannot be used.
    """
    if reads_whole(source, loading.trust_remote_code):
        tokenizer = load_tokenizer(source, trust_remote_code=loading.trust_remote_code)
        return Encoder(load_whole(source, loading).freeze(), tokenizer, budget)
    codec = own_codec(source, trust_remote_code=loading.trust_remote_code)
    return Reader(load_reward(source, loading).freeze(), codec, budget)


def require_readable(codec: Codec, prompts: Iterator[PromptLike], source: str, key: str) -> None:
    """The model's template takes prompts like these, and its tokenizer knows their words.

    Raises:
        ConfigError: they are messages and it has no template, or none of the text is known.
    """
    known = False
    for prompt in prompts:
        if codec.turns(prompt) is not None and codec.template is None:
            raise without_template(source, key)
        if not known:
            text = prompt_text(prompt)
            known = _is_known(codec, codec.encode_response(text, cut=True), text)
    if not known:
        raise ConfigError(
            f"the tokenizer of {source} knows none of the text of the prompts",
            where=f"{key}.path: {source}",
            do="name a reward model of the same language and writing",
        )


def without_template(source: str, key: str) -> ConfigError:
    """The error of a model that has to read messages, under a key of the config."""
    return ConfigError(
        f"the prompts are messages, and the tokenizer of {source} has no chat template",
        where=f"{key}.path: {source}",
        do="put a chat template into its tokenizer_config.json, or name another model",
    )
