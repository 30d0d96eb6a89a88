"""Learning from preferences without a reward model: dpo, odpo, kto, orpo and simpo."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from stages.config.base import (
    Count,
    Flag,
    NonNegative,
    Positive,
    Section,
    disagreement,
)
from stages.config.shared import AnswerData, Optimisation, StageConfig

Smoothing = Annotated[float, Strict(), Field(ge=0, lt=0.5)]


class PreferenceTrain(Optimisation):
    """The optimiser, its schedule and its limits."""

    epochs: Count = 1
    """Passes over the records."""

    batch_size: Count = 64
    """Prompts, each with all its answers, per optimiser step over all processes; Rafailov et al.
    2023, App. B: 64."""

    learning_rate: NonNegative = 1.0e-6
    """Peak learning rate; Rafailov et al. 2023, App. B: 1e-6."""


class PairWeights(Section):
    """How the pairs of a ranking are weighed, as in the reward model's loss."""

    ties: Literal["drop", "half"] = "drop"
    """Pairs of equal rank: dropped (Ouyang et al. 2022, App. C.2), or each way with half weight."""

    denominator: Literal["pairs", "choose2"] = "pairs"
    """What a prompt's sum is divided by: the pairs that were kept, or K·(K−1)/2."""

    reduction: Literal["prompt_mean", "pair_mean"] = "prompt_mean"
    """What weighs the same: every prompt (Ouyang et al. 2022, Eq. 1) or every pair."""


class Dpo(Section):
    """The loss on β·log(π/π_ref) (Rafailov et al. 2023, arXiv 2305.18290, Eq. 7)."""

    loss: Literal["sigmoid", "ipo", "hinge", "plackett_luce"] = "sigmoid"
    """``sigmoid``: Rafailov et al. 2023, Eq. 7; ``ipo``: Azar et al. 2023, Eq. 17; ``hinge``: Zhao
    et al. 2023; ``plackett_luce``: the whole order of the K answers, Rafailov et al. 2023, App.
    A.3."""

    beta: Positive = 0.1
    """How dearly distance from the reference is paid for; ``ipo`` reads it as its τ. Rafailov et
    al. 2023, App. B: 0.1, and 0.5 for summaries."""

    label_smoothing: Smoothing = 0.0
    """Share of pairs whose order is taken to be wrong; ``sigmoid`` only."""

    length_normalised: Flag = False
    """Log-ratios per token in place of sums over the answer."""

    reference_logps: Literal["cached", "live"] = "cached"
    """``cached``: the reference reads every answer once, before the first step, and what it said is
    kept by the content of data and model; ``live``: it reads each batch anew."""

    @model_validator(mode="after")
    def _smooths_only_sigmoid(self) -> Dpo:
        if self.label_smoothing and self.loss != "sigmoid":
            raise disagreement(
                "label_smoothing", f"is for loss: sigmoid, and loss is {self.loss}; set it to 0.0"
            )
        return self


class Odpo(Section):
    """The loss of dpo with an offset (Amini et al. 2024, arXiv 2402.10571)."""

    beta: Positive = 0.1
    """How dearly distance from the reference is paid for; the authors' code tries 0.05 to 0.7."""

    alpha: NonNegative = 1.0
    """Weight of the offset; the authors' code takes 0.5 to 1."""

    offset: Literal["score", "rank"] = "score"
    """How much better an answer is: the difference of the scores, or of the ranks."""

    scale: Literal["log", "identity"] = "log"
    """What is taken of the difference; with ``log`` it must be above 0."""


class Kto(Section):
    """The loss on single answers (Ethayarajh et al. 2024, arXiv 2402.01306)."""

    beta: Positive = 0.1
    """How soon a gain or a loss saturates; Ethayarajh et al. 2024: 0.1."""

    desirable_weight: NonNegative = 1.0
    """λ_D. With n_D desirable and n_U undesirable answers the paper wants λ_D·n_D / (λ_U·n_U)
    between 1 and 3/2."""

    undesirable_weight: NonNegative = 1.0
    """λ_U."""


class Orpo(Section):
    """Fine-tuning on the preferred answer and an odds ratio (Hong et al. 2024)."""

    lam: NonNegative = 0.1
    """λ, the weight of the odds ratio; Hong et al. 2024, arXiv 2403.07691, §5: 0.1."""


class Simpo(Section):
    """The mean log-probability as reward (Meng et al. 2024, arXiv 2405.14734, Eq. 6)."""

    beta: Positive = 2.0
    """Scale of the reward; Meng et al. 2024: 2.0 to 2.5."""

    gamma: NonNegative = 1.0
    """Target margin γ itself; the authors' code asks for γ/β."""


class PreferenceConfig(StageConfig):
    """What the methods that learn from preferences share."""

    preset: Literal["paper"] | None = None
    """A named set of defaults; a key given beside it wins. ``paper``: the method's own paper."""

    data: AnswerData
    """The rankings; kto takes labelled answers too."""

    train: PreferenceTrain = PreferenceTrain()
    """Optimiser, schedule and limits."""


class DpoConfig(PreferenceConfig):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    stage: Literal["dpo"] = "dpo"
    """Which stage this config is for."""

    dpo: Dpo = Dpo()
    """The loss and its reference."""

    ranking: PairWeights = PairWeights()
    """How the pairs of a ranking are weighed."""

    @model_validator(mode="after")
    def _orders_have_no_pairs(self) -> DpoConfig:
        if self.dpo.loss == "plackett_luce" and self.ranking != PairWeights():
            raise disagreement(
                "ranking", "dpo.loss: plackett_luce takes whole orders, not pairs; leave it out"
            )
        return self


class OdpoConfig(PreferenceConfig):
    """Direct preference optimisation with an offset (Amini et al. 2024, arXiv 2402.10571)."""

    stage: Literal["odpo"] = "odpo"
    """Which stage this config is for."""

    odpo: Odpo = Odpo()
    """The loss and its offset."""

    ranking: PairWeights = PairWeights()
    """How the pairs of a ranking are weighed."""


class KtoConfig(PreferenceConfig):
    """Kahneman–Tversky optimisation on labelled answers (Ethayarajh et al. 2024)."""

    stage: Literal["kto"] = "kto"
    """Which stage this config is for."""

    kto: Kto = Kto()
    """The loss and its weights."""

    @model_validator(mode="after")
    def _has_mismatched_pairs(self) -> KtoConfig:
        if self.train.batch_size < 2:
            raise disagreement(
                "train.batch_size",
                "kto compares each prompt with the answers to another one: set it to 2 or more",
            )
        return self


class OrpoConfig(PreferenceConfig):
    """Odds ratio preference optimisation, without a reference (Hong et al. 2024)."""

    stage: Literal["orpo"] = "orpo"
    """Which stage this config is for."""

    orpo: Orpo = Orpo()
    """The weight of the odds ratio."""

    ranking: PairWeights = PairWeights()
    """How the pairs of a ranking are weighed."""


class SimpoConfig(PreferenceConfig):
    """Simple preference optimisation, without a reference (Meng et al. 2024)."""

    stage: Literal["simpo"] = "simpo"
    """Which stage this config is for."""

    simpo: Simpo = Simpo()
    """Scale and margin."""

    ranking: PairWeights = PairWeights()
    """How the pairs of a ranking are weighed."""


PairedConfig = DpoConfig | OdpoConfig | OrpoConfig | SimpoConfig
