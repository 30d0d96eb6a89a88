"""The four models of PPO, and whether they fit together."""

from __future__ import annotations

from pathlib import Path

from stages.config import PpoConfig
from stages.errors import CheckpointError
from stages.models.folder import model_folder, read_identity
from stages.models.load import Loading, load_policy, load_reward, load_tokenizer, with_fresh_head
from stages.models.network import Kind, Network, without_dropout
from stages.rollout import Readers
from stages.runtime import start
from stages.runtime.session import Session


def load(session: Session, config: PpoConfig, text: start.Text) -> Readers:
    """The policy, its frozen reference, the frozen reward model, and the critic."""
    loading, reporter = start.loading_of(session), session.reporter
    policy = without_dropout(load_policy(config.model, loading))
    reference = load_policy(config.reference or config.model, loading).freeze()
    reward = _load_scorer(config, config.reward.path, loading, text, "reward").freeze()
    critic = without_dropout(_load_critic(config, loading, text))
    for network in (policy, reference, critic):
        start.adopt(network, text)
    reporter.note(text.pad_how)
    for name, network in (("policy", policy), ("reward", reward)):
        start.say_layout(session, network, name)
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        reporter.warn(
            "rollout.top_p or rollout.top_k cuts the distribution that answers are sampled from; "
            "log-probabilities, ratios and KL stay those of the whole softmax"
        )
    if config.preset == "instructgpt":
        reporter.note(
            f"the paper does not print the policy's learning rate; {config.train.learning_rate:g} "
            "is used"
        )
    return Readers(policy, reference, reward, critic)


def parents(config: PpoConfig) -> list[dict[str, str]]:
    """The models that the run is made from."""
    found = [
        start.parent("policy", config.model),
        start.parent("reference", config.reference or config.model),
        start.parent("reward", config.reward.path),
    ]
    if config.critic.init not in ("reward", "policy"):
        found.append(start.parent("critic", _critic_folder(config.critic.init)))
    return found


def _load_critic(config: PpoConfig, loading: Loading, text: start.Text) -> Network:
    if config.critic.init == "policy":
        return with_fresh_head(config.model, loading, seed=config.seed, kind="critic")
    if config.critic.init == "reward":
        return _load_scorer(config, config.reward.path, loading, text, "critic")
    return _load_scorer(config, _critic_folder(config.critic.init), loading, text, "critic")


def _critic_folder(source: str) -> str:
    """The critic inside a run folder of ppo, or the folder itself."""
    inner = Path(source) / "critic"
    return str(inner) if inner.is_dir() else source


def _load_scorer(
    config: PpoConfig, source: str, loading: Loading, text: start.Text, kind: Kind
) -> Network:
    """A reward model or critic that reads the policy's ids.

    Raises:
        CheckpointError: its vocabulary or template is another than the policy's.
    """
    network = load_reward(source, loading, kind=kind)
    identity = read_identity(model_folder(source))
    if identity is not None:
        start.require_same_text(identity, text.codec, source, config.model)
        return network
    tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    if tokenizer.get_vocab() != text.tokenizer.get_vocab():
        raise CheckpointError(
            f"its vocabulary is not that of {config.model}",
            where=source,
            do="use a reward model that was made from the same base model",
        )
    return network
