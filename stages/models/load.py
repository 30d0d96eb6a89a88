"""Loading policies, reward models and critics from folders, and refusing what is no model.

Only safetensors are read. A loaded model has every weight it needs, all finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from stages.errors import CheckpointError, ConfigError
from stages.models import attention, manifest
from stages.models.folder import Identity, is_number, model_folder
from stages.models.network import Kind, Network, score_head
from stages.models.precision import Arithmetic
from stages.models.probe import Verdict, probe, reads_last_token
from stages.models.source import identity_of, require_weights
from stages.seeds import seed_of

DROPOUT_NAMES = ("resid_pdrop", "resid_dropout", "residual_dropout", "hidden_dropout", "dropout")


@dataclass(frozen=True)
class Loading:
    """How models are loaded.

    Attributes:
        arithmetic: device and dtypes.
        trust_remote_code: whether the folder's own Python may run.
        gradient_checkpointing: recompute activations in the backward pass.
        dropout: residual dropout, or None for what the config says.
        dropout_optional: a family without residual dropout is left as it is (from a preset).
    """

    arithmetic: Arithmetic
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    dropout: float | None = None
    dropout_optional: bool = False


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a run folder, model folder or hub id.

    Raises:
        CheckpointError: its files are missing, broken or no longer what was written.
    """
    identity_of(source)
    folder = model_folder(source)
    manifest.require(folder, weights=False)
    try:
        return AutoTokenizer.from_pretrained(
            _location(source, folder), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # each tokenizer library raises kinds of its own
        known = not folder.is_dir() or any(folder.glob("tokenizer*"))
        reason = _first_line(error) if known else "the folder holds no tokenizer file"
        raise CheckpointError(
            f"no tokenizer can be loaded ({reason})",
            where=source,
            do="copy the tokenizer files (tokenizer.json, tokenizer_config.json) into "
            + (str(folder) if folder.is_dir() else "its folder"),
        ) from error


def load_policy(source: str, loading: Loading) -> Network:
    """A causal language model.

    Raises:
        CheckpointError: no such folder, a reward model, or missing, damaged or non-finite weights.
    """
    config = policy_config(source, loading.trust_remote_code)
    set_dropout(config, loading, source)
    module = _from_pretrained(AutoModelForCausalLM, source, config, loading)
    return _network(module, "policy", loading)


def load_reward(source: str, loading: Loading, *, kind: Kind = "reward") -> Network:
    """A reward model, or a critic made from one: a sequence classifier with one label.

    Its ``mean`` and ``std`` come from ``rlhf.json``, otherwise from ``config.json``, otherwise they
    are 0 and 1.

    Raises:
        CheckpointError: no such folder, a policy, several labels, or unusable weights.
    """
    config = reward_config(source, loading.trust_remote_code)
    module = _from_pretrained(AutoModelForSequenceClassification, source, config, loading)
    mean, std = _moments(identity_of(source), config, source)
    return _network(module, kind, loading, mean=mean, std=std)


def load_whole(source: str, loading: Loading) -> Network:
    """A classifier with one label that transformers runs in its own way, on padded rows; as above.

    Raises:
        CheckpointError: as above.
    """
    config = reward_config(source, loading.trust_remote_code)
    module = _from_pretrained(AutoModelForSequenceClassification, source, config, loading)
    mean, std = _moments(identity_of(source), config, source)
    module.to(loading.arithmetic.device)
    return Network(module, "reward", "padded", loading.arithmetic.compute, mean, std)


def reads_whole(source: str, trust_remote_code: bool = False) -> bool:
    """Whether a reward model of another tool reads its score elsewhere than at the last token."""
    if identity_of(source) is not None:
        return False
    config = reward_config(source, trust_remote_code)
    key = config.to_json_string(use_diff=False)
    if key not in _LAST:
        _LAST[key] = reads_last_token(config)
    return not _LAST[key]


def with_fresh_head(source: str, loading: Loading, *, seed: int, kind: Kind = "reward") -> Network:
    """A policy's backbone with a new scalar head, normal(0, 1/√(d+1)) and without bias.

    Source: Stiennon et al. 2020, ``query_response_model.py``; Huang et al. 2024.

    Raises:
        CheckpointError: the family has no sequence classification model.
    """
    config = headed_config(source, loading.trust_remote_code)
    module = _from_pretrained(
        AutoModelForSequenceClassification, source, config, loading, fresh_head=True
    )
    weight = score_head(module).weight
    generator = torch.Generator().manual_seed(seed_of(seed, "head"))
    fresh = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        weight.copy_(fresh / math.sqrt(weight.shape[1] + 1))
    return _network(module, kind, loading)


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
    _moments(identity, config, source)
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
            _location(source, model_folder(source)), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{source} brings Python code of its own, which would run on this machine",
                where="trust_remote_code",
                do="set trust_remote_code: true if you trust its author",
            ) from None
        raise CheckpointError(
            f"no model can be read from it ({_first_line(error)})",
            where=source,
            do="name a run folder, a model folder, or a hub id that can be reached",
        ) from error


