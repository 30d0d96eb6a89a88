"""What the stages have in common that sample answers from their policy and score them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from stages.config.base import (
    Count,
    NonNegative,
    Number,
    Place,
    Positive,
    Section,
    ShareAboveZero,
    Text,
    Whole,
    disagreement,
)
from stages.config.rewards import Placed, Rewards, placed
from stages.config.shared import (
    Checkpoint,
    Evaluate,
    Log,
    Optimisation,
    PromptData,
    StageConfig,
)

_ITERATIONS = 10  # between evaluations and between checkpoints


class EpisodeTrain(Optimisation):
    """The optimiser, its schedule and its limits; in ppo for policy and critic alike."""

    total_episodes: Count | None = None
    """Answers sampled in the whole run, rounded up to whole rollouts; null is one pass over the
    prompts. Ouyang et al. 2022, App. C.4: 256,000 over 31,000 prompts."""

    batch_size: Count = 64
    """Episodes of a minibatch, over all processes; Ouyang et al. 2022, App. C.4."""


class EpisodeEvaluate(Evaluate):
    """When held-out prompts are answered and scored; always at the end."""

    every: Annotated[Count, BeforeValidator(lambda n: _ITERATIONS if n is None else n)] = (
        _ITERATIONS
    )
    """Iterations between evaluations; null is 10."""


class EpisodeCheckpoint(Checkpoint):
    """When the training state is saved, besides at the end and at an interrupt."""

    every: Count = _ITERATIONS
    """Iterations between checkpoints."""


class EpisodeLog(Log):
    """What is told while the run works."""

    every: Count = 1
    """Iterations between logged rows; a row is the mean over its iterations' steps."""

    samples: Whole = 4
    """Sampled answers shown and written with each evaluation, the first iteration and the last."""


class Rollout(Section):
    """How answers are sampled."""

    batch_size: Count = 512
    """Episodes per iteration, over all processes; Ouyang et al. 2022, App. C.4."""

    max_new_tokens: Count = 64
    """Longest answer in tokens, its end token included."""

    temperature: Positive = 1.0
    """Sampling temperature; all log-probabilities are taken at it. Ouyang et al. 2022, App. C.4."""

    top_p: ShareAboveZero = 1.0
    """Sample from the smallest set of tokens with this probability. Below 1 the sampling law is no
    longer the policy's, and ratios and KL are biased."""

    top_k: Whole = 0
    """Sample from the k most probable tokens; 0 is off, and anything else biases ratios and KL."""

    stop: tuple[Text, ...] = ()
    """Further stop tokens, each one token; the end token and the template's end of turn always
    stop."""


class MissingEos(Section):
    """What an answer that hit the length limit gets; at most one of the two."""

    subtract: NonNegative | None = None
    """A penalty that is subtracted from its score."""

    replace: Number | None = None
    """A score that replaces its own; Ziegler et al. 2019 use −1."""

    @model_validator(mode="after")
    def _at_most_one(self) -> MissingEos:
        if self.subtract is not None and self.replace is not None:
            raise disagreement("replace", "given beside subtract: at most one of the two is meant")
        return self


class ScoreRules(Section):
    """What happens to a score before it becomes a reward, in this order."""

    clip: Positive | None = None
    """Scores are cut to ±clip; null leaves them."""

    missing_eos: MissingEos = MissingEos()
    """The rule for answers without an end token; it comes after the clip."""


class KlLimits(Section):
    """When the distance to the reference is too much."""

    warn_above: Positive | None = None
    """Warn when the KL from the reference exceeds this, in nats per answer."""

    stop_above: Positive | None = None
    """Stop the run, with its state saved, when the KL from the reference exceeds this, in nats per
    answer."""


class Kl(KlLimits):
    """The penalty for moving away from the reference (Ouyang et al. 2022, Eq. 2)."""

    coef: NonNegative = 0.02
    """β, the weight of the penalty; Ouyang et al. 2022, App. C.4."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of the KL per token (Schulman 2020); k1 is the difference of log-probabilities."""

    controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether β stays or follows ``target`` (Ziegler et al. 2019, §2.2)."""

    target: Positive = 6.0
    """KL that the adaptive controller aims at, in nats per answer; Ziegler et al. 2019, code."""

    horizon: Count = 10_000
    """Episodes over which the adaptive controller acts: gain = episodes of an iteration / horizon;
    Ziegler et al. 2019, code."""

    gain: Positive | None = None
    """K_β of the adaptive controller; null follows from ``horizon``. Ziegler et al. 2019, §2.2:
    0.1."""

    @model_validator(mode="after")
    def _can_adapt(self) -> Kl:
        if self.controller == "adaptive" and self.coef == 0:
            raise disagreement(
                "coef", "the adaptive controller multiplies it, so it must start above 0, got 0"
            )
        return self


class OnlineConfig(StageConfig):
    """What the stages that learn from answers of their own policy share."""

    model: Place
    """The policy to start from: a run folder, a model folder or a hub id."""

    data: PromptData
    """The prompts."""

    train: EpisodeTrain = EpisodeTrain()
    """Optimiser, schedule and limits."""

    evaluate: EpisodeEvaluate = EpisodeEvaluate()
    """When held-out prompts are answered and scored."""

    checkpoint: EpisodeCheckpoint = EpisodeCheckpoint()
    """When the training state is saved."""

    log: EpisodeLog = EpisodeLog()
    """What is told, how often and to whom."""

    reference: Place | None = None
    """The frozen policy that the KL is measured from; null is the starting policy."""

    reward: Rewards
    """What scores the answers: one term, or a list of terms that are added up."""

    rollout: Rollout = Rollout()
    """How many answers are sampled, and how."""

    score: ScoreRules = ScoreRules()
    """What happens to a score before it becomes a reward."""

    kl: KlLimits = KlLimits()
    """The distance to the reference."""

    @property
    def terms(self) -> tuple[Placed, ...]:
        """The terms of the reward, each with its key and name."""
        return placed(self.reward)

    @property
    def epochs(self) -> int:
        """Passes over each rollout."""
        return 1

    @property
    def per_prompt(self) -> int:
        """Answers to a prompt in one rollout."""
        return 1

    @property
    def together(self) -> int:
        """Answers to a prompt that a loss compares, so that no minibatch parts them."""
        return 1

    @property
    def after_last(self) -> bool:
        """Whether the score lands behind the last token of an answer."""
        return False

    @property
    def leash(self) -> str:
        """The key that holds the policy near its reference."""
        return "kl.coef"

    @model_validator(mode="after")
    def _first_ratio_is_one(self) -> OnlineConfig:
        if self.lora is not None and self.lora.dropout > 0:
            raise disagreement(
                "lora.dropout",
                f"must be 0 in {self.stage}, got {self.lora.dropout:g}: sampling and update would "
                "see different policies",
            )
        return self
