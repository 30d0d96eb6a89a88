"""The models that write and read answers; whether they fit together is judged in ``inputs``."""

from __future__ import annotations

from stages import inputs
from stages.config import OnlineConfig, PpoConfig
from stages.models import lora
from stages.models.load import Loading, load_policy, load_reward, with_fresh_head
from stages.models.network import Network, without_dropout
from stages.rollout import Readers
from stages.runtime import start
from stages.runtime.optim import Trainee
from stages.runtime.session import Session


def load(session: Session, config: OnlineConfig, text: start.Text) -> Readers:
    """The policy, its frozen reference, the frozen reward model, and in ppo the critic.

    With adapters, what a trained network starts from is that network with its adapters off: ppo
    then holds two models, not four.
    """
    loading, reporter = start.loading_of(session), session.reporter
    policy, critic = without_dropout(load_policy(config.model, loading)), None
    trained = {"policy": policy}
    if isinstance(config, PpoConfig):
        critic = trained["critic"] = without_dropout(_load_critic(config, loading))
    for name, network in trained.items():
        start.adopt(network, text)
        start.adapt(session, network, name)
    if inputs.reference_shares(config):
        reference = lora.without(policy, "policy")
    else:
        reference = load_policy(config.reference or config.model, loading)
        start.adopt(reference, text)  # new rows are drawn in the format of the policy's
        reference.freeze()
    if critic is not None and inputs.reward_shares(config):
        reward = lora.without(critic, "reward")
    else:
        reward = load_reward(config.reward.path, loading).freeze()
    reporter.note(text.pad_how)
    for name, network in (("policy", policy), ("reward", reward)):
        start.say_layout(session, network, name)
    return Readers(policy, reference, reward, critic)


def parents(config: OnlineConfig) -> list[dict[str, str]]:
    """The models that the run is made from."""
    found = [
        start.parent("policy", config.model),
        start.parent("reference", config.reference or config.model),
        start.parent("reward", config.reward.path),
    ]
    if isinstance(config, PpoConfig) and config.critic.init not in ("reward", "policy"):
        found.append(start.parent("critic", inputs.critic_source(config)))
    return found


def publish_policy(
    session: Session, config: OnlineConfig, text: start.Text, policy: Trainee
) -> None:
    """Write the policy and, where it is kept, the averaged policy as model folders."""
    identity = start.identity_of(session, text, "policy")
    given = {"base": config.model}
    start.publish(session, text, policy.network, "model", identity, **given)
    if policy.average is not None:
        average = policy.average
        start.publish(
            session, text, policy.network, "model_ema", identity, **given, weights=average
        )


def _load_critic(config: PpoConfig, loading: Loading) -> Network:
    source = inputs.critic_source(config)
    if config.critic.init == "policy":
        return with_fresh_head(source, loading, seed=config.seed, kind="critic")
    return load_reward(source, loading, kind="critic")
