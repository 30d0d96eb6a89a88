"""What a run will need of memory and disk, reckoned from shapes: no weights are read.

Parameters are counted on a model without storage. Activations are what autograd keeps per token of
a transformer layer (compare Korthikanti et al. 2022, arXiv 2205.05198, §4.1), counted tensor by
tensor on a Llama. ``make bench-memory`` holds the whole against runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from stages.config.shared import Lora
from stages.models.attention import GROWTH
from stages.models.forward import CHUNK
from stages.models.generate import CACHE_TOKENS
from stages.models.lora import put_in
from stages.models.network import Kind
from stages.models.precision import Arithmetic
from stages.models.products import SDPA_ABOVE

MIB = 1 << 20
ADAM = 2  # moments per parameter
HOLES = 0.5  # of the activations, measured on a 135 M model by make bench-memory
COPIES_OF_LOGITS = 4  # logits in two formats, log-softmax, and two gradients, in fp32 widths


class Shape(NamedTuple):
    """The sizes of a model that memory depends on.

    Attributes:
        parameters: of the model without adapters.
        multiplied: numbers in the matrices of its linear layers, the output layer among them.
        narrowed: those of them that a frozen model holds in the format of the passes.
        layers, hidden, heads, shared_heads, width, vocabulary: as in its config.
        inner: width of the feed-forward.
        policy: whether it has an output layer over the vocabulary.
        added: numbers of the adapters and of a head that is trained beside the first one; 0 where
            the model itself is trained.
    """

    parameters: int
    multiplied: int
    narrowed: int
    layers: int
    hidden: int
    inner: int
    heads: int
    shared_heads: int
    width: int
    vocabulary: int
    policy: bool
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


class Load(NamedTuple):
    """The heaviest optimiser batch of a run.

    Attributes:
        tokens: N, of its largest micro-batch.
        keys: how many keys a token of it attends to, on average.
        targets: of it, for which logits are computed.
        micro_batches: into how many the batch is cut.
    """

    tokens: int
    keys: float
    targets: int
    micro_batches: int


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
    auto: Any = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=trust_remote_code)
        parameters = sum(p.numel() for p in model.parameters())
        multiplied, narrowed = _matrices(model)
        if lora is not None:
            put_in(model, kind, lora)
    text = config.get_text_config()
    heads = text.num_attention_heads
    return Shape(
        parameters=parameters,
        multiplied=multiplied,
        narrowed=narrowed,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=_first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * text.hidden_size,
        heads=heads,
        shared_heads=_first(text, "num_key_value_heads") or heads,
        width=_first(text, "head_dim") or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        policy=kind == "policy",
        added=sum(p.numel() for p in model.parameters()) - parameters,
    )


def _matrices(model: PreTrainedModel) -> tuple[int, int]:
    """Numbers in the matrices of all linear layers, and without those that embed tokens as well."""
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    embedding = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    alone = sum(w.numel() for w in linear if id(w) not in embedding)
    return sum(w.numel() for w in linear), alone


def trained(shape: Shape, arithmetic: Arithmetic, *, average: bool) -> Trained:
    """Master weights; gradients, Adam's moments and, where kept, the average of what is trained."""
    item = arithmetic.weights.itemsize
    size = shape.trainable * item
    weights = (shape.parameters + shape.added) * item
    return Trained(weights, size, ADAM * size, size if average else 0)


def frozen(shape: Shape, arithmetic: Arithmetic) -> int:
    """Bytes of a model that only reads; its matrices are held in the format of the passes."""
    full, narrow = arithmetic.weights.itemsize, _compute(arithmetic).itemsize
    return shape.parameters * full - shape.narrowed * (full - narrow)


def casts(shape: Shape, arithmetic: Arithmetic) -> int:
    """Bytes of the matrices in the format of the passes, beside the master weights."""
    narrow = 0 if arithmetic.compute is None else arithmetic.compute.itemsize
    return shape.multiplied * narrow


