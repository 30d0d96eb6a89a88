"""Learning from sampled answers without a critic: grpo, rloo, reinforce and online-dpo."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from stages.config.base import Count, NonNegative, Positive, Section, ShareBelowOne, disagreement
from stages.config.episodes import Kl, OnlineConfig

_DECAY = 0.9


class Grpo(Section):
    """Answers held against their group (Shao et al. 2024, arXiv 2402.03300)."""

    group_size: Count = 8
    """G, the answers to a prompt, 2 or more; Shao et al. 2024, §4.2: 64."""

    beta: NonNegative = 0.04
    """Weight of the KL to the reference, which is in the loss; Shao et al. 2024, §4.2: 0.04."""

    variant: Literal["grpo", "dr_grpo"] = "grpo"
    """``grpo`` divides advantages by the group's standard deviation and averages the loss within
    each answer first; ``dr_grpo`` does neither, and divides by ``rollout.max_new_tokens`` (Liu et
    al. 2025, arXiv 2503.20783)."""

    epochs: Count = 1
    """Passes over each rollout; Shao et al. 2024, §4.2: one update."""

    clip_low: Positive = 0.2
    """ε below 1 of the clipped ratio."""

    clip_high: Positive = 0.2
    """ε above 1 of the clipped ratio; Yu et al. 2025, arXiv 2503.14476, §3.1: 0.28."""


class Rloo(Section):
    """The other answers to a prompt as baseline (Ahmadian et al. 2024, arXiv 2402.14740)."""

    group_size: Count = 4
    """k, the answers to a prompt, 2 or more; Ahmadian et al. 2024: 2 to 4."""


class Reinforce(Section):
    """One answer to a prompt (Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740, §2)."""

    baseline: Literal["none", "batch_mean", "moving_average"] = "batch_mean"
    """What is taken off a reward: nothing, the mean reward of its rollout, or a moving average of
    the means of the rollouts before it."""

    decay: ShareBelowOne = _DECAY
    """Weight of the average so far; ``moving_average`` only."""

    @model_validator(mode="after")
    def _averages_only_where_asked(self) -> Reinforce:
        if self.baseline != "moving_average" and self.decay != _DECAY:
            raise disagreement(
                "decay",
                f"is for baseline: moving_average, and baseline is {self.baseline}; leave it out",
            )
        return self


class OnlineDpo(Section):
    """The loss of dpo on two sampled answers (Guo et al. 2024, arXiv 2402.04792)."""

    beta: Positive = 0.1
    """How dearly distance from the reference is paid for; Guo et al. 2024: 0.1."""


class CriticlessConfig(OnlineConfig):
    """What the methods without a critic share."""

    preset: Literal["paper"] | None = None
    """A named set of defaults; a key given beside it wins. ``paper``: the method's own paper."""

    @property
    def group_key(self) -> str | None:
        """The key that says how many answers a prompt gets; None where the method says it."""
        return None

    @model_validator(mode="after")
    def _has_whole_groups(self) -> CriticlessConfig:
        size, key = self.per_prompt, self.group_key
        if key is not None and size < 2:
            raise disagreement(
                key, f"is {size}, and an answer is held against the others: set it to 2 or more"
            )
        episodes = self.rollout.batch_size
        if episodes % size:
            raise disagreement("rollout.batch_size", self._not_whole(episodes, size))
        if self.train.batch_size % self.together:
            why = self._not_whole(self.train.batch_size, self.together)
            raise disagreement("train.batch_size", why)
        return self

    def _not_whole(self, given: int, size: int) -> str:
        named = f"{size}, the answers to a prompt"
        whole = f"{self.group_key} ({size})" if self.group_key else named
        return f"must be a multiple of {whole}, got {given}; {given + -given % size} is one"


class GrpoConfig(CriticlessConfig):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300)."""

    stage: Literal["grpo"] = "grpo"
    """Which stage this config is for."""

    grpo: Grpo = Grpo()
    """Groups, the loss and its reference."""

    @property
    def epochs(self) -> int:
        """Passes over each rollout."""
        return self.grpo.epochs

    @property
    def per_prompt(self) -> int:
        """Answers to a prompt in one rollout."""
        return self.grpo.group_size

    @property
    def group_key(self) -> str:
        """The key that says how many answers a prompt gets."""
        return "grpo.group_size"

    @property
    def leash(self) -> str:
        """The key that holds the policy near its reference."""
        return "grpo.beta"


class RlooConfig(CriticlessConfig):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740)."""

    stage: Literal["rloo"] = "rloo"
    """Which stage this config is for."""

    rloo: Rloo = Rloo()
    """Groups."""

    kl: Kl = Kl()
    """The penalty for moving away from the reference."""

    @property
    def per_prompt(self) -> int:
        """Answers to a prompt in one rollout."""
        return self.rloo.group_size

    @property
    def group_key(self) -> str:
        """The key that says how many answers a prompt gets."""
        return "rloo.group_size"


class ReinforceConfig(CriticlessConfig):
    """REINFORCE on whole answers (Williams 1992; Ahmadian et al. 2024, arXiv 2402.14740)."""

    stage: Literal["reinforce"] = "reinforce"
    """Which stage this config is for."""

    reinforce: Reinforce = Reinforce()
    """The baseline."""

    kl: Kl = Kl()
    """The penalty for moving away from the reference."""


class OnlineDpoConfig(CriticlessConfig):
    """DPO on pairs that the policy samples and the reward ranks (Guo et al. 2024)."""

    stage: Literal["online_dpo"] = "online_dpo"
    """Which stage this config is for."""

    online_dpo: OnlineDpo = OnlineDpo()
    """The loss and its reference."""

    @property
    def per_prompt(self) -> int:
        """Answers to a prompt in one rollout."""
        return 2

    @property
    def together(self) -> int:
        """Answers to a prompt that the loss compares."""
        return 2

    @property
    def leash(self) -> str:
        """The key that holds the policy near its reference."""
        return "online_dpo.beta"
