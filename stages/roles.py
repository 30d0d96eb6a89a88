"""The models of a stage: which there are, in which roles, and whether they fit together.

Whatever can be refused without reading weights is refused here; ``rlhf check`` comes by as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from stages import methods, terms
from stages.config import (
    OnlineConfig,
    PpoConfig,
    PreferenceConfig,
    RewardModelConfig,
    SftConfig,
    StageConfig,
)
from stages.errors import CheckpointError
from stages.models import lora
from stages.models.configured import headed_config, is_reward_model, policy_config, reward_config
from stages.models.folder import model_folder, read_identity
from stages.models.load import has_residual_dropout, load_tokenizer, set_dropout
from stages.models.network import Kind
from stages.runtime import start
from stages.runtime.session import Session


@dataclass(frozen=True)
class Model:
    """A model that a stage reads.

    Attributes:
        role: what the stage uses it as.
        source: run folder, model folder or hub id.
        kind: what it becomes: a policy that is given a scalar head is a reward model here.
        config: its transformers config.
        trained: whether the stage trains it.
        shares: the role of the model in training whose weights it is, with the adapters off.
        reads_ids: whether it must read the ids that the stage makes; a reward model may do without.
    """

    role: str
    source: str
    kind: Kind
    config: PreTrainedConfig
    trained: bool
    shares: str | None = None
    reads_ids: bool = True


def models(session: Session, config: StageConfig, text: start.Text) -> list[Model]:
    """The models of a stage, each of the right kind and reading text as the stage does.

    Raises:
        CheckpointError: one is missing, damaged, of another kind, vocabulary or template.
        ConfigError: the family has no dropout to set, or the package for adapters is missing.
    """
    session.facts["text"] = {
        "vocabulary_hash": text.codec.vocabulary_hash,
        "template_hash": text.codec.template_hash,
    }
    lora.require(config.lora)
    if isinstance(config, SftConfig):
        found = [_policy("model", config.model, config, trained=True)]
        set_dropout(found[0].config, start.loading_of(session), config.model)
        if config.train.dropout is not None and not has_residual_dropout(found[0].config):
            family = found[0].config.model_type
            session.reporter.note(f"{family} models have no residual dropout: the preset's is left")
    elif isinstance(config, RewardModelConfig):
        found = _of_reward_model(config)
    elif isinstance(config, PreferenceConfig):
        found = _of_preference(config)
    else:
        assert isinstance(config, OnlineConfig)
        found = _of_online(config, text)
    for source in dict.fromkeys(model.source for model in found if model.reads_ids):
        if source != config.model:
            _require_same_text(source, config, text)
    return found


def reference_shares(config: OnlineConfig) -> bool:
    """Whether the reference is the policy with its adapters off."""
    reference = config.reference or config.model
    return config.lora is not None and _place(reference) == _place(config.model)


def _place(source: str) -> str:
    folder = model_folder(source)
    return str(folder.resolve()) if folder.is_dir() else source


def _of_reward_model(config: RewardModelConfig) -> list[Model]:
    trusted = config.trust_remote_code
    known = is_reward_model(config.model, trust_remote_code=trusted)
    headed = (reward_config if known else headed_config)(config.model, trusted)
    found = [Model("model", config.model, "reward", headed, True)]
    if config.normalise.on == "reference":
        source = config.normalise.policy or config.model
        found.append(_policy("normalise.policy", source, config))
    return found


def _of_preference(config: PreferenceConfig) -> list[Model]:
    """The policy, and the reference where it is at hand in training."""
    policy = _policy("model", config.model, config, trained=True)
    if not methods.reads_reference_live(config):
        return [policy]
    shares = None if config.lora is None else "model"
    return [policy, replace(_policy("reference", config.model, config), shares=shares)]


def _of_online(config: OnlineConfig, text: start.Text) -> list[Model]:
    rewards = [
        Model(
            terms.role(config, placed),
            term.path,
            "reward",
            reward_config(term.path, config.trust_remote_code),
            trained=False,
            reads_ids=False,
        )
        for placed, term in terms.models(config)
    ]
    reference = _policy("reference", config.reference or config.model, config)
    found = [
        _policy("policy", config.model, config, trained=True),
        replace(reference, shares="policy" if reference_shares(config) else None),
    ]
    if not isinstance(config, PpoConfig):
        return found + rewards
    first = terms.critic_term(config, text)
    if first is not None and config.lora is not None:
        own = terms.role(config, first)
        rewards = [replace(m, shares="critic") if m.role == own else m for m in rewards]
    return [*found, *rewards, _critic(config, text)]


def _critic(config: PpoConfig, text: start.Text) -> Model:
    source, init = terms.critic_source(config, text), config.critic.init
    read = headed_config if init == "policy" else reward_config
    found = read(source, config.trust_remote_code)
    return Model("critic", source, "critic", found, True, reads_ids=init != "reward")


def _policy(role: str, source: str, config: StageConfig, *, trained: bool = False) -> Model:
    found = policy_config(source, config.trust_remote_code)
    return Model(role, source, "policy", found, trained)


def _require_same_text(source: str, config: StageConfig, text: start.Text) -> None:
    """A model reads the ids that the stage makes; one of another tool is known by its vocabulary.

    Raises:
        CheckpointError: its vocabulary or template is another.
    """
    folder = model_folder(source)
    identity = read_identity(folder) if folder.is_dir() else None
    if identity is not None:
        start.require_same_text(identity, text.codec, source, config.model)
        return
    other = load_tokenizer(source, trust_remote_code=config.trust_remote_code).get_vocab()
    # The stage may have given its tokenizer a pad token, which no text contains.
    own_pad = {(text.tokenizer.pad_token, text.pad_id)}
    if (other.items() ^ text.tokenizer.get_vocab().items()) - own_pad:
        raise CheckpointError(
            f"its vocabulary is not that of {config.model}",
            where=source,
            do="use models that come from the same base model",
        )
