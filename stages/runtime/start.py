"""What every stage does before its first step: tokenizer, template, pad token, parents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stages.config import StageConfig, preset_values
from stages.data.templates import Codec, make_codec
from stages.errors import CheckpointError, ConfigError
from stages.models.configured import max_positions, read_model_config
from stages.models.folder import Identity, model_folder, read_identity
from stages.models.load import Loading, load_tokenizer
from stages.models.lora import attach, is_adapted, save_adapter
from stages.models.network import Kind, Network
from stages.models.save import apply_special_tokens, choose_pad, save_model
from stages.runtime.run_dir import weights_hash
from stages.runtime.session import Session, storage_dtype

ADAPTERS = {"model": "adapter", "critic": "adapter_critic"}
"""The folder beside a model folder that holds its adapters alone."""


@dataclass(frozen=True)
class Text:
    """How a stage reads and writes text: tokenizer, codec, pad token, and how it was chosen."""

    tokenizer: PreTrainedTokenizerBase
    codec: Codec
    pad_id: int
    pad_how: str


def text_of(config: StageConfig, *, stop: tuple[str, ...] = ()) -> Text:
    """The tokenizer and template of the model that a stage starts from.

    Args:
        config: the stage's config.
        stop: further stop tokens, as text.

    Raises:
        CheckpointError: the model was made with another template or vocabulary.
        ConfigError: a template is missing, or a stop text is not one token.
    """
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    folder = model_folder(config.model)
    identity = read_identity(folder) if folder.is_dir() else None
    extra = (*_configured_stops(folder), *(_stop_id(tokenizer, text) for text in stop))
    codec = _codec(tokenizer, config, extra)
    about = read_model_config(config.model, config.trust_remote_code).get_text_config()
    rows = getattr(about, "vocab_size", 0)  # a model without words is refused as such, later
    pad = choose_pad(tokenizer, rows, codec.stop_ids)
    codec = _codec(tokenizer, config, extra)
    if codec.template is not None:
        tokenizer.chat_template = codec.template
    if identity is not None:
        require_same_text(identity, codec, config.model, "the config")
    return Text(tokenizer, codec, pad.pad_id, pad.how)


def own_codec(source: str, *, trust_remote_code: bool = False) -> Codec:
    """How a model reads text, as its own folder says it.

    One that was trained here says whether plain prompts become turns; a chat model of another tool
    is asked in turns.
    """
    folder = model_folder(source)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    identity = read_identity(folder) if folder.is_dir() else None
    in_turns = tokenizer.chat_template is not None if identity is None else identity.as_messages
    return make_codec(
        tokenizer,
        chat_template=None,
        as_messages=in_turns,
        extra_stop_ids=identity.stop_ids if identity else (),
    )


def require_same_text(identity: Identity, codec: Codec, source: str, other: str) -> None:
    """Two models, or a model and a config, read text in the same way.

    Raises:
        CheckpointError: vocabulary or template differ.
    """
    if identity.vocabulary_hash != codec.vocabulary_hash:
        raise CheckpointError(
            f"its vocabulary ({identity.vocabulary_hash[:8]}) is not that of {other} "
            f"({codec.vocabulary_hash[:8]})",
            where=source,
            do="use models that come from the same base model",
        )
    if identity.template_hash != codec.template_hash:
        own, asked = (str(x.as_messages).lower() for x in (identity, codec))
        how = "another chat template" if own == asked else f"data.as_messages: {own}"
        now = "" if own == asked else f" ({asked})"
        raise CheckpointError(
            f"it was made with {how} than {other} asks for{now}",
            where=source,
            do="set data.chat_template and data.as_messages as in the earlier stage",
        )


def loading_of(session: Session) -> Loading:
    """How the stage's models are loaded."""
    train = session.config.train
    dropout = getattr(train, "dropout", None)
    preset = preset_values(session.config.stage, session.config.preset)
    return Loading(
        session.arithmetic,
        trust_remote_code=session.config.trust_remote_code,
        gradient_checkpointing=train.gradient_checkpointing,
        dropout=dropout,
        dropout_optional=preset.get("train", {}).get("dropout") == dropout,
    )


