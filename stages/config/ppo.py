"""Reinforcement learning from the reward model: the config of ``rlhf ppo``."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from stages.config.base import (
    Count,
    Flag,
    NonNegative,
    Place,
    Positive,
    Section,
    Share,
    Text,
    disagreement,
)
from stages.config.episodes import Kl, OnlineConfig, ScoreRules


class Critic(Section):
    """The value network, a model of its own with an optimiser of its own (Ouyang et al. 2022)."""

    init: Place = "reward"
    """Where it starts: ``reward`` (the reward model; Ouyang et al. 2022, App. C.4), ``policy`` with
    a fresh head, or the folder of an earlier run."""

    learning_rate: NonNegative | None = None
    """Peak learning rate; null takes ``train.learning_rate``. Ouyang et al. 2022, App. C.4:
    9e-6."""


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


class Score(ScoreRules):
    """What happens to the reward model's score before it becomes a reward, in this order."""

    position: Literal["last", "after_last"] = "last"
    """The token whose reward carries the score: the last one, or one slot later where there is
    room."""


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


class PpoConfig(OnlineConfig):
    """PPO against a reward model (Ouyang et al. 2022, §3.5 and App. C.4)."""

    stage: Literal["ppo"] = "ppo"
    """Which stage this config is for."""

    preset: Literal["instructgpt", "walkthrough"] | None = None
    """A named set of defaults; a key given beside it wins. ``instructgpt``: Ouyang et al. 2022,
    App. C.4; ``walkthrough``: the constants of DeepSpeed-Chat's PPO trainer."""

    critic: Critic = Critic()
    """The value network."""

    ppo: Ppo = Ppo()
    """Advantages and the clipped losses."""

    score: Score = Score()
    """What happens to a score before it becomes a reward."""

    kl: Kl = Kl()
    """The penalty for moving away from the reference."""

    ptx: Ptx = Ptx()
    """Pretraining gradients mixed into the updates."""

    @property
    def epochs(self) -> int:
        """Passes over each rollout."""
        return self.ppo.epochs

    @property
    def after_last(self) -> bool:
        """Whether the score lands behind the last token of an answer."""
        return self.score.position == "after_last"
