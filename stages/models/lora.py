"""Low-rank adapters (Hu et al. 2022, arXiv 2106.09685): W stays, A and B are trained.

    h = W·x + (alpha/r)·B·A·x        A [r, in] random, B [out, r] zero at the start (§4.1)

peft puts the adapters into the module in place: its class, its passes and the names of everything
else stay. Off, it is the module as it was, bit for bit; so a policy and its reference, or a critic
and the reward model it starts from, share one copy of the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stages.config.shared import Lora
from stages.errors import ConfigError
from stages.models.folder import model_folder
from stages.models.network import Kind, Network, score_head
from stages.seeds import seed_of

ADAPTER = "default"  # peft's name for the one adapter of a module
HEAD = f".modules_to_save.{ADAPTER}."


def require(lora: Lora | None) -> None:
    """The package is there, where adapters are asked for; it is not imported.

    Raises:
        ConfigError: it is missing.
    """
    if lora is not None and find_spec("peft") is None:
        raise ConfigError(
            "the package peft, which makes adapters, is not installed",
            where="lora",
            do="install it (pip install 'rlhf-cli[lora]'), or set lora: null",
        )


def attach(network: Network, lora: Lora | None, *, seed: int) -> Network:
    """Put adapters into a network's module, in place, and freeze all else but the scalar head.

    Args:
        network: as loaded; it computes the same numbers afterwards, until the first step.
        lora: None changes nothing.
        seed: of A, whatever the state of the global generator.

    Raises:
        ConfigError: a target is no linear layer of this family, or the rank is above what a matrix
            can have.
    """
    if lora is not None:
        put_in(network.module, network.kind, lora)
        _draw(network.module, seed_of(seed, "lora", network.kind))
    return network


def put_in(module: PreTrainedModel, kind: Kind, lora: Lora) -> None:
    """The adapters alone, their values still to be drawn: enough to count them.

    Raises:
        ConfigError: as above.
    """
    from peft import inject_adapter_in_model

    config = _peft_config(module, kind, lora)
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, module, ADAPTER)
    for layer in _layers(module):
        layer.cast_input_dtype_enabled = False  # autocast does it, once
    module.train(module.training)  # what was put in is in training mode


def without(network: Network, kind: Kind) -> Network:
    """The same module with its adapters off, as a network of its own; nothing is copied."""
    return replace(network, kind=kind, adapter=False)


def is_adapted(module: PreTrainedModel) -> bool:
    """Whether adapters were put into the module."""
    return hasattr(module, "peft_config")


def merged(module: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the module without adapters, every W replaced by W + (alpha/r)·B·A.

    Nothing is changed in place, and the sum is rounded once.

    Args:
        module: with adapters, or without: then the state is what it was.
        state: all of its weights, or averages of some of them, by name.

    Returns:
        On the CPU where a weight was adapted: not every device has float64.
    """
    deltas = {f"{name}.weight": (name, layer) for name, layer in _named_layers(module)}
    found = {}
    for name, value in state.items():
        if ".lora_" in name or ".original_module." in name:
            continue
        plain = name.replace(".base_layer.", ".").replace(HEAD, ".")
        if plain in deltas:
            exact = value.cpu().double() + _delta(*deltas[plain], state)
            value = exact.to(value.dtype)
        found[plain] = value
    return found


