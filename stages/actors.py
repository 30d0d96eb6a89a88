"""The models that write and read answers; whether they fit together is judged in ``roles``."""

from __future__ import annotations

from functools import partial

from stages import roles, terms
from stages.config import OnlineConfig, PpoConfig
from stages.config.rewards import Placed
from stages.models import lora
from stages.models.load import Loading, load_policy, load_reward, with_fresh_head
from stages.models.network import Network, without_dropout
from stages.rollout import Readers
from stages.runtime import start
from stages.runtime.optim import Trainee
from stages.runtime.rewards.model import Reader, opened
from stages.runtime.session import Session


def load(session: Session, config: OnlineConfig, text: start.Text) -> Readers:
    """The policy, its frozen reference, what the reward is made of, and in ppo the critic.

    With adapters, what a trained network starts from is that network with its adapters off: ppo
    then holds two models, not four.
    """
    texts = {
        placed.name: scorer
        for placed in config.terms
        if (scorer := terms.plain_scorer(placed)) is not None
    }
    loading, reporter = start.loading_of(session), session.reporter
    policy, critic = without_dropout(load_policy(config.model, loading)), None
    trained = {"policy": policy}
    if isinstance(config, PpoConfig):
        critic = trained["critic"] = without_dropout(_load_critic(config, loading, text))
    for name, network in trained.items():
        start.adopt(network, text)
        start.adapt(session, network, name)
    if roles.reference_shares(config):
        reference = lora.without(policy, "policy")
    else:
        reference = load_policy(config.reference or config.model, loading)
        start.adopt(reference, text)  # new rows are drawn in the format of the policy's
        reference.freeze()
    rewards = {}
    budget = config.train.tokens_per_micro_batch
    for placed, term in terms.models(config):
        shared = _shared(config, placed, text, critic)
        if terms.reads_ids(term.path, config, text):
            network = shared or load_reward(term.path, loading).freeze()
            rewards[placed.name] = network
            start.say_layout(session, network, terms.role(config, placed))
            continue
        reporter.note(f"{placed.key}: {term.path} reads the text, in its own template and tokens")
        own = partial(start.own_codec, trust_remote_code=config.trust_remote_code)
        texts[placed.name] = (
            opened(term.path, loading, budget)
            if shared is None
            else Reader(shared, own(term.path), budget)
        )
    reporter.note(text.pad_how)
    start.say_layout(session, policy, "policy")
    return Readers(policy, reference, rewards, critic, texts)


def _shared(
    config: OnlineConfig, placed: Placed, text: start.Text, critic: Network | None
) -> Network | None:
    """With adapters, the reward model that the critic started from: the critic without them."""
    if not isinstance(config, PpoConfig) or critic is None or config.lora is None:
        return None
    first = terms.critic_term(config, text)
    same = first is not None and first.name == placed.name
    return lora.without(critic, "reward") if same else None


def parents(config: OnlineConfig) -> list[dict[str, str]]:
    """The models that the run is made from."""
    found = [
        start.parent("policy", config.model),
        start.parent("reference", config.reference or config.model),
        *(start.parent("reward", term.path) for _, term in terms.models(config)),
    ]
    if isinstance(config, PpoConfig) and config.critic.init not in ("reward", "policy"):
        found.append(start.parent("critic", terms.earlier_critic(config.critic.init)))
    return found


def publish_policy(
    session: Session, config: OnlineConfig, text: start.Text, policy: Trainee
) -> None:
    """Write the policy and, where it is kept, the averaged policy as model folders."""
    identity = start.identity_of(session, text, "policy")
    start.publish(session, text, policy.network, "model", identity, base=config.model)
    if policy.average is not None:
        average = policy.average
        start.publish(
            session, text, policy.network, "model_ema", identity, base=config.model, weights=average
        )


def _load_critic(config: PpoConfig, loading: Loading, text: start.Text) -> Network:
    source = terms.critic_source(config, text)
    if config.critic.init == "policy":
        return with_fresh_head(source, loading, seed=config.seed, kind="critic")
    return load_reward(source, loading, kind="critic")
