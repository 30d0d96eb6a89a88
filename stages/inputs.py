"""The records of a stage, and what it reads beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

from stages import terms
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
from stages.runtime import start
from stages.runtime.session import Session

ADAPTIVE = ("target", "horizon", "gain")
"""Keys of ``kl`` that the adaptive controller alone reads."""


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
