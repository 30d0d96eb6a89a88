"""What a run will need of memory and disk, reckoned from shapes: no weights are read.

Parameters are counted on a model without storage. Activations follow what autograd keeps per token
of a transformer layer (compare Korthikanti et al. 2022, arXiv 2205.05198, §4.1); they are right to
a factor of about two, which is what a person needs to choose a token budget.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from stages.config.shared import Lora
from stages.models.attention import GROWTH, SDPA_ABOVE
from stages.models.forward import CHUNK
from stages.models.generate import CACHE_TOKENS
from stages.models.lora import put_in
from stages.models.network import Kind
from stages.models.precision import Arithmetic
from stages.runtime.place import existing

MIB = 1 << 20
ADAM = 2  # moments per parameter
COPIES_OF_LOGITS = 3  # logits, log-softmax and their gradient


class Shape(NamedTuple):
    """The sizes of a model that memory depends on.

    Attributes:
        parameters: of the model without adapters.
        layers, hidden, heads, shared_heads, width, vocabulary: as in its config.
        inner: width of the feed-forward.
        added: numbers of the adapters and of a head that is trained beside the first one; 0 where
            the model itself is trained.
    """

    parameters: int
    layers: int
    hidden: int
    inner: int
    heads: int
    shared_heads: int
    width: int
    vocabulary: int
    added: int = 0

    @property
    def trainable(self) -> int:
        """How many numbers have a gradient, where the model is trained."""
        return self.added or self.parameters


class Trained(NamedTuple):
    """Bytes of a network in training."""

    weights: int
    gradients: int
    optimiser: int
    average: int


def shape_of(
    config: PreTrainedConfig,
    kind: Kind,
    *,
    trust_remote_code: bool = False,
    lora: Lora | None = None,
) -> Shape:
    """The sizes of a policy, or of a reward model or critic of the same family.

    Raises:
        ConfigError: adapters are asked for where the family has no such layer.
    """
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
        parameters = sum(p.numel() for p in model.parameters())
        if lora is not None:
            put_in(model, kind, lora)
    text = config.get_text_config()
    heads = text.num_attention_heads
    return Shape(
        parameters=parameters,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=_first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size,
        heads=heads,
        shared_heads=_first(text, "num_key_value_heads") or heads,
        width=_first(text, "head_dim") or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        added=sum(p.numel() for p in model.parameters()) - parameters,
    )


def trained(shape: Shape, arithmetic: Arithmetic, *, average: bool) -> Trained:
    """Master weights; gradients, Adam's moments and, where kept, the average of what is trained."""
    item = arithmetic.weights.itemsize
    size = shape.trainable * item
    weights = (shape.parameters + shape.added) * item
    return Trained(weights, size, ADAM * size, size if average else 0)


def activations(
    shape: Shape,
    arithmetic: Arithmetic,
    *,
    tokens: int,
    longest: int,
    dropout: bool,
    checkpointing: bool,
) -> int:
    """Bytes that the backward pass of one micro-batch keeps.

    Args:
        shape: of the model.
        arithmetic: number format of the passes.
        tokens: N, tokens of the micro-batch.
        longest: tokens of its longest sequence, which every token may attend to.
        dropout: whether attention weights are dropped in training.
        checkpointing: whether only the input of each layer is kept, and one layer recomputed.
    """
    full, narrow = arithmetic.weights.itemsize, _compute(arithmetic).itemsize
    scores = longest * (3 if dropout else 0 if longest > SDPA_ABOVE else 1)
    attention = (2 * shape.heads + 2 * shape.shared_heads) * shape.width + shape.heads * scores
    residual = 6 * shape.hidden * full  # around the two norms, in the format of the master weights
    layer = tokens * (residual + (2 * shape.hidden + attention + 4 * shape.inner) * narrow)
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * tokens * shape.hidden * full + layer


def logits(shape: Shape, arithmetic: Arithmetic, *, targets: int) -> int:
    """Bytes of the logits held at once; more than a chunk of them is recomputed piece by piece."""
    exact = max(4, arithmetic.weights.itemsize)
    return min(targets * shape.vocabulary, CHUNK) * exact * COPIES_OF_LOGITS


def decoding_cache(shape: Shape, arithmetic: Arithmetic, *, rows: int, width: int) -> int:
    """Bytes of the keys and values of the rows that are decoded side by side."""
    together = min(rows, max(1, CACHE_TOKENS // width))
    values = 2 * shape.layers * shape.shared_heads * shape.width
    return together * (width + GROWTH) * values * _compute(arithmetic).itemsize


def rollout(*, episodes: int, prompt: int, answer: int) -> int:
    """Bytes of a rollout: ids in 8 bytes, five numbers and a mark per answer token."""
    return episodes * (8 * (prompt + answer) + (5 * 4 + 1) * answer)


def largest_micro_batch(lengths: Iterable[int], *, batch_size: int, budget: int) -> int:
    """Tokens of the largest micro-batch that any optimiser batch can give."""
    ordered = sorted((int(n) for n in lengths), reverse=True)
    return max(min(budget, sum(ordered[:batch_size])), ordered[0])


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new process may still take on the device, or None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    known = [n for n in (_linux_available(), _control_group_free()) if n is not None]
    return min(known, default=None) or _physical()


def free_disk(folder: Path) -> int:
    """Bytes free where the folder is or will be."""
    return shutil.disk_usage(existing(folder)).free


def _compute(arithmetic: Arithmetic) -> torch.dtype:
    return arithmetic.compute or arithmetic.weights


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _linux_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _control_group_free() -> int | None:
    """What the container that this process runs in may still take."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
