"""The terms of the reward as a run opens them: which read the policy's token ids, which the text.

A reward model of the policy's vocabulary and template reads the ids beside the policy, at the cost
of one pass; another one, and whatever is no model, reads the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stages.config import (
    HttpReward,
    ModelReward,
    OnlineConfig,
    PpoConfig,
    PythonReward,
    RuleReward,
)
from stages.config.rewards import Placed, without_secrets
from stages.data.store import Splits
from stages.errors import ConfigError
from stages.models.configured import reads_whole
from stages.models.folder import Identity, model_folder, read_identity
from stages.models.load import load_tokenizer
from stages.runtime import start
from stages.runtime.rewards import python, rule
from stages.runtime.rewards.model import require_readable
from stages.runtime.rewards.texts import Scorer


def models(config: OnlineConfig) -> Iterator[tuple[Placed, ModelReward]]:
    """The terms that are reward models."""
    return ((each, each.term) for each in config.terms if isinstance(each.term, ModelReward))


def role(config: OnlineConfig, placed: Placed) -> str:
    """What a reward model is called among the models of a run: ``reward`` where it is the only."""
    return "reward" if len(list(models(config))) == 1 else f"reward_{placed.name}"


def reads_ids(source: str, config: OnlineConfig, text: start.Text) -> bool:
    """Whether a reward model reads text as the policy does, token by token."""
    if reads_whole(source, config.trust_remote_code):
        return False
    identity = identity_of(source)
    if identity is not None and identity.template_hash != text.codec.template_hash:
        return False
    return shares_vocabulary(source, config, text)


def shares_vocabulary(source: str, config: OnlineConfig, text: start.Text) -> bool:
    """Whether a model has the policy's tokens; one of another tool is known by its tokenizer."""
    identity = identity_of(source)
    if identity is not None:
        return identity.vocabulary_hash == text.codec.vocabulary_hash
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    # The stage may have given its tokenizer a pad token, which no text contains.
    own_pad = {(text.tokenizer.pad_token, text.pad_id)}
    return not (tokenizer.get_vocab().items() ^ text.tokenizer.get_vocab().items()) - own_pad


def identity_of(source: str) -> Identity | None:
    """What a model folder says about itself; None for models of other tools and of the hub."""
    folder = model_folder(source)
    return read_identity(folder) if folder.is_dir() else None


def critic_term(config: PpoConfig, text: start.Text) -> Placed | None:
    """The term that ``critic.init: reward`` starts from; None where it starts elsewhere.

    Raises:
        ConfigError: no term is a reward model of the policy's vocabulary.
    """
    if config.critic.init != "reward":
        return None
    for placed, term in models(config):
        whole = reads_whole(term.path, config.trust_remote_code)
        if not whole and shares_vocabulary(term.path, config, text):
            return placed
    raise ConfigError(
        f"no term of the reward is a model with the vocabulary of {config.model}",
        where="critic.init: reward",
        do="set critic.init: policy, which starts the critic from the policy",
    )


def critic_source(config: PpoConfig, text: start.Text) -> str:
    """What the critic starts from; in a run folder of ppo, the critic there."""
    placed = critic_term(config, text)
    if placed is not None:
        assert isinstance(placed.term, ModelReward)
        return placed.term.path
    return config.model if config.critic.init == "policy" else earlier_critic(config.critic.init)


def earlier_critic(source: str) -> str:
    """The critic of an earlier run, or the folder itself."""
    inner = Path(source) / "critic"
    return str(inner) if inner.is_dir() else source


def need_fields(config: OnlineConfig) -> bool:
    """Whether a term reads the other fields of a prompt's line."""
    return any(
        isinstance(term, PythonReward | HttpReward)
        or (isinstance(term, RuleReward) and term.rule == "exact_match")
        for _, _, term in config.terms
    )


def told(config: OnlineConfig, text: start.Text) -> dict[str, dict[str, object]]:
    """Name of each term → its type, its weight, where it is from and what it reads."""
    found = {}
    for _, name, term in config.terms:
        reads = "text"
        if isinstance(term, ModelReward | PythonReward):
            source = term.path
            if isinstance(term, ModelReward) and reads_ids(source, config, text):
                reads = "token ids"
        else:
            source = without_secrets(term.url) if isinstance(term, HttpReward) else term.rule
        found[name] = {"type": term.type, "from": source, "reads": reads, "weight": term.weight}
    return found


def require(config: OnlineConfig) -> None:
    """What reads texts without a model can be opened: a Python file is run for that.

    Raises:
        ConfigError: it cannot.
    """
    for placed in config.terms:
        if isinstance(placed.term, PythonReward):
            python.load(placed)


def require_fit(config: OnlineConfig, text: start.Text, prompts: Splits) -> None:
    """The prompts are such as the terms can read.

    Raises:
        ConfigError: no line has the field that a rule compares, or a reward model of another
            tokenizer cannot read the prompts.
    """
    for placed in config.terms:
        term = placed.term
        if isinstance(term, RuleReward) and term.rule == "exact_match":
            _require_field(placed, term, prompts)
        elif isinstance(term, ModelReward) and not reads_ids(term.path, config, text):
            if reads_whole(term.path, config.trust_remote_code):
                continue  # its tokenizer joins any two texts
            codec = start.own_codec(term.path, trust_remote_code=config.trust_remote_code)
            asked = (item.prompt for item in prompts.train)
            require_readable(codec, asked, term.path, placed.key)


def _require_field(placed: Placed, term: RuleReward, prompts: Splits) -> None:
    if not any(item.record.get(str(term.field)) is not None for item in prompts.train):
        found = ", ".join(prompts.train[0].record)
        raise ConfigError(
            f"no line of the prompts has such a field; the first has {found}",
            where=f"{placed.key}.field: {term.field}",
            do="name a field of data.train that holds the right answer",
        )


def plain_scorer(placed: Placed) -> Scorer | None:
    """A term that needs no model, ready to read texts; None for a model.

    Raises:
        ConfigError: it cannot be opened.
    """
    term = placed.term
    if isinstance(term, RuleReward):
        return rule.scorer(term)
    if isinstance(term, PythonReward):
        return python.scorer(placed, python.load(placed))
    if isinstance(term, HttpReward):
        # Nothing of the network is imported where no server is to be asked.
        from stages.runtime.rewards.http import Server

        return Server(placed, term)
    return None
