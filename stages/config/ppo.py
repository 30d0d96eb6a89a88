"""Reinforcement learning from the reward model: the config of ``rlhf ppo``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from stages.config.base import (
    Count,
    Flag,
    NonNegative,
    Number,
    Place,
    Positive,
    Section,
    Share,
    ShareAboveZero,
    Text,
    Whole,
    disagreement,
)
from stages.config.shared import (
    Checkpoint,
    Evaluate,
    Log,
    Optimisation,
    PromptData,
    StageConfig,
)

_ITERATIONS = 10  # between evaluations and between checkpoints


class PpoTrain(Optimisation):
    """The optimiser, its schedule and its limits, for policy and critic alike."""

    total_episodes: Count | None = None
    """Answers sampled in the whole run, rounded up to whole rollouts; null is one pass over the
    prompts. Ouyang et al. 2022, App. C.4: 256,000 over 31,000 prompts."""

    batch_size: Count = 64
    """Episodes of a minibatch, over all processes; Ouyang et al. 2022, App. C.4."""


class PpoEvaluate(Evaluate):
    """When held-out prompts are answered and scored; always at the end."""

    every: Annotated[Count, BeforeValidator(lambda n: _ITERATIONS if n is None else n)] = (
        _ITERATIONS
    )
    """Iterations between evaluations; null is 10."""


class PpoCheckpoint(Checkpoint):
    """When the training state is saved, besides at the end and at an interrupt."""

    every: Count = _ITERATIONS
    """Iterations between checkpoints."""


class PpoLog(Log):
    """What is told while the run works."""

    every: Count = 1
    """Iterations between logged rows; a row is the mean over its iterations' steps."""

    samples: Whole = 4
    """Sampled answers shown and written with each evaluation, the first iteration and the last."""


class ModelReward(Section):
    """A reward model scores the whole answer."""

    type: Literal["model"] = "model"
    """What kind of reward this is."""

    path: Place
    """Reward model: a run folder or a model folder."""


class Critic(Section):
    """The value network, a model of its own with an optimiser of its own (Ouyang et al. 2022)."""

    init: Place = "reward"
    """Where it starts: ``reward`` (the reward model; Ouyang et al. 2022, App. C.4), ``policy`` with
    a fresh head, or the folder of an earlier run."""

    learning_rate: NonNegative | None = None
    """Peak learning rate; null takes ``train.learning_rate``. Ouyang et al. 2022, App. C.4:
    9e-6."""


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


class Ppo(Section):
    """Advantages and the clipped losses (Schulman et al. 2016 and 2017)."""

    epochs: Count = 1
    """Passes over each rollout; Ouyang et al. 2022, App. C.4: one."""

    clip_range: Positive = 0.2
    """ε of the clipped ratio (Schulman et al. 2017, Eq. 7); Ouyang et al. 2022, App. C.4."""

    value_clip_range: Positive | None = 0.2
    """How far a value may move from the one at sampling time before its loss is clipped; null does
    not clip. Ziegler et al. 2019, code."""

    gamma: Share = 1.0
    """Discount per token; Ouyang et al. 2022, App. C.4: none."""

    lam: Share = 0.95
    """λ of the generalised advantage estimate (Schulman et al. 2016, Eq. 16); the value is that of
    Ziegler et al. 2019, code."""

    whiten_advantages: Flag = True
    """Give the advantages of a rollout mean 0 and variance 1; Ziegler et al. 2019, code."""

    whiten_rewards: Flag = False
    """Give the rewards of a rollout variance 1, keeping their mean."""

    aggregation: Literal["token_mean", "seq_mean", "fixed_length"] = "token_mean"
    """Average of the policy and value losses: over all tokens, first over each answer's, or over
    ``rollout.max_new_tokens`` for every answer."""

    ent_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""

    target_kl: Positive | None = None
    """KL (k3, nats per token) from the sampling policy above which the rest of an iteration's
    updates is left out; null never stops early."""


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


