"""A policy beside another one: asked the same, read by the same models, scored by one judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stages.answer_figures import Sampled
from stages.answers import Drawing, draw
from stages.batch import Group
from stages.data.kinds import PromptItem
from stages.data.templates import Codec
from stages.errors import CheckpointError, TrainingError
from stages.functional.divergence import kl_estimate
from stages.groups import read, scorer
from stages.models.load import Loading, load_policy, load_reward, policy_config, reward_config
from stages.models.load import max_positions as positions_of
from stages.models.network import Network
from stages.models.source import identity_of
from stages.references import answer_logps
from stages.runtime import start
from stages.runtime.processes import World

BUDGET = 8192  # tokens of a reading pass


@dataclass(frozen=True)
class Names:
    """The run folders, model folders or hub ids that are compared.

    Attributes:
        policy: the one that is evaluated.
        against: another policy, or None.
        reward: the reward model that scores the answers, or None.
    """

    policy: str
    against: str | None = None
    reward: str | None = None

    def all(self) -> list[str]:
        """Those that are named, each once."""
        named = (self.policy, self.against, self.reward)
        return list(dict.fromkeys(name for name in named if name is not None))

    def positions(self) -> int | None:
        """The longest sequence that all of them have positions for; they are of the right kinds.

        Raises:
            CheckpointError: one is missing, damaged or of another kind.
        """
        configs = [policy_config(name, False) for name in (self.policy, self.against) if name]
        if self.reward is not None:
            configs.append(reward_config(self.reward, False))
        known = (positions_of(config) for config in configs)
        return min((n for n in known if n is not None), default=None)

    def codec(self) -> Codec:
        """How all of them read text: as the policy's folder says.

        Where another tool made that, the folder of the other policy says it.

        Raises:
            CheckpointError: one has another vocabulary, or was trained with another template.
        """
        trained_here = [name for name in (self.policy, self.against) if name and _says(name)]
        first = (trained_here or [self.policy])[0]
        codec = start.own_codec(first)
        for name in self.all():
            if name != first:
                _require_same_text(name, codec, first)
        return codec

    def load(self, loading: Loading) -> Models:
        """Their weights, in evaluation mode."""
        return Models(
            self,
            load_policy(self.policy, loading),
            None if self.against is None else load_policy(self.against, loading),
            None if self.reward is None else load_reward(self.reward, loading).freeze(),
        )


class Models(NamedTuple):
    """The loaded models."""

    names: Names
    policy: Network
    against: Network | None
    reward: Network | None


def _says(name: str) -> bool:
    return identity_of(name) is not None


def _require_same_text(name: str, codec: Codec, first: str) -> None:
    """A model reads the ids of another one.

    Raises:
        CheckpointError: its vocabulary or its template is another.
    """
    other = start.own_codec(name)
    tokenizers = (codec.tokenizer, other.tokenizer)
    # Training may have given a tokenizer a pad token, which no text contains.
    pads = {(tokenizer.pad_token, tokenizer.pad_token_id) for tokenizer in tokenizers}
    mine, theirs = (tokenizer.get_vocab().items() for tokenizer in tokenizers)
    if (mine ^ theirs) - pads:
        raise CheckpointError(
            f"its vocabulary is not that of {first}",
            where=name,
            do="use models that come from the same base model",
        )
    if _says(name) and _says(first) and other.template_hash != codec.template_hash:
        raise CheckpointError(
            f"it reads prompts by another template than {first}",
            where=name,
            do="compare models that were trained with one data.chat_template and data.as_messages",
        )


@dataclass
class Comparison:
    """Counts the answers of both policies, chunk by chunk.

    Attributes:
        models: what answers, and what reads.
        codec: how.
        drawing: how answers are drawn.
        own, other: figures of the policy, and of the one it is compared with.
    """

    models: Models
    codec: Codec
    drawing: Drawing
    own: Sampled
    other: Sampled

    def add(self, items: Sequence[PromptItem], places: Sequence[int]) -> None:
        """Both policies answer some prompts.

        Raises:
            TrainingError: a score is not finite.
            CheckpointError: an answer holds a token that another model does not know.
        """
        policy, against = self.models.policy, self.models.against
        self._count(self.own, policy, against, items, places)
        if against is not None:
            self._count(self.other, against, policy, items, places)

    def _count(
        self,
        sampled: Sampled,
        policy: Network,
        against: Network | None,
        items: Sequence[PromptItem],
        places: Sequence[int],
    ) -> None:
        rows = draw(policy, self.codec, items, places, self.drawing)
        sampled.add(rows)
        groups = [
            Group(item.ids, tuple(answer.ids for answer in row), (1,) * len(row))
            for item, row in zip(items, rows, strict=True)
        ]
        self._require_known(groups)
        if self.models.reward is not None:
            sampled.scores.extend(self._scores(groups, self.models.reward))
        if against is not None:
            logps = (torch.from_numpy(self._logps(groups, model)) for model in (policy, against))
            sampled.ratios.extend(kl_estimate(*logps, estimator="k1").tolist())

    def _scores(self, groups: Sequence[Group], reward: Network) -> np.ndarray:
        found = np.concatenate(read(groups, scorer(reward), budget=BUDGET, world=World()))
        require_finite(found, str(self.models.names.reward))
        return found

    def _logps(self, groups: Sequence[Group], network: Network) -> np.ndarray:
        """log π(y|x) of each answer at the sampling temperature, nats."""
        tau = self.drawing.temperature
        found = read(
            groups,
            lambda batch: answer_logps(network, batch, temperature=tau)[0],
            budget=BUDGET,
            world=World(),
        )
        return np.concatenate(found)

    def _require_known(self, groups: Sequence[Group]) -> None:
        """Every model has an embedding for each token of the answers."""
        last = max(int(ids.max()) for group in groups for ids in group.answers)
        for network in self.models[1:]:
            rows = last + 1 if network is None else embeddings(network)
            if last >= rows:
                raise CheckpointError(
                    f"an answer holds token {last}, and a model has embeddings for {rows} alone",
                    where=self.models.names.policy,
                    do="compare models whose vocabularies have one size",
                )


def embeddings(network: Network) -> int:
    """How many tokens a model has embeddings for."""
    return int(network.module.get_input_embeddings().weight.shape[0])


def require_finite(scores: np.ndarray, reward: str) -> None:
    """A figure of scores that are no numbers would be none.

    Raises:
        TrainingError: a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise TrainingError(
            f"{int((~np.isfinite(scores)).sum())} of its scores are not finite",
            where=reward,
            do="use an earlier checkpoint of the reward model",
        )