def _location(source: str, folder: Path) -> str:
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


def set_dropout(config: PreTrainedConfig, loading: Loading, source: str) -> None:
    """Set the residual dropout of a config, where one is asked for.

    Raises:
        ConfigError: the family has none, and no preset asks for it.
    """
    if loading.dropout is None:
        return
    name = next((n for n in DROPOUT_NAMES if hasattr(config, n)), None)
    if name is not None:
        setattr(config, name, loading.dropout)
    elif not loading.dropout_optional:
        raise ConfigError(
            f"models of type {config.model_type} ({source}) have no residual dropout",
            where="train.dropout",
            do="remove the key, or set it to null",
        )


def has_residual_dropout(config: PreTrainedConfig) -> bool:
    """Whether the family has a residual dropout to set."""
    return any(hasattr(config, name) for name in DROPOUT_NAMES)


def _from_pretrained(
    auto: Any,
    source: str,
    config: PreTrainedConfig,
    loading: Loading,
    *,
    fresh_head: bool = False,
) -> PreTrainedModel:
    try:
        module, info = auto.from_pretrained(
            _location(source, model_folder(source)),
            config=config,
            dtype=loading.arithmetic.weights,
            use_safetensors=True,
            trust_remote_code=loading.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (TypeError, AttributeError, KeyError) as error:  # from what stands in its small files
        raise CheckpointError(
            f"its generation_config.json or config.json cannot be understood "
            f"({_first_line(error)})",
            where=source,
            do="mend the file, copy the folder anew, or run the stage that made it again",
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"its weights cannot be loaded ({_first_line(error)})",
            where=source,
            do="copy the folder anew, or run the stage that made it again",
        ) from error
    head = {"score.weight", "classifier.weight"} if fresh_head else set()
    _require_whole(info, head, source)
    _require_finite(module, source)
    return module


def _require_whole(info: dict[str, Any], expected_missing: set[str], source: str) -> None:
    missing = set(info["missing_keys"]) - expected_missing
    mismatched = [str(key[0]) for key in info["mismatched_keys"]]
    if missing or mismatched:
        named = ", ".join(sorted([*missing, *mismatched])[:3])
        raise CheckpointError(
            f"{len(missing)} weights are missing, {len(mismatched)} of another shape ({named})",
            where=source,
            do="copy the folder anew, or run the stage that made it again",
        )
    # transformers' heads have no bias and leave one in the file out without a word.
    if biases := {"score.bias", "classifier.bias"} & set(info["unexpected_keys"]):
        raise CheckpointError(
            f"its head has a bias ({biases.pop()}), which transformers would leave out",
            where=source,
            do="fold the bias into mean: mean = -bias in its config.json, and remove the weight",
        )


def _require_finite(module: PreTrainedModel, source: str) -> None:
    for name, weight in module.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError(
                f"weight {name} holds numbers that are not finite",
                where=source,
                do="use an earlier checkpoint",
            )


def _moments(
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


def _network(module: PreTrainedModel, kind: Kind, loading: Loading, **moments: float) -> Network:
    verdict = verdict_of(module.config)
    if verdict.mode != "padded":
        module.set_attn_implementation(attention.NAME)
    if loading.gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    module.to(loading.arithmetic.device)
    compute = loading.arithmetic.compute
    return Network(module, kind, verdict.mode, compute, cached=verdict.cached, **moments)


_VERDICTS: dict[str, Verdict] = {}
_LAST: dict[str, bool] = {}


def verdict_of(config: PreTrainedConfig) -> Verdict:
    """The probe's verdict, asked once per configuration and process."""
    key = config.to_json_string(use_diff=False)
    if key not in _VERDICTS:
        _VERDICTS[key] = probe(config)
    return _VERDICTS[key]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
