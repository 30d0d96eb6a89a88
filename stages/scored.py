"""What a reward says of sampled answers outside of a run: its terms opened once.

A reward model of the policy's vocabulary and template reads the sampled ids, any other term the
text, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stages.batch import Group
from stages.config import ModelReward
from stages.config.rewards import Placed
from stages.data.kinds import PromptItem
from stages.data.store import Store
from stages.data.templates import Codec
from stages.errors import TrainingError
from stages.groups import read, scorer
from stages.judges import Failure, columns, judge
from stages.models.configured import reads_whole
from stages.models.generate import Answer
from stages.models.load import Loading, load_reward
from stages.models.network import Network
from stages.runtime import start
from stages.runtime.processes import World
from stages.runtime.rewards.model import opened as open_model
from stages.runtime.rewards.model import require_readable
from stages.runtime.rewards.texts import Scorer
from stages.terms import plain_scorer

BUDGET = 8192  # tokens of a reading pass


@dataclass(frozen=True)
class Reward:
    """The terms of a reward, ready to judge.

    Attributes:
        terms: as configured.
        codec: of the policy whose answers are judged.
        ids: the terms that read the policy's token ids, by name.
        texts: the terms that read texts, by name.
    """

    terms: tuple[Placed, ...]
    codec: Codec
    ids: Mapping[str, Network] = field(default_factory=dict)
    texts: Mapping[str, Scorer] = field(default_factory=dict)

    def scores(
        self,
        items: Sequence[PromptItem],
        rows: Sequence[Sequence[Answer]],
        groups: Sequence[Group],
    ) -> np.ndarray:
        """One score for each answer, prompt by prompt, in float64.

        Args:
            items: the prompts.
            rows: the K answers to each.
            groups: the same as ids.

        Raises:
            TrainingError: a term failed, none judges an answer, or a score is not finite.
        """
        asked = [item for item, row in zip(items, rows, strict=True) for _ in row]
        answers = [answer for row in rows for answer in row]
        # Without the moments of a run, normalised terms stay as they are.
        judging = judge(self.terms, self.texts, asked, self.codec, {}, learn=False)
        raw = torch.zeros(len(answers), len(self.terms), dtype=torch.float64)
        judged = torch.ones(raw.shape, dtype=torch.bool)
        for name, network in self.ids.items():
            found = read(groups, scorer(network), budget=BUDGET, world=World())
            raw[:, judging.names.index(name)] = torch.from_numpy(np.concatenate(found))
        texts = judging.read(range(len(answers)), answers)
        if isinstance(texts, Failure):
            raise texts.error()
        why = columns(texts, judging.names, raw, judged)
        for n in (~judged.any(dim=1)).nonzero()[:, 0].tolist():
            raise TrainingError(
                "no term of the reward has a judgement of an answer to "
                f"{judging.told(n, answers[n])} ({why[n]})",
                where="reward",
                do="let the reward judge it, or add a term that judges every answer",
            )
        scores = judging.weigh(raw, judged).scores.numpy()
        require_finite(scores, ", ".join(judging.names))
        return scores


def opened(
    terms: tuple[Placed, ...], of_ids: Sequence[str], codec: Codec, loading: Loading, asked: Store
) -> Reward:
    """Open the terms of a reward.

    Args:
        terms: of the reward.
        of_ids: the names of the reward models that read the policy's ids.
        codec: of the policy.
        loading: how models are loaded.
        asked: the prompts, which the terms must be able to read.

    Raises:
        ConfigError: a file cannot be opened, or a model of another tokenizer cannot read them.
        CheckpointError: a model cannot be used.
    """
    texts = {each.name: found for each in terms if (found := plain_scorer(each)) is not None}
    ids: dict[str, Network] = {}
    for key, name, term in terms:
        if not isinstance(term, ModelReward):
            continue
        if name in of_ids:
            ids[name] = load_reward(term.path, loading).freeze()
            continue
        if not reads_whole(term.path):
            prompts = (item.prompt for item in asked)
            require_readable(start.own_codec(term.path), prompts, term.path, key)
        texts[name] = open_model(term.path, loading, BUDGET)
    return Reward(terms, codec, ids, texts)


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
