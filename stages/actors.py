"""The four models of PPO; whether they fit together is judged in ``inputs``."""

from __future__ import annotations

from stages.config import PpoConfig
from stages.inputs import critic_folder
from stages.models.load import Loading, load_policy, load_reward, with_fresh_head
from stages.models.network import Network, without_dropout
from stages.rollout import Readers
from stages.runtime import start
from stages.runtime.session import Session


def load(session: Session, config: PpoConfig, text: start.Text) -> Readers:
    """The policy, its frozen reference, the frozen reward model, and the critic."""
    loading, reporter = start.loading_of(session), session.reporter
    policy = without_dropout(load_policy(config.model, loading))
    reference = load_policy(config.reference or config.model, loading).freeze()
    reward = load_reward(config.reward.path, loading).freeze()
    critic = without_dropout(_load_critic(config, loading))
    for network in (policy, reference, critic):
        start.adopt(network, text)
    reporter.note(text.pad_how)
    for name, network in (("policy", policy), ("reward", reward)):
        start.say_layout(session, network, name)
    return Readers(policy, reference, reward, critic)


def parents(config: PpoConfig) -> list[dict[str, str]]:
    """The models that the run is made from."""
    found = [
        start.parent("policy", config.model),
        start.parent("reference", config.reference or config.model),
        start.parent("reward", config.reward.path),
    ]
    if config.critic.init not in ("reward", "policy"):
        found.append(start.parent("critic", critic_folder(config.critic.init)))
    return found


def _load_critic(config: PpoConfig, loading: Loading) -> Network:
    if config.critic.init == "policy":
        return with_fresh_head(config.model, loading, seed=config.seed, kind="critic")
    own = config.critic.init != "reward"
    source = critic_folder(config.critic.init) if own else config.reward.path
    return load_reward(source, loading, kind="critic")
