"""What a stage reads: the models that must fit together, and the records.

Whatever can be refused without reading weights is refused here; ``rlhf check`` comes by as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from stages import methods, terms
from stages.config import (
    KtoConfig,
    OdpoConfig,
    OnlineConfig,
    PairedConfig,
    PpoConfig,
    PreferenceConfig,
    RewardModelConfig,
    SftConfig,
    StageConfig,
)
from stages.config.episodes import Kl
from stages.data import store
from stages.data.store import LoadSpec, Splits, Store
from stages.errors import CheckpointError
from stages.models import lora
from stages.models.configured import headed_config, is_reward_model, policy_config, reward_config
from stages.models.folder import model_folder, read_identity
from stages.models.load import has_residual_dropout, load_tokenizer, set_dropout
from stages.models.network import Kind
from stages.runtime import start
from stages.runtime.session import Session

ADAPTIVE = ("target", "horizon", "gain")
"""Keys of ``kl`` that the adaptive controller alone reads."""


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


class Inputs(NamedTuple):
    """The records of a stage, and what it reads beside them.

    Attributes:
        records: what it learns from, and what is held out.
        beside: pretraining documents (sft, ppo), or the demonstrations that normalise scores.
    """

    records: Splits
    beside: Splits | None = None

    @property
    def second(self) -> Store | None:
        """The records of ``beside``."""
        return None if self.beside is None else self.beside.train


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


def load(session: Session, config: StageConfig, text: start.Text) -> Inputs:
    """The records of a stage, whichever it is."""
    if isinstance(config, SftConfig):
        return demonstrations(session, config, text)
    if isinstance(config, RewardModelConfig):
        return rankings(session, config, text)
    if isinstance(config, PreferenceConfig):
        return preferences(session, config, text)
    assert isinstance(config, OnlineConfig)
    return prompts(session, config, text)


def demonstrations(session: Session, config: SftConfig, text: start.Text) -> Inputs:
    """Demonstrations, split by prompt, and the pretraining documents where they are asked for."""
    spec = _spec(session, config, "demonstrations", train_on=config.sft.train_on)
    found = _load(session, text, spec)
    pretrain = config.sft.pretrain
    if pretrain.data is None or pretrain.share == 0:
        return Inputs(found)
    longest = config.data.max_prompt_tokens + config.data.max_response_tokens
    spec = _spec(session, config, "documents", source=pretrain.data, max_tokens=longest)
    return Inputs(found, _beside(session, text, spec, "pretrain"))


def rankings(session: Session, config: RewardModelConfig, text: start.Text) -> Inputs:
    """Rankings, split by prompt, and the file of demonstrations whose scores shall average 0."""
    options, normalise = config.ranking, config.normalise
    spec = _spec(session, config, "rankings", ties=options.ties, margin=options.margin)
    found = _load(session, text, spec)
    if normalise.on != "demonstrations" or normalise.demonstrations is None:
        return Inputs(found)
    spec = _spec(session, config, "demonstrations", source=normalise.demonstrations)
    return Inputs(found, _beside(session, text, spec, "demonstrations"))


def preferences(session: Session, config: PreferenceConfig, text: start.Text) -> Inputs:
    """Rankings, split by prompt; for kto labelled answers, or rankings read as such."""
    if isinstance(config, KtoConfig):
        return Inputs(_load(session, text, _spec(session, config, "labelled")))
    assert isinstance(config, PairedConfig)
    ties, margin = config.ranking.ties, _offset(config)
    return Inputs(
        _load(session, text, _spec(session, config, "rankings", ties=ties, margin=margin))
    )


def _offset(config: PairedConfig) -> Any:
    """What the store keeps for each pair: for odpo, how much better the preferred answer is."""
    if not isinstance(config, OdpoConfig):
        return 0.0
    if config.odpo.offset == "rank":
        return {"per_rank": 1.0}
    return "score above 0" if config.odpo.scale == "log" else "score"


def prompts(session: Session, config: OnlineConfig, text: start.Text) -> Inputs:
    """Prompts that leave room for an answer, and the pretraining documents of PPO-ptx."""
    _remark(session, config)
    longest, fields = config.rollout.max_new_tokens, terms.need_fields(config)
    spec = _spec(session, config, "prompts", reserve_tokens=longest, fields=fields)
    found = _load(session, text, spec)
    terms.require_fit(config, text, found)
    if not isinstance(config, PpoConfig) or config.ptx.data is None:
        return Inputs(found)
    limit = config.ptx.max_tokens
    spec = _spec(session, config, "documents", source=config.ptx.data, max_tokens=limit)
    return Inputs(found, _beside(session, text, spec, "ptx"))


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


def _spec(session: Session, config: StageConfig, kind: str, **options: Any) -> LoadSpec:
    return LoadSpec(
        kind=kind,
        data=config.data,
        max_positions=start.positions_of(config),
        output=session.folder,
        main=session.world.main,
        wait=session.world.wait,
        **options,
    )


def _load(session: Session, text: start.Text, spec: LoadSpec) -> Splits:
    found = store.load(spec, text.codec, reporter=session.reporter)
    for note in found.report.notes:
        session.reporter.note(note)
    session.facts["data"] = found.report.rows()
    return found


def _remark(session: Session, config: OnlineConfig) -> None:
    """What works and may not be meant."""
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        session.reporter.warn(
            "rollout.top_p or rollout.top_k cuts the distribution that answers are sampled from; "
            "log-probabilities, ratios and KL stay those of the whole softmax"
        )
    if config.preset == "instructgpt":
        session.reporter.note(
            f"the paper does not print the policy's learning rate; {config.train.learning_rate:g} "
            "is used"
        )
    minibatch, episodes = config.train.batch_size, config.rollout.batch_size
    if minibatch > episodes:
        session.reporter.note(
            f"train.batch_size ({minibatch}) is above rollout.batch_size ({episodes}): a rollout "
            "is one minibatch"
        )
    if isinstance(config.kl, Kl) and (unused := _unused(config.kl)):
        named = " and ".join(f"kl.{name}" for name in unused)
        session.reporter.warn(f"{named} without effect: kl.controller is fixed, not adaptive")
    for placed, term in terms.models(config):
        identity = terms.identity_of(term.path)
        if identity is not None and identity.kind == "critic":
            session.reporter.warn(
                f"{placed.key}.path ({term.path}) is a critic: it has learned to foretell returns, "
                "not to judge answers; rlhf train-rm makes a reward model"
            )


def _unused(kl: Kl) -> list[str]:
    """Keys that were given to a controller that does not read them."""
    if kl.controller == "adaptive":
        return []
    return [name for name in ADAPTIVE if getattr(kl, name) != getattr(Kl(), name)]


def _beside(session: Session, text: start.Text, spec: LoadSpec, role: str) -> Splits:
    found = store.load(spec, text.codec, reporter=session.reporter)
    session.facts["data"] += [row | {"role": role} for row in found.report.rows()]
    return found