class Score(Section):
    """What happens to the reward model's score before it becomes a reward, in this order."""

    clip: Positive | None = None
    """Scores are cut to ±clip; null leaves them."""

    missing_eos: MissingEos = MissingEos()
    """The rule for answers without an end token; it comes after the clip."""

    position: Literal["last", "after_last"] = "last"
    """The token whose reward carries the score: the last one, or one slot later where there is
    room."""


class Kl(Section):
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

    warn_above: Positive | None = None
    """Warn when the KL from the reference exceeds this, in nats per answer."""

    stop_above: Positive | None = None
    """Stop the run, with its state saved, when the KL from the reference exceeds this, in nats per
    answer."""

    @model_validator(mode="after")
    def _can_adapt(self) -> Kl:
        if self.controller == "adaptive" and self.coef == 0:
            raise disagreement(
                "coef", "the adaptive controller multiplies it, so it must start above 0, got 0"
            )
        return self


class Ptx(Section):
    """Pretraining gradients mixed into the updates, PPO-ptx (Ouyang et al. 2022, Eq. 2)."""

    data: Text | None = None
    """File of pretraining text; null is plain PPO."""

    coef: NonNegative = 0.0
    """γ, the weight of the pretraining loss; Ouyang et al. 2022, App. C.4: 27.8."""

    ratio: Count = 8
    """Pretraining documents per episode; Ouyang et al. 2022, App. C.4."""

    max_tokens: Count = 512
    """Longest document in tokens; a longer one is cut into pieces, which are all used."""

    aggregation: Literal["token_mean", "seq_mean"] = "token_mean"
    """Average of the pretraining loss: over all tokens, or first over each document's."""

    @model_validator(mode="after")
    def _data_and_coef_together(self) -> Ptx:
        if self.coef > 0 and self.data is None:
            raise disagreement(
                "data", f"ptx.coef is {self.coef:g}, which needs a file of pretraining text"
            )
        if self.data is not None and self.coef == 0:
            raise disagreement(
                "coef", f'is 0, so ptx.data "{self.data}" would never be read; give a weight > 0'
            )
        return self


class PpoConfig(StageConfig):
    """PPO against a reward model (Ouyang et al. 2022, §3.5 and App. C.4)."""

    stage: Literal["ppo"] = "ppo"
    """Which stage this config is for."""

    preset: Literal["instructgpt", "walkthrough"] | None = None
    """A named set of defaults; a key given beside it wins. ``instructgpt``: Ouyang et al. 2022,
    App. C.4; ``walkthrough``: the constants of DeepSpeed-Chat's PPO trainer."""

    model: Place
    """The policy to start from: a run folder, a model folder or a hub id."""

    data: PromptData
    """The prompts."""

    train: PpoTrain = PpoTrain()
    """Optimiser, schedule and limits."""

    evaluate: PpoEvaluate = PpoEvaluate()
    """When held-out prompts are answered and scored."""

    checkpoint: PpoCheckpoint = PpoCheckpoint()
    """When the training state is saved."""

    log: PpoLog = PpoLog()
    """What is told, how often and to whom."""

    reference: Place | None = None
    """The frozen policy that the KL penalty measures from; null is the starting policy."""

    reward: ModelReward
    """What scores the answers."""

    critic: Critic = Critic()
    """The value network."""

    rollout: Rollout = Rollout()
    """How many answers are sampled, and how."""

    ppo: Ppo = Ppo()
    """Advantages and the clipped losses."""

    score: Score = Score()
    """What happens to a score before it becomes a reward."""

    kl: Kl = Kl()
    """The penalty for moving away from the reference."""

    ptx: Ptx = Ptx()
    """Pretraining gradients mixed into the updates."""

    @model_validator(mode="after")
    def _first_ratio_is_one(self) -> PpoConfig:
        if self.lora is not None and self.lora.dropout > 0:
            raise disagreement(
                "lora.dropout",
                f"must be 0 in ppo, got {self.lora.dropout:g}: sampling and update would see "
                "different policies",
            )
        return self
