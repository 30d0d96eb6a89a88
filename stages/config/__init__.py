"""What a run is told: one closed, frozen config class per stage. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from stages.config.base import to_yaml
from stages.config.episodes import OnlineConfig
from stages.config.online import (
    CriticlessConfig,
    GrpoConfig,
    OnlineDpoConfig,
    ReinforceConfig,
    RlooConfig,
)
from stages.config.ppo import PpoConfig
from stages.config.preference import (
    DpoConfig,
    KtoConfig,
    OdpoConfig,
    OrpoConfig,
    PairedConfig,
    PreferenceConfig,
    SimpoConfig,
)
from stages.config.presets import preset_values, under
from stages.config.problems import InvalidConfig, Problem, problems_of, shown, suggestion
from stages.config.reward_model import RewardModelConfig
from stages.config.rewards import (
    HttpReward,
    ModelReward,
    PythonReward,
    RuleReward,
    ScoreConfig,
)
from stages.config.sft import SftConfig
from stages.config.shared import StageConfig

__all__ = [
    "STAGES",
    "CriticlessConfig",
    "DpoConfig",
    "GrpoConfig",
    "HttpReward",
    "InvalidConfig",
    "KtoConfig",
    "ModelReward",
    "OdpoConfig",
    "OnlineConfig",
    "OnlineDpoConfig",
    "OrpoConfig",
    "PairedConfig",
    "PpoConfig",
    "PreferenceConfig",
    "PythonReward",
    "ReinforceConfig",
    "RewardModelConfig",
    "RlooConfig",
    "RuleReward",
    "ScoreConfig",
    "SftConfig",
    "SimpoConfig",
    "StageConfig",
    "preset_values",
    "resolve",
    "resolve_reward",
    "to_yaml",
]

STAGES: dict[str, type[StageConfig]] = {
    "sft": SftConfig,
    "reward_model": RewardModelConfig,
    "ppo": PpoConfig,
    "dpo": DpoConfig,
    "odpo": OdpoConfig,
    "kto": KtoConfig,
    "orpo": OrpoConfig,
    "simpo": SimpoConfig,
    "grpo": GrpoConfig,
    "rloo": RlooConfig,
    "reinforce": ReinforceConfig,
    "online_dpo": OnlineDpoConfig,
}


def resolve(values: Mapping[str, Any]) -> StageConfig:
    """The config of the stage that ``values`` name, its preset and all defaults filled in.

    Args:
        values: nested mapping with the keys of a config file, ``stage`` among them.

    Raises:
        InvalidConfig: with everything that is wrong at once.
    """
    stage = values.get("stage")
    config = STAGES.get(stage) if isinstance(stage, str) else None
    if config is None:
        raise InvalidConfig([_no_such_stage(values)])
    preset = values.get("preset")
    try:
        return config.model_validate(under(preset_values(str(stage), preset), values))
    except ValidationError as error:
        raise InvalidConfig(problems_of(error, config, STAGES)) from None


def resolve_reward(reward: object) -> ScoreConfig:
    """A reward outside of a stage's config.

    Args:
        reward: a term or a list of terms, as under the key ``reward``.

    Raises:
        InvalidConfig: with everything that is wrong at once.
    """
    try:
        return ScoreConfig.model_validate({"reward": reward})
    except ValidationError as error:
        raise InvalidConfig(problems_of(error, ScoreConfig, {})) from None


def _no_such_stage(values: Mapping[str, Any]) -> Problem:
    words = ", ".join(STAGES)
    if "stage" not in values:
        return Problem(("stage",), f"missing key. Name the stage: one of {words}", "section")
    stage = values["stage"]
    near = suggestion(stage, list(STAGES)) if isinstance(stage, str) else ""
    return Problem(("stage",), f"expected one of {words}, got {shown(stage)}{near}", "value")
