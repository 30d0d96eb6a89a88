"""Supervised fine-tuning: the config of ``rlhf sft``."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from stages.config.base import Count, Section, ShareBelowOne, Text, disagreement
from stages.config.shared import AnswerData, Optimisation, StageConfig


class SftTrain(Optimisation):
    """The optimiser, its schedule and its limits."""

    epochs: Count = 2
    """Passes over the demonstrations. Ouyang et al. 2022: 16 for the SFT models (App. C.1), 2 for
    the models that ppo starts from (App. C.3)."""

    batch_size: Count = 32
    """Demonstrations per optimiser step over all processes; Ouyang et al. 2022, App. C.1."""

    dropout: ShareBelowOne | None = None
    """Residual dropout; null leaves the model's own setting. Ouyang et al. 2022, App. C.1: 0.2."""


class Pretrain(Section):
    """Pretraining documents mixed into the demonstrations."""

    data: Text | None = None
    """File of pretraining text; null mixes none in."""

    share: ShareBelowOne = 0.1
    """Share of pretraining documents among the records of each optimiser batch; Ouyang et al. 2022,
    App. C.3: 10 % for the models that ppo starts from."""


class Supervised(Section):
    """What the loss is taken on and how it is averaged."""

    aggregation: Literal["token_mean", "seq_mean"] = "token_mean"
    """Average of the negative log-likelihood: over all target tokens of the optimiser step, or
    first over each answer's."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Targets of a conversation: every assistant turn, the last one, or every token. The paper does
    not say whether prompts carried loss."""

    pretrain: Pretrain = Pretrain()
    """Pretraining documents beside the demonstrations, for the model that ppo starts from."""


class SftConfig(StageConfig):
    """Supervised fine-tuning on demonstrations (Ouyang et al. 2022, App. C.1 and C.3)."""

    stage: Literal["sft"] = "sft"
    """Which stage this config is for."""

    preset: Literal["instructgpt", "instructgpt-ppo-init"] | None = None
    """A named set of defaults; a key given beside it wins. ``instructgpt``: Ouyang et al. 2022,
    App. C.1; ``instructgpt-ppo-init``: App. C.3, the model that ppo starts from."""

    data: AnswerData
    """The demonstrations."""

    train: SftTrain = SftTrain()
    """Optimiser, schedule and limits."""

    sft: Supervised = Supervised()
    """The loss, and what is mixed into the demonstrations."""

    @model_validator(mode="after")
    def _preset_has_its_file(self) -> SftConfig:
        pretrain = self.sft.pretrain
        if self.preset == "instructgpt-ppo-init" and pretrain.share and pretrain.data is None:
            raise disagreement(
                "sft.pretrain.data",
                "preset instructgpt-ppo-init mixes in pretraining documents: name a file of them "
                "(or set sft.pretrain.share to 0)",
            )
        return self
