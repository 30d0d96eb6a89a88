"""What a model is, by its config and small files alone; no weight is read.

A folder of another kind, or of a family that cannot do what is asked, is refused here.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from stages.errors import CheckpointError, ConfigError
from stages.models.folder import Identity, is_number, model_folder
from stages.models.probe import reads_last_token
from stages.models.source import identity_of, require_weights

_LAST: dict[str, bool] = {}


def reads_whole(source: str, trust_remote_code: bool = False) -> bool:
    """Whether a reward model of another tool reads its score elsewhere than at the last token."""
    if identity_of(source) is not None:
        return False
    config = reward_config(source, trust_remote_code)
    key = config.to_json_string(use_diff=False)
    if key not in _LAST:
        _LAST[key] = reads_last_token(config)
    return not _LAST[key]


def policy_config(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a policy, refused where it cannot be one; its weights are not read.

    Raises:
        CheckpointError: no such folder, a reward model, no language model, or weights that are
            missing or damaged.
    """
    identity, config = identity_of(source), read_model_config(source, trust_remote_code)
    if _is_reward(identity, config):
        raise CheckpointError(
            "is a reward model, and a policy is needed here",
            where=source,
            do="name the run folder of rlhf sft or rlhf ppo, or a language model",
        )
    _require_causal(config, source)
    require_weights(source)
    return config


def reward_config(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a reward model or critic, refused where it cannot be one; as above.

    Raises:
        CheckpointError: no such folder, a policy, several labels, a score that cannot be scaled, or
            weights as above.
    """
    identity, config = identity_of(source), read_model_config(source, trust_remote_code)
    if not _is_reward(identity, config):
        raise CheckpointError(
            "has no reward head: it is a policy, and a reward model is needed here",
            where=source,
            do="train a reward model with rlhf train-rm and name its run folder",
        )
    if config.num_labels != 1:
        raise CheckpointError(
            f"has {config.num_labels} labels, and a reward model has one",
            where=source,
            do="name a sequence classification model with num_labels 1",
        )
    moments_of(identity, config, source)
    require_weights(source)
    return config


def headed_config(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a policy that is to get a fresh scalar head; as above.

    Raises:
        CheckpointError: the family has no sequence classification model, or as above.
    """
    config = policy_config(source, trust_remote_code)
    _require_head(config, source)
    config.num_labels = 1
    return config


def is_reward_model(source: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a folder holds a reward model rather than a policy, from its files alone."""
    return _is_reward(identity_of(source), read_model_config(source, trust_remote_code))


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence that the model has positions for, where it is limited."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None)


def read_model_config(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The transformers config of a run folder, model folder or hub id.

    Raises:
        CheckpointError: there is none.
        ConfigError: it needs Python code of its own.
    """
    identity_of(source)
    try:
        return AutoConfig.from_pretrained(
            location(source, model_folder(source)), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{source} brings Python code of its own, which would run on this machine",
                where="trust_remote_code",
                do="set trust_remote_code: true if you trust its author",
            ) from None
        raise CheckpointError(
            f"no model can be read from it ({first_line(error)})",
            where=source,
            do="name a run folder, a model folder, or a hub id that can be reached",
        ) from error


def location(source: str, folder: Path) -> str:
    """The folder, or the hub id where no such folder exists."""
    return str(folder) if folder.is_dir() else source


def _is_reward(identity: Identity | None, config: PreTrainedConfig) -> bool:
    if identity is not None:
        return identity.kind != "policy"
    return any("SequenceClassification" in name for name in config.architectures or ())


def _require_causal(config: PreTrainedConfig, source: str) -> None:
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not own_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"models of type {config.model_type} are no causal language models",
            where=source,
            do="start from a model that continues texts, such as llama, qwen3 or gpt2",
        )


def _require_head(config: PreTrainedConfig, source: str) -> None:
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise CheckpointError(
            f"models of type {config.model_type} have no sequence classification form in "
            "transformers, so none can carry a reward head",
            where=source,
            do="start from another family, such as llama, qwen2, qwen3, mistral, gemma, gpt2, "
            "gpt_neox, opt or phi",
        )


def moments_of(
    identity: Identity | None, config: PreTrainedConfig, source: str
) -> tuple[float, float]:
    """Mean and standard deviation of the score; those of ``rlhf.json`` were checked with it."""
    if identity is not None:
        return float(identity.mean), float(identity.std)
    mean, std = getattr(config, "mean", 0.0), getattr(config, "std", 1.0)
    if not (is_number(mean) and is_number(std) and std > 0):
        raise CheckpointError(
            f"its score has mean {mean!r} and std {std!r}; std must be positive and both finite",
            where=source,
            do="mend mean and std in its config.json",
        )
    return float(mean), float(std)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