def activations(
    shape: Shape,
    arithmetic: Arithmetic,
    load: Load,
    *,
    dropout: bool,
    checkpointing: bool,
) -> int:
    """Bytes that the backward pass of one micro-batch keeps.

    Args:
        shape: of the model.
        arithmetic: number format of the passes.
        load: tokens of the micro-batch, and keys that each attends to.
        dropout: whether attention weights are dropped in training.
        checkpointing: whether only the input of each layer is kept, and one layer recomputed.
    """
    full, narrow = arithmetic.weights.itemsize, _compute(arithmetic).itemsize
    # Around each of two norms its input and, where its weight is trained, its normalised input.
    norms = (2 if shape.added else 4) * shape.hidden * full
    # What q, k, v, gate and up multiply: each casts its own copy, or they share one.
    products = (2 if arithmetic.compute is None else 5) * shape.hidden * narrow
    heads = (2 * shape.heads + 2 * shape.shared_heads) * shape.width * narrow
    scores = shape.heads * load.keys * _score_bytes(arithmetic, load.keys, dropout=dropout)
    layer = int(load.tokens * (norms + products + heads + scores + 4 * shape.inner * narrow))
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * load.tokens * shape.hidden * full + layer


def holes(shape: Shape, arithmetic: Arithmetic, load: Load, *, checkpointing: bool) -> int:
    """Bytes of freed memory that the C library holds and cannot use, where adapters are trained.

    An adapted layer makes three large tensors that live for a moment beside each one that is kept;
    smaller ones that are kept are laid into the places that they leave, where no large one fits
    any more. Without adapters there is little of it, and CUDA has an allocator of its own.
    """
    if not shape.added or arithmetic.device.type != "cpu":
        return 0
    kept = activations(shape, arithmetic, load, dropout=False, checkpointing=checkpointing)
    return int(HOLES * kept)


def _score_bytes(arithmetic: Arithmetic, keys: float, *, dropout: bool) -> int:
    """Bytes kept of each attention weight: the softmax, its cast, and what dropout left of it."""
    fused = arithmetic.device.type == "cuda" and arithmetic.compute is not None
    if (fused or keys > SDPA_ABOVE) and not dropout:
        return 0
    exact = max(4, arithmetic.weights.itemsize)
    cast = 0 if arithmetic.compute is None else arithmetic.compute.itemsize
    return exact + cast + (exact + 1 if dropout else 0)


def logits(shape: Shape, arithmetic: Arithmetic, *, targets: int) -> int:
    """Bytes of the logits held at once; more than a chunk of them is recomputed piece by piece."""
    if not shape.policy:
        return 0
    exact = max(4, arithmetic.weights.itemsize)
    return min(targets * shape.vocabulary, CHUNK) * exact * COPIES_OF_LOGITS


def step(
    shape: Shape,
    arithmetic: Arithmetic,
    load: Load,
    *,
    dropout: bool = False,
    checkpointing: bool = False,
) -> int:
    """Bytes of an optimiser step beside weights and moments: its passes and its gradients.

    The backward pass lets go of activations as it makes gradients. Only where several micro-batches
    are summed are there gradients beside all of the activations.
    """
    gradients = shape.trainable * arithmetic.weights.itemsize
    kept = activations(shape, arithmetic, load, dropout=dropout, checkpointing=checkpointing)
    passing = casts(shape, arithmetic) + kept + logits(shape, arithmetic, targets=load.targets)
    # A gradient of the embedding is there twice: as it is made, and as it is added.
    embedding = 0 if shape.added else shape.vocabulary * shape.hidden * arithmetic.weights.itemsize
    if load.micro_batches > 1:
        return passing + gradients + embedding
    return max(passing + (embedding if shape.policy else 0), gradients + embedding)


def decoding(shape: Shape, arithmetic: Arithmetic, *, rows: int, width: int) -> int:
    """Bytes of sampling: cast weights, keys and values of the rows decoded side by side, and the
    probabilities of their next tokens.
    """
    together = min(rows, max(1, CACHE_TOKENS // width))
    narrow = _compute(arithmetic).itemsize
    values = 2 * shape.layers * shape.shared_heads * shape.width
    cache = together * (width + GROWTH) * values * narrow
    # Logits, scaled and as probabilities in fp32, and these and their sums in float64.
    picking = together * shape.vocabulary * (narrow + 2 * 4 + 2 * 8)
    return casts(shape, arithmetic) + cache + picking


def rollout(*, episodes: int, prompt: int, answer: int) -> int:
    """Bytes of a rollout: ids in 8 bytes, five numbers and a mark per answer token."""
    return episodes * (8 * (prompt + answer) + (5 * 4 + 1) * answer)


def _compute(arithmetic: Arithmetic) -> torch.dtype:
    return arithmetic.compute or arithmetic.weights


def _first(config: PreTrainedConfig, *names: str) -> int | None:
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)