def positions_of(config: StageConfig) -> int | None:
    """How many positions the model has, from its config alone."""
    return max_positions(read_model_config(config.model, config.trust_remote_code))


def adopt(network: Network, text: Text) -> None:
    """Bring a network's special tokens into agreement with the stage's tokenizer."""
    apply_special_tokens(network.module, text.tokenizer, text.pad_id, text.codec.stop_ids)


def adapt(session: Session, network: Network, name: str) -> None:
    """Put in the adapters that the config asks for, and say how much is trained then."""
    lora = session.config.lora
    if lora is None:
        return
    attach(network, lora, seed=session.config.seed)
    trained = sum(p.numel() for _, p in network.parameters())
    whole = sum(p.numel() for p in network.module.parameters())
    session.reporter.note(
        f"{name}: adapters of rank {lora.rank}, {trained:,} of {whole:,} parameters are trained"
    )


def make_ready(session: Session, network: Network, text: Text) -> None:
    """What a stage that trains one model does with it before its first step, and says of it."""
    adopt(network, text)
    adapt(session, network, "model")
    session.reporter.note(text.pad_how)
    say_layout(session, network, "model")


def identity_of(session: Session, text: Text, kind: Kind, **facts: Any) -> Identity:
    """What the ``rlhf.json`` of a model made by this stage says."""
    return Identity(
        kind=kind,
        stage=session.config.stage,
        template_hash=text.codec.template_hash,
        vocabulary_hash=text.codec.vocabulary_hash,
        as_messages=text.codec.as_messages,
        stop_ids=text.codec.stop_ids,
        pad_id=text.pad_id,
        parent={k: v for k, v in parent("model", session.config.model).items() if k != "role"},
        **facts,
    )


def publish(
    session: Session,
    text: Text,
    network: Network,
    name: str,
    identity: Identity,
    *,
    base: str,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write a model folder with adapters merged, and the adapters beside it.

    Args:
        session: of the run.
        text: the tokenizer that the stage used.
        network: what was trained.
        name: of the folder.
        identity: what its ``rlhf.json`` says.
        base: the model that the network was loaded from.
        weights: other values for what is trained, by name (an average of it).
    """
    dtype = storage_dtype(session.config)
    beside = ADAPTERS.get(name)
    if beside is not None:
        session.drop(beside)  # a kill in between leaves none, and not that of an earlier model

    def write(folder: Path) -> None:
        save_model(network, folder, text.tokenizer, identity, dtype=dtype, weights=weights)

    session.publish(name, write)
    if beside is not None and is_adapted(network.module):
        session.publish(beside, lambda folder: save_adapter(network.module, folder, base, dtype))


def parent(role: str, source: str) -> dict[str, str]:
    """A model that a run is made from, with a hash of its weights, and how its score is scaled."""
    folder = model_folder(source)
    found = {"role": role, "path": source, "hash": weights_hash(folder)}
    identity = read_identity(folder) if folder.is_dir() else None
    if identity is not None and identity.kind != "policy":
        found["scale"] = f"mean {identity.mean!r}, std {identity.std!r}"
    return found


def say_layout(session: Session, network: Network, name: str) -> None:
    """One notice where an architecture does not bear the fast layout."""
    family = network.module.config.model_type
    if network.mode == "packed":
        session.reporter.note(f"{name}: {family} models run in packed rows without shared prompts")
    elif network.mode == "padded":
        session.reporter.note(f"{name}: {family} models run in padded rows, which is slower")


def _codec(tokenizer: Any, config: StageConfig, extra: tuple[int, ...]) -> Codec:
    return make_codec(
        tokenizer,
        chat_template=config.data.chat_template,
        as_messages=config.data.as_messages,
        extra_stop_ids=extra,
    )


def _configured_stops(folder: Path) -> tuple[int, ...]:
    """The end tokens in the model's generation settings, which may be several."""
    try:
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        ends = settings.get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return ()
    ids = ends if isinstance(ends, list) else [ends]
    return tuple(i for i in ids if isinstance(i, int))


def _stop_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ConfigError(
            f"the stop text {text!r} is {len(ids)} tokens, and a stop is one token",
            where="rollout.stop",
            do="name a text that the tokenizer keeps as one token",
        )
    return int(ids[0])
