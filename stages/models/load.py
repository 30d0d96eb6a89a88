"""Loading policies, reward models and critics from folders, and refusing what is no model.

Only safetensors are read. A loaded model has every weight it needs, all finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from stages.errors import CheckpointError, ConfigError
from stages.models import attention, manifest
from stages.models.configured import (
    first_line,
    headed_config,
    location,
    moments_of,
    policy_config,
    reward_config,
)
from stages.models.folder import model_folder
from stages.models.network import Kind, Network, score_head
from stages.models.precision import Arithmetic
from stages.models.probe import Verdict, probe
from stages.models.source import identity_of
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
            location(source, folder), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # each tokenizer library raises kinds of its own
        known = not folder.is_dir() or any(folder.glob("tokenizer*"))
        reason = first_line(error) if known else "the folder holds no tokenizer file"
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
    mean, std = moments_of(identity_of(source), config, source)
    return _network(module, kind, loading, mean=mean, std=std)


def load_whole(source: str, loading: Loading) -> Network:
    """A classifier with one label that transformers runs in its own way, on padded rows; as above.

    Raises:
        CheckpointError: as above.
    """
    config = reward_config(source, loading.trust_remote_code)
    module = _from_pretrained(AutoModelForSequenceClassification, source, config, loading)
    mean, std = moments_of(identity_of(source), config, source)
    _move(module, loading.arithmetic.device)
    return Network(module, "reward", "padded", loading.arithmetic.compute, mean, std)


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
    assert isinstance(weight, torch.Tensor)
    generator = torch.Generator().manual_seed(seed_of(seed, "head"))
    fresh = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        weight.copy_(fresh / math.sqrt(weight.shape[1] + 1))
    return _network(module, kind, loading)


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
            location(source, model_folder(source)),
            config=config,
            dtype=loading.arithmetic.weights,
            use_safetensors=True,
            trust_remote_code=loading.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (TypeError, AttributeError, KeyError) as error:  # from what stands in its small files
        raise CheckpointError(
            f"its generation_config.json or config.json cannot be understood ({first_line(error)})",
            where=source,
            do="mend the file, copy the folder anew, or run the stage that made it again",
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"its weights cannot be loaded ({first_line(error)})",
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


def _network(
    module: PreTrainedModel, kind: Kind, loading: Loading, *, mean: float = 0.0, std: float = 1.0
) -> Network:
    verdict = verdict_of(module.config)
    if verdict.mode != "padded":
        module.set_attn_implementation(attention.NAME)
    if loading.gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    _move(module, loading.arithmetic.device)
    compute = loading.arithmetic.compute
    return Network(module, kind, verdict.mode, compute, mean, std, verdict.cached)


def _move(module: nn.Module, device: torch.device) -> None:
    """Put the weights where they are computed with."""
    module.to(device)


_VERDICTS: dict[str, Verdict] = {}


def verdict_of(config: PreTrainedConfig) -> Verdict:
    """The probe's verdict, asked once per configuration and process."""
    key = config.to_json_string(use_diff=False)
    if key not in _VERDICTS:
        _VERDICTS[key] = probe(config)
    return _VERDICTS[key]
