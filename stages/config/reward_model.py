"""The reward model: the config of ``rlhf train-rm``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from stages.config.base import Count, NonNegative, Place, Section, Text, kind
from stages.config.shared import AnswerData, Optimisation, StageConfig


class RewardTrain(Optimisation):
    """The optimiser, its schedule and its limits."""

    epochs: Count = 1
    """Passes over the rankings; Ouyang et al. 2022, App. C.2: one, more overfits."""

    batch_size: Count = 64
    """Prompts, each with all its answers, per optimiser step over all processes; Ouyang et al.
    2022, App. C.2: 64 (up to 2,304 pairs)."""


class PerRank(Section):
    """A margin that grows with the distance in rank."""

    per_rank: NonNegative
    """Margin for each rank between the two answers."""


Margin = Annotated[
    Annotated[NonNegative, Tag("<number>")]
    | Annotated[PerRank, Tag("<section>")]
    | Annotated[Literal["data"], Tag("<text>")],
    Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message="expected a number ≥ 0, {per_rank: x}, or data",
    ),
]


class RankingLoss(Section):
    """The loss −log σ(r_w − r_l − margin) over the pairs of a ranking (Ouyang et al. 2022, Eq. 1).

    All pairs of a prompt's K answers stay in one batch element.
    """

    ties: Literal["drop", "half"] = "drop"
    """Pairs of equal rank: dropped (Ouyang et al. 2022, App. C.2), or each way with half weight."""

    denominator: Literal["pairs", "choose2"] = "pairs"
    """What a prompt's sum is divided by: the pairs that were kept, or K·(K−1)/2."""

    reduction: Literal["prompt_mean", "pair_mean"] = "prompt_mean"
    """What weighs the same: every prompt (the 1/C(K,2) of Eq. 1) or every pair."""

    margin: Margin = 0.0
    """How far apart the two scores shall be: a number, ``{per_rank: x}``, or ``data`` (the line's
    ``margin``, otherwise the difference of its scores); Touvron et al. 2023, Eq. 2."""

    center_coef: NonNegative = 0.0
    """Weight of (r_w + r_l)², which keeps the scores around 0; Eisenstein et al. 2023 use 0.01."""


class Normalise(Section):
    """Which scores have mean 0 after training, since the loss leaves their offset open."""

    on: Literal["demonstrations", "reference", "none"] = "demonstrations"
    """``demonstrations`` get mean 0 (Ouyang et al. 2022, §3.5); samples of the ``reference`` policy
    get mean 0 and standard deviation 1 (Ziegler et al. 2019); ``none`` leaves the scores."""

    demonstrations: Text | None = None
    """File of demonstrations; null takes the best-ranked answers of ``data.train``."""

    policy: Place | None = None
    """The reference policy whose answers are sampled; null takes ``model``."""

    samples: Annotated[Count, Field(ge=2)] = 256
    """How many answers are scored for it."""

    max_new_tokens: Count = 64
    """Longest sampled answer in tokens."""


class RewardModelConfig(StageConfig):
    """A reward model from rankings of K answers (Ouyang et al. 2022, §3.5 and App. C.2)."""

    stage: Literal["reward_model"] = "reward_model"
    """Which stage this config is for."""

    preset: Literal["instructgpt"] | None = None
    """A named set of defaults; a key given beside it wins. ``instructgpt``: Ouyang et al. 2022,
    App. C.2."""

    model: Place
    """Model to start from: a policy gets a fresh head, a reward model goes on with its own. A run
    folder, a model folder or a hub id."""

    data: AnswerData
    """The rankings."""

    train: RewardTrain = RewardTrain()
    """Optimiser, schedule and limits."""

    ranking: RankingLoss = RankingLoss()
    """The loss over the pairs of a ranking."""

    normalise: Normalise = Normalise()
    """Which scores have mean 0 after training."""
