"""Named sets of defaults. Each holds only what its source prints; a key given beside it wins."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

_COSINE_TO_A_TENTH = {"schedule": "cosine", "min_learning_rate_ratio": 0.1, "warmup_steps": 0}

# Ouyang et al. 2022, App. C.1: the SFT models.
_SFT_INSTRUCTGPT = {
    "data": {"max_prompt_tokens": 1024, "max_response_tokens": 1024},
    "train": {
        "epochs": 16,
        "batch_size": 32,
        "learning_rate": 9.65e-6,
        "adam_betas": (0.9, 0.95),
        "dropout": 0.2,
        **_COSINE_TO_A_TENTH,
    },
}

# Ouyang et al. 2022, App. C.3: the models that ppo starts from; learning rate of the 1.3B model.
_SFT_INSTRUCTGPT_PPO_INIT = {
    "train": {"epochs": 2, "batch_size": 32, "learning_rate": 5e-6, **_COSINE_TO_A_TENTH},
    "sft": {"pretrain": {"share": 0.1}},
}

# Ouyang et al. 2022, App. C.2.
_REWARD_INSTRUCTGPT = {
    "train": {"epochs": 1, "batch_size": 64, "learning_rate": 9e-6, **_COSINE_TO_A_TENTH},
    "ranking": {"ties": "drop", "reduction": "prompt_mean"},
    "normalise": {"on": "demonstrations"},
}

# Ouyang et al. 2022, App. C.4. Ten iterations of warm-up are 80 optimiser steps (512/64 each). The
# paper does not print the policy's learning rate, so none stands here.
_PPO_INSTRUCTGPT = {
    "train": {"batch_size": 64, "schedule": "constant", "warmup_steps": 80, "ema_decay": 0.992},
    "critic": {"init": "reward", "learning_rate": 9e-6},
    "rollout": {"batch_size": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
    "ppo": {
        "epochs": 1,
        "clip_range": 0.2,
        "value_clip_range": 0.2,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_advantages": True,
        "whiten_rewards": False,
        "aggregation": "token_mean",
    },
    "score": {"clip": None, "position": "last"},
    "kl": {"coef": 0.02, "estimator": "k1", "controller": "fixed"},
    "ptx": {"coef": 27.8, "ratio": 8},
}

# The constants that DeepSpeed-Chat's PPO trainer has in its code and that tutorials walk through.
_PPO_WALKTHROUGH = {
    "train": {"batch_size": 4, "schedule": "constant"},
    "rollout": {"batch_size": 4},
    "ppo": {
        "epochs": 1,
        "clip_range": 0.2,
        "value_clip_range": 0.2,
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_advantages": False,
        "whiten_rewards": False,
        "aggregation": "token_mean",
    },
    "score": {"clip": 5.0, "position": "after_last"},
    "kl": {"coef": 0.1, "estimator": "k1", "controller": "fixed"},
}

# Rafailov et al. 2023, arXiv 2305.18290, App. B; its RMSprop is Adam without a first moment.
_DPO_PAPER = {
    "dpo": {"loss": "sigmoid", "beta": 0.1},
    "train": {
        "batch_size": 64,
        "learning_rate": 1e-6,
        "schedule": "constant",
        "warmup_steps": 150,
        "adam_betas": (0.0, 0.99),
    },
}

# Amini et al. 2024, arXiv 2402.10571; β is what the paper searches for.
_ODPO_PAPER = {"odpo": {"alpha": 1.0, "offset": "score", "scale": "log"}}

# Ethayarajh et al. 2024, arXiv 2402.01306, §4.3.
_KTO_PAPER = {"kto": {"beta": 0.1}, "train": {"learning_rate": 5e-6}}

# Hong et al. 2024, arXiv 2403.07691, Mistral-ORPO-β.
_ORPO_PAPER = {"orpo": {"lam": 0.1}, "train": {"learning_rate": 5e-6}}

# Meng et al. 2024, arXiv 2405.14734; the hyperparameters of Llama-3-Base.
_SIMPO_PAPER = {
    "simpo": {"beta": 2.0, "gamma": 1.0},
    "train": {"batch_size": 128, "learning_rate": 6e-7, "schedule": "cosine"},
}

# Shao et al. 2024, arXiv 2402.03300, §4.2: 64 answers to a question, one update per rollout.
_GRPO_PAPER = {
    "grpo": {"group_size": 64, "beta": 0.04, "variant": "grpo", "epochs": 1},
    "rollout": {"batch_size": 1024},
    "train": {"batch_size": 1024, "learning_rate": 1e-6},
}

# Ahmadian et al. 2024, arXiv 2402.14740, App. B.
_RLOO_PAPER = {
    "rloo": {"group_size": 4},
    "kl": {"coef": 0.03, "estimator": "k1", "controller": "fixed"},
    "train": {"learning_rate": 1e-6},
}

# The same paper's REINFORCE with a baseline: a moving average of the rewards.
_REINFORCE_PAPER = {
    "reinforce": {"baseline": "moving_average"},
    "kl": {"coef": 0.03, "estimator": "k1", "controller": "fixed"},
    "train": {"learning_rate": 1e-6},
}

# Guo et al. 2024, arXiv 2402.04792.
_ONLINE_DPO_PAPER = {"online_dpo": {"beta": 0.1}, "train": {"learning_rate": 5e-7}}

PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("sft", "instructgpt"): _SFT_INSTRUCTGPT,
    ("sft", "instructgpt-ppo-init"): _SFT_INSTRUCTGPT_PPO_INIT,
    ("reward_model", "instructgpt"): _REWARD_INSTRUCTGPT,
    ("ppo", "instructgpt"): _PPO_INSTRUCTGPT,
    ("ppo", "walkthrough"): _PPO_WALKTHROUGH,
    ("dpo", "paper"): _DPO_PAPER,
    ("odpo", "paper"): _ODPO_PAPER,
    ("kto", "paper"): _KTO_PAPER,
    ("orpo", "paper"): _ORPO_PAPER,
    ("simpo", "paper"): _SIMPO_PAPER,
    ("grpo", "paper"): _GRPO_PAPER,
    ("rloo", "paper"): _RLOO_PAPER,
    ("reinforce", "paper"): _REINFORCE_PAPER,
    ("online_dpo", "paper"): _ONLINE_DPO_PAPER,
}


def preset_values(stage: str, preset: str | None) -> dict[str, Any]:
    """The nested defaults of a preset; empty for null and for names that the stage does not have.

    A stage compares its config with them to know whether a value may come from the preset: a
    preset's dropout, for one, is only a notice where the model type has none.
    """
    if not isinstance(preset, str):
        return {}
    return deepcopy(PRESETS.get((stage, preset), {}))


def under(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` completed by ``defaults``, section by section; what was given wins."""
    merged = dict(given)
    for key, default in defaults.items():
        value = merged.get(key)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            merged[key] = under(default, value)
        elif key not in merged:
            merged[key] = default
    return merged
