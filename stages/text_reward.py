"""A reward without a run: it reads texts, and no moments of earlier rollouts normalise its terms.

Token ids that an answer was sampled with go before its text where they are of the vocabulary of the
reward model that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages import judges, terms
from stages.config.rewards import ModelReward, Placed
from stages.data.templates import Codec
from stages.models.configured import reward_config
from stages.models.load import Loading
from stages.runtime.reporter import Reporter
from stages.runtime.rewards.model import Reader, opened, without_template
from stages.runtime.rewards.texts import Answer, Scorer
from stages.scored import require_finite

BUDGET = 8192  # tokens of a reward model's micro-batch


class Verdict(NamedTuple):
    """What the J terms say of B answers.

    Attributes:
        scores: of each answer; None where no term has a judgement.
        raw: ``[B, J]`` what each term says.
        judged: ``[B, J]`` bool, False = no judgement.
    """

    scores: list[float | None]
    raw: Tensor
    judged: Tensor


@dataclass(frozen=True)
class TextReward:
    """The terms of a reward, ready to read texts.

    Attributes:
        terms: as configured.
        scorers: one for each, by name.
    """

    terms: tuple[Placed, ...]
    scorers: Mapping[str, Scorer]

    @property
    def reads_turns(self) -> bool:
        """Whether a model reads a dialogue in one string as turns."""
        readers = (each for each in self.scorers.values() if isinstance(each, Reader))
        return any(reader.codec.as_messages for reader in readers)

    def beside(self, codec: Codec) -> TextReward:
        """The same for answers of a policy that is asked in turns, or in plain text.

        A model of the policy's vocabulary that has no chat template reads turns by the policy's.

        Args:
            codec: of the policy.

        Raises:
            ConfigError: turns have to be read, and a model of another vocabulary has no template.
        """
        scorers = dict(self.scorers)
        for key, name, _ in self.terms:
            scorer = scorers[name]
            if not (codec.as_messages and isinstance(scorer, Reader)) or scorer.codec.template:
                continue
            if scorer.codec.vocabulary_hash != codec.vocabulary_hash:
                raise without_template(str(scorer.network.module.config.name_or_path), key)
            scorers[name] = replace(scorer, codec=codec)
        return replace(self, scorers=scorers)

    def judge(self, answers: Sequence[Answer]) -> Verdict:
        """One score for each answer, in float64.

        Raises:
            TrainingError: a term fails, or a score is not finite.
        """
        raw = torch.zeros((len(answers), len(self.terms)), dtype=torch.float64)
        judged = torch.ones(raw.shape, dtype=torch.bool)
        found = {name: scorer(answers) for name, scorer in self.scorers.items()}
        names = [each.name for each in self.terms]
        judges.columns(found, names, raw, judged)
        as_they_are = [each._replace(term=_not_normalised(each.term)) for each in self.terms]
        totals = judges.weighed(as_they_are, raw, judged, {}, learn=False).scores.tolist()
        require_finite(np.array(totals), ", ".join(names))
        known = judged.any(dim=1).tolist()
        scores = [total if there else None for total, there in zip(totals, known, strict=True)]
        return Verdict(scores, raw, judged)


def open_terms(placed: tuple[Placed, ...], loading: Loading, reporter: Reporter) -> TextReward:
    """Open the terms; those without a model first, as they cost nothing.

    Raises:
        ConfigError: a term cannot be opened.
        CheckpointError: a reward model cannot be used.
    """
    found: dict[str, Any] = {each.name: terms.plain_scorer(each) for each in placed}
    for each in placed:
        if isinstance(each.term, ModelReward):
            reward_config(each.term.path, loading.trust_remote_code)
        if each.term.normalise:
            reporter.note(f"{each.key}.normalise is left out: there is no run to normalise over")
    for each in placed:
        if isinstance(each.term, ModelReward):
            found[each.name] = opened(each.term.path, loading, BUDGET)
    return TextReward(placed, found)


def _not_normalised(term: Any) -> Any:
    return term.model_copy(update={"normalise": False})