def save_adapter(
    module: PreTrainedModel, folder: Path, base: str, dtype: torch.dtype | None = None
) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads onto the base model.

    Args:
        module: with adapters.
        folder: an existing folder.
        base: run folder, model folder or hub id that the adapters were attached to.
        dtype: number format of the saved weights; None as trained.
    """
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    named = {
        "base_model.model." + name.replace(HEAD, ".").replace(f".{ADAPTER}.", "."): value
        for name, value in trained.items()
    }
    stored = {name: value.to(dtype or value.dtype).cpu() for name, value in named.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter: Any = module.peft_config[ADAPTER]
    config = adapter.to_dict()
    location = model_folder(base)
    config["base_model_name_or_path"] = str(location) if location.is_dir() else base
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # peft holds sets
    (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


def _peft_config(module: PreTrainedModel, kind: Kind, lora: Lora) -> Any:
    from peft import LoraConfig, TaskType

    policy = kind == "policy"
    layers = dict(_linear(module, kind))
    chosen = _chosen(layers, lora, module.config.model_type)
    _require_rank(lora.rank, {name: layers[name] for name in chosen})
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by r, and no more
        lora_dropout=lora.dropout,
        target_modules=_shortest(chosen, [name for name, _ in module.named_modules()]),
        fan_in_fan_out=any(isinstance(layers[name], Conv1D) for name in chosen),
        modules_to_save=None if policy else [_head_name(module)],
        task_type=TaskType.CAUSAL_LM if policy else TaskType.SEQ_CLS,
        init_lora_weights=False,
    )


def _linear(module: PreTrainedModel, kind: Kind) -> Iterator[tuple[str, nn.Module]]:
    """Every linear layer but the output layer or scalar head, by its full name."""
    head = module.get_output_embeddings() if kind == "policy" else score_head(module)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head:
            yield name, layer


def _chosen(layers: Mapping[str, nn.Module], lora: Lora, family: str) -> list[str]:
    if lora.targets == "all-linear":
        return list(layers)
    for target in lora.targets:
        if not any(_is(name, target) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"{target!r} is no linear layer inside a {family} model",
                where="lora.targets",
                do=f"name some of {', '.join(known)}, or set all-linear",
            )
    return [name for name in layers if any(_is(name, target) for target in lora.targets)]


def _require_rank(rank: int, layers: Mapping[str, nn.Module]) -> None:
    """B·A has at most the rank of the smallest matrix it is added to.

    Raises:
        ConfigError: the rank is above the smaller dimension of a matrix; it is named.
    """
    smaller = {name: min(_weight(layer).shape) for name, layer in layers.items()}
    name = min(smaller, key=smaller.__getitem__)
    if rank > smaller[name]:
        height, width = _weight(layers[name]).shape
        raise ConfigError(
            f"{rank} is above {smaller[name]}, the smaller side of {name} ({height} x {width})",
            where="lora.rank",
            do=f"set lora.rank to {smaller[name]} or less, or leave that layer out of lora.targets",
        )


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _shortest(chosen: list[str], every: list[str]) -> list[str]:
    """The last parts of the names, where they name nothing else."""
    last = sorted({name.rpartition(".")[2] for name in chosen})
    meant = [name for name in every if any(_is(name, part) for part in last)]
    return last if meant == chosen else chosen


def _is(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _head_name(module: PreTrainedModel) -> str:
    head = score_head(module)
    return next(name for name, child in module.named_children() if child is head)


def _layers(module: nn.Module) -> Iterator[Any]:
    return (layer for _, layer in _named_layers(module))


def _named_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in module.named_modules() if hasattr(layer, "lora_A"))


@torch.no_grad()
def _draw(module: nn.Module, seed: int) -> None:
    """A uniform in ±1/√in, as in the code of Hu et al. 2022; B zero. A seed for each layer."""
    for name, layer in _named_layers(module):
        weight = layer.lora_A[ADAPTER].weight
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        uniform = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
        weight.copy_((2 * uniform - 1) / math.sqrt(weight.shape[1]))
        layer.lora_B[ADAPTER].weight.zero_()


def _delta(name: str, layer: Any, state: Mapping[str, Tensor]) -> Tensor:
    """(alpha/r)·B·A in float64, laid out as the layer's own weight."""
    a, b = (state[f"{name}.lora_{x}.{ADAPTER}.weight"].cpu().double() for x in "AB")
    product = layer.scaling[ADAPTER] * (b @ a)
    return product.T if layer.fan_in_fan_out else product
