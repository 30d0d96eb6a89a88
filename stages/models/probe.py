"""Which layouts an architecture bears, decided by trying them.

A tiny copy of the model's own configuration with random weights, one layer of each of its layer
types, is run in float64 on a short text: as packed rows, as a tree, and token by token with the
cache. What agrees with separate sequences through the family's own attention is used; the next
simpler layout is used otherwise. A wrong guess would be silent (a family that ignores position ids
computes a tree without any error), so nothing is guessed from names.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from stages.batch import Group, PackedRow, Segment, pack_groups, separate
from stages.errors import CheckpointError
from stages.models import attention
from stages.models.attention import Cache, Segments
from stages.models.forward import hidden_states, logits, run_row, run_step
from stages.models.network import Mode, Network, score_head

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
LOOSE = 1e-6  # float64 where the family itself computes attention in fp32


class Verdict(NamedTuple):
    """The layout that an architecture bears, and whether it decodes with this project's cache."""

    mode: Mode
    cached: bool


def probe(config: PreTrainedConfig) -> Verdict:
    """Try an architecture on a tiny random copy of itself.

    Raises:
        CheckpointError: the head applied to the backbone's states is not what the model computes.
    """
    state, verbosity = torch.random.get_rng_state(), logging.get_verbosity()
    torch.manual_seed(0)
    logging.set_verbosity(logging.CRITICAL)
    try:
        model = _tiny(config)
        with torch.no_grad():
            return _verdict(model)
    finally:
        logging.set_verbosity(verbosity)
        torch.random.set_rng_state(state)


def _verdict(model: PreTrainedModel) -> Verdict:
    dtype = next(model.parameters()).dtype
    row = _example(model.config.get_text_config().vocab_size)
    truth = _apart(model, row)
    network = Network(model, "policy", "padded")
    own = hidden_states(network, row)
    if not _equal(logits(network, own), truth, dtype):
        raise CheckpointError(
            f"models of type {model.config.model_type} change their logits after the output layer "
            "in a way that is not known here",
            do="use a model of another family, such as llama, qwen, gemma, gpt2 or gpt_neox",
        )
    try:
        model.set_attn_implementation(attention.NAME)
        mode = _mode(network, row, own, dtype)
        cached = mode != "padded" and _decodes(network, row, own, dtype)
        ours = model.config._attn_implementation == attention.NAME
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        # The family does not hand the plan on, or its attention is not exchangeable.
        return Verdict("padded", False)
    # Our attention cannot be called by transformers' own decoding, which has no plan to hand on.
    return Verdict("padded", False) if ours and not cached else Verdict(mode, cached)


def _mode(network: Network, row: PackedRow, own: torch.Tensor, dtype: torch.dtype) -> Mode:
    modes: tuple[Mode, ...] = ("tree", "packed")
    for mode in modes:
        network.mode = mode
        if _equal(hidden_states(network, row), own, dtype):
            return mode
    return "padded"


def _decodes(network: Network, row: PackedRow, own: torch.Tensor, dtype: torch.dtype) -> bool:
    """Prefill two prompts of unequal length, then feed their next tokens one by one."""
    flat, index = separate(row)
    expected = own.new_zeros(len(flat.ids), own.shape[1]).index_copy(0, index, own)
    segments = flat.segments[-2:]
    prompts = [range(s.start, s.start + n) for s, n in zip(segments, (4, 5), strict=True)]
    taken = torch.tensor([i for prompt in prompts for i in prompt])
    packed = PackedRow(
        flat.ids[taken],
        flat.positions[taken],
        (Segment(0, 4), Segment(4, 9)),
    )
    source = torch.tensor([[0, 1, 2, 3, 0], [4, 5, 6, 7, 8]])
    cache = Cache(source, torch.tensor([4, 5]))
    run_row(network, packed, Segments(packed.segments, flat.ids.device, cache))
    for step in range(2):
        at = torch.tensor([prompt.stop + step for prompt in prompts])
        if not _equal(run_step(network, flat.ids[at], cache), expected[at], dtype):
            return False
    return True


