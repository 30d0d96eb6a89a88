"""A policy beside another one: asked the same, read by the same models, scored by one judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from stages.answer_figures import Sampled
from stages.answers import Drawing, draw
from stages.batch import Group
from stages.config import ModelReward
from stages.config.rewards import Placed
from stages.data.kinds import PromptItem
from stages.data.store import Store
from stages.data.templates import Codec
from stages.errors import CheckpointError
from stages.functional.divergence import kl_estimate
from stages.functional.judged import win_rate
from stages.groups import read
from stages.models.configured import max_positions as positions_of
from stages.models.configured import policy_config, reads_whole, reward_config
from stages.models.load import Loading, load_policy
from stages.models.network import Network
from stages.models.source import identity_of
from stages.references import answer_logps
from stages.runtime import start
from stages.runtime.processes import World
from stages.scored import BUDGET, Reward, opened


@dataclass(frozen=True)
class Names:
    """What is compared: run folders, model folders or hub ids, and what scores the answers.

    Attributes:
        policy: the one that is evaluated.
        against: another policy, or None.
        reward: the terms of the reward; none where nothing scores.
    """

    policy: str
    against: str | None = None
    reward: tuple[Placed, ...] = ()

    @property
    def policies(self) -> list[str]:
        """One or two."""
        return [self.policy] if self.against is None else [self.policy, self.against]

    @property
    def judges(self) -> dict[str, str]:
        """Name of a term → the reward model that it is."""
        terms = self.reward
        return {each.name: each.term.path for each in terms if isinstance(each.term, ModelReward)}

    def require(self) -> None:
        """All models are there, and of the right kinds.

        Raises:
            CheckpointError: one is missing, damaged or of another kind.
        """
        for name in self.policies:
            policy_config(name, False)
        for name in self.judges.values():
            reward_config(name, False)

    def codec(self) -> Codec:
        """How the policies read text: as the folder of the first one says.

        Where another tool made that, the folder of the other policy says it.

        Raises:
            CheckpointError: they have unlike vocabularies, or were trained with unlike templates.
        """
        trained_here = [name for name in self.policies if identity_of(name) is not None]
        first = (trained_here or [self.policy])[0]
        codec = start.own_codec(first)
        for name in self.policies:
            if name != first and (what := difference(name, codec, first)):
                raise CheckpointError(
                    what,
                    where=name,
                    do="compare models of one base model, trained with one template",
                )
        return codec

    def of_ids(self, codec: Codec) -> list[str]:
        """The terms that read the policies' token ids."""
        pairs = self.judges.items()
        return [
            name
            for name, path in pairs
            if not reads_whole(path) and not difference(path, codec, self.policy)
        ]

    def positions(self, codec: Codec) -> int | None:
        """The longest sequence that all models which read ids have positions for."""
        judges = [reward_config(self.judges[name], False) for name in self.of_ids(codec)]
        configs = [*(policy_config(name, False) for name in self.policies), *judges]
        known = (positions_of(config) for config in configs)
        return min((n for n in known if n is not None), default=None)

    def load(self, codec: Codec, loading: Loading, asked: Store) -> Models:
        """Everything that is needed for answers to some prompts, in evaluation mode.

        Raises:
            CheckpointError: a model cannot be used.
            ConfigError: a term of the reward cannot be opened, or cannot read the prompts.
        """
        judged = self.reward or None
        return Models(
            load_policy(self.policy, loading),
            None if self.against is None else load_policy(self.against, loading),
            judged and opened(self.reward, self.of_ids(codec), codec, loading, asked),
        )


class Models(NamedTuple):
    """The loaded models."""

    policy: Network
    against: Network | None
    reward: Reward | None

    def require_known(self, groups: Sequence[Group]) -> None:
        """Every model that reads ids has an embedding for each token of the answers.

        Raises:
            CheckpointError: one has not.
        """
        last = max(int(ids.max()) for group in groups for ids in group.answers)
        readers = [self.policy, *([self.against] if self.against else [])]
        for network in [*readers, *(self.reward.ids.values() if self.reward else ())]:
            rows = network.module.get_input_embeddings().weight.shape[0]
            if last >= rows:
                raise CheckpointError(
                    f"has embeddings for {rows} tokens, and an answer holds token {last}",
                    where=str(network.module.config.name_or_path),
                    do="compare models whose vocabularies have one size",
                )


def difference(name: str, codec: Codec, first: str) -> str:
    """Why a model does not read text token by token as another one does; empty where it does.

    Args:
        name: of the model.
        codec: of the other one.
        first: its name.
    """
    other = start.own_codec(name)
    tokenizers = (codec.tokenizer, other.tokenizer)
    # Training may have given a tokenizer a pad token, which no text contains.
    pads = {(tokenizer.pad_token, tokenizer.pad_token_id) for tokenizer in tokenizers}
    mine, theirs = (tokenizer.get_vocab().items() for tokenizer in tokenizers)
    if (mine ^ theirs) - pads:
        return f"its vocabulary is not that of {first}"
    says = identity_of(name) is not None and identity_of(first) is not None
    if says and other.template_hash != codec.template_hash:
        return f"it reads prompts by another template than {first}"
    return ""


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

    def figures(self, sizes: Sequence[int]) -> dict[str, Any]:
        """The figures of the policy, and of the one beside it; None where there is none.

        Args:
            sizes: the n of the best-of-n curve.
        """
        beside = self.models.against is not None
        wins = ties = None
        if beside and self.own.scores:
            table, other = self.own.table(), self.other.table()
            wins, ties = float(win_rate(table, other)), float((table == other).double().mean())
        seed = self.drawing.seed
        return {
            **self.own.figures(sizes, seed),
            "win_rate": wins,
            "ties": ties,
            "kl": self.own.kl(),
            "kl_reverse": self.other.kl(),
            "against": self.other.figures(sizes, seed) if beside else None,
        }

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
        self.models.require_known(groups)
        if self.models.reward is not None:
            sampled.scores.extend(self.models.reward.scores(items, rows, groups))
        if against is not None:
            logps = (torch.from_numpy(self._logps(groups, model)) for model in (policy, against))
            sampled.ratios.extend(kl_estimate(*logps, estimator="k1").tolist())

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
