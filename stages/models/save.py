"""Writing a model as a plain Hugging Face folder that other tools load as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from stages.models.folder import Identity, write_identity
from stages.models.lora import merged
from stages.models.network import Network

SPARE = re.compile(r"reserved|unused|extra_id|endoftext|unk", re.IGNORECASE)
PAD = "<|pad|>"


class PadChoice(NamedTuple):
    """The pad token, and in words which case applied."""

    pad_id: int
    how: str


def choose_pad(
    tokenizer: PreTrainedTokenizerBase, rows: int, stop_ids: tuple[int, ...]
) -> PadChoice:
    """Give the tokenizer a pad token that is no stop token.

    Every Hugging Face consumer of a reward model reads the score at the last token whose id is not
    the pad id, so a pad id equal to the end token would move the score one token ahead.

    Args:
        tokenizer: changed in place.
        rows: rows of the model's embedding.
        stop_ids: tokens that end an answer.
    """
    own = tokenizer.pad_token_id
    if own is not None and own not in stop_ids:
        return PadChoice(own, f"pad token: the tokenizer's own, {tokenizer.pad_token}")
    spare = _spare_token(tokenizer, stop_ids)
    if spare is not None:
        tokenizer.pad_token = spare
        return PadChoice(tokenizer.pad_token_id, f"pad token: the unused token {spare}")
    tokenizer.add_special_tokens({"pad_token": PAD})
    where = "a spare embedding row" if tokenizer.pad_token_id < rows else "a new embedding row"
    return PadChoice(tokenizer.pad_token_id, f"pad token: {PAD}, new, in {where}")


def _spare_token(tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]) -> str | None:
    """A reserved, unused or unknown token that neither ends nor begins a text."""
    taken = {*stop_ids, tokenizer.bos_token_id, tokenizer.eos_token_id}
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    found = {tokenizer.convert_tokens_to_ids(t): t for t in special if SPARE.search(t)}
    return next((found[i] for i in sorted(found) if i not in taken), None)


def apply_special_tokens(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    stop_ids: tuple[int, ...],
) -> None:
    """Bring model config, generation settings and embedding into agreement with the tokenizer."""
    embedding: Any = module.get_input_embeddings()
    if len(tokenizer) > embedding.weight.shape[0]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # every copy of the model gets the same new rows
            module.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    embedding = module.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = pad_id  # its row gets no gradient, and the old one may be read
    stops = list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]
    module.config.get_text_config().pad_token_id = pad_id
    module.config.pad_token_id = pad_id
    module.config.eos_token_id = stops
    module.config.bos_token_id = tokenizer.bos_token_id
    # Settings of the base model may be invalid and would fail at the first save; sampling is said
    # by whoever samples, so only the special tokens are kept.
    module.generation_config = GenerationConfig(
        pad_token_id=pad_id, eos_token_id=stops, bos_token_id=tokenizer.bos_token_id
    )


def save_model(
    network: Network,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    identity: Identity,
    *,
    dtype: torch.dtype | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write weights, config, tokenizer, chat template, generation settings, card and identity.

    Args:
        network: the model.
        folder: an existing folder, not yet visible to others.
        tokenizer: carries the chat template that the stage used.
        identity: what ``rlhf.json`` says; mean and std also go to ``config.json``.
        dtype: number format of the saved weights; None as trained.
        weights: other values for what is trained, by name (an average of it).
    """
    config = network.module.config
    if identity.kind != "policy":
        config.mean, config.std = identity.mean, identity.std
        config.problem_type = "regression"  # other tools then read the raw score
    network.module.save_pretrained(folder, state_dict=_state(network.module, dtype, weights))
    if dtype is not None:
        stored, config.dtype = config.dtype, dtype  # the call above wrote that of the module
        config.save_pretrained(folder)
        config.dtype = stored
    if identity.kind == "policy":
        network.module.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_identity(folder, identity)
    (folder / "README.md").write_text(_card(identity, config.model_type), encoding="utf-8")


def _state(
    module: PreTrainedModel, dtype: torch.dtype | None, weights: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """What is written: adapters merged, and tied weights once, or their other name would lag."""
    once = {name for name, _ in module.named_parameters()}
    once |= {name for name, _ in module.named_buffers()}
    state = {name: value for name, value in module.state_dict().items() if name in once}
    state = merged(module, state | (weights or {}))
    if dtype is None:
        return state
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}


def _card(identity: Identity, family: str) -> str:
    """A model card: what this is, what it was made from, how to load it."""
    auto = "AutoModelForCausalLM"
    score = ""
    if identity.kind != "policy":
        auto = "AutoModelForSequenceClassification"
        score = f"\nscore = (logits - {identity.mean!r}) / {identity.std!r}\n"
    parent = identity.parent.get("path", "nothing")
    return (
        f"---\nlibrary_name: transformers\ntags: [rlhf, {identity.kind}]\n---\n"
        f"# {identity.kind} ({family})\n\n"
        f"Made by `rlhf` in stage {identity.stage} from {parent}.\n{score}\n"
        f"```python\nfrom transformers import {auto}, AutoTokenizer\n\n"
        f"model = {auto}.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```\n"
    )