def _apart(model: PreTrainedModel, row: PackedRow) -> torch.Tensor:
    """The model's own logits of each sequence alone, in the order of the row's tokens."""
    flat, index = separate(row)
    parts = [
        model(input_ids=flat.ids[None, s.start : s.stop], use_cache=False).logits[0]
        for s in flat.segments
    ]
    return torch.cat(parts)[index]


def _equal(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    difference = float((got - expected).abs().max())
    limit = TOLERANCES[dtype]
    if dtype == torch.float64 and difference > limit:
        limit = LOOSE
    return bool(difference <= limit * max(1.0, float(expected.abs().max())))


def _example(vocabulary: int) -> PackedRow:
    """Two rankings: prompts of 5 and 3 tokens, with 2 and 3 answers."""
    rng = np.random.default_rng(0)

    def ids(*lengths: int) -> tuple[np.ndarray, ...]:
        return tuple(rng.integers(0, vocabulary, n) for n in lengths)

    first = Group(ids(5)[0], ids(4, 6), (1, 2))
    second = Group(ids(3)[0], ids(7, 5, 6), (1, 2, 3))
    return pack_groups([first, second]).batch.row


def reads_last_token(config: PreTrainedConfig) -> bool:
    """Whether a classifier of this configuration reads its score at the last token.

    An encoder, such as BERT, reads a text as a whole: its score comes from another place.
    """
    state, verbosity = torch.random.get_rng_state(), logging.get_verbosity()
    torch.manual_seed(0)
    logging.set_verbosity(logging.CRITICAL)
    ids = torch.tensor([[3, 5, 4, 7, 6]])
    try:
        model = _tiny(config, AutoModelForSequenceClassification)
        model.config.pad_token_id = None  # which none of these tokens is
        with torch.no_grad():
            own = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            states = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids))
            ours = score_head(model)(states.last_hidden_state[:, -1])
        return own.shape == ours.shape and _equal(ours, own, own.dtype)
    except (CheckpointError, RuntimeError, ValueError, AttributeError, TypeError, IndexError):
        return False
    finally:
        logging.set_verbosity(verbosity)
        torch.random.set_rng_state(state)


def _tiny(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A random model of this configuration in float64, or in fp32 where the family needs it."""
    for shrink in (_shrunk, _shallow):
        for dtype in (torch.float64, torch.float32):
            try:
                model = auto.from_config(shrink(config), dtype=dtype).eval()
                cache = {"use_cache": False} if auto is AutoModelForCausalLM else {}
                model(input_ids=torch.tensor([[1, 2, 3]]), **cache)
            except (RuntimeError, ValueError, AttributeError, TypeError):
                continue
            return model
    raise CheckpointError(
        f"no small copy of a {config.model_type} model can be run to see which layouts it bears",
        do="use a model of another family, such as llama, qwen, gemma, gpt2 or gpt_neox",
    )


def _shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """One layer of each type, a small vocabulary, no dropout, a window shorter than the text."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()))
    text.num_hidden_layers = min(max(2, len(kinds)), text.num_hidden_layers)
    if "layer_types" in vars(text) and kinds:
        text.layer_types = (kinds * 2)[: text.num_hidden_layers]
    for name in [n for n in vars(text) if "dropout" in n or n.endswith("pdrop")]:
        setattr(text, name, 0.0)
    text.vocab_size = min(text.vocab_size, 128)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    if getattr(text, "sliding_window", None):
        text.sliding_window = 4
    return small


def _shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The shallow copy with few heads of the same width and the same sharing of keys."""
    small = _shallow(config)
    text = small.get_text_config()
    heads = text.num_attention_heads
    shared = heads // (getattr(text, "num_key_value_heads", None) or heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = 2 * shared
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = 2
    hidden = 2 * shared * width
    for name in ("word_embed_proj_dim", "hidden_size"):
        if getattr(text, name, None) is not None:
            setattr(text, name, hidden)
    for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"):
        if getattr(text, name, None):
            setattr(text, name, 64)
    return small
