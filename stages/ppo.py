"""Stage 3, ``rlhf ppo``: PPO against the reward model, tied to the SFT model by a KL penalty.

    maximise  E[ R(x, y) - β·log(π(y|x) / π_ref(y|x)) ] + γ·E_pretrain[ log π(x) ]

(Ouyang et al. 2022, §3.5, Eq. 2). One iteration: a rollout, rewards, advantages, then epochs of
minibatches on it. Policy and critic are separate networks with an optimiser each.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages import actors, budget, inputs, roles, terms
from stages.advantage import estimate
from stages.batch import Example
from stages.config import PpoConfig
from stages.data.plan import stream
from stages.data.store import Store
from stages.iterations import Loop
from stages.rollout import Rollout, Targets
from stages.rollout_method import Estimated
from stages.runtime import start
from stages.runtime.loop import Plan
from stages.runtime.opening import begin, opened, require_parents
from stages.runtime.optim import Trainee, trainee
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import Result
from stages.runtime.session import Metrics, Session
from stages.update import Update


def run(
    config: PpoConfig, reporter: Reporter, *, resume: bool = False, overwrite: bool = False
) -> Result:
    """Train a policy against a reward model and write the run folder.

    Args:
        config: the resolved config.
        reporter: hears about the progress.
        resume: continue from the newest checkpoint, or start where there is none.
        overwrite: replace what an earlier run left in the output folder.

    Returns:
        What the run came to.
    """
    with opened(config, reporter, resume=resume, overwrite=overwrite) as session:
        return session.done or _train(session, config)


def _train(session: Session, config: PpoConfig) -> Result:
    # 1. Text, prompts and the four models; everything that can be refused is refused here.
    text = start.text_of(config, stop=config.rollout.stop)
    models = roles.models(session, config, text)
    read = inputs.prompts(session, config, text)
    budget.require_disk(session, config, models, read)
    readers = actors.load(session, config, text)
    assert readers.critic is not None
    require_parents(session, actors.parents(config))
    begin(session)

    # 2. Iterations: rollout, advantages, minibatches.
    policy = trainee(readers.policy, config.train)
    critic = trainee(readers.critic, config.train, with_average=False)
    plan = Plan.of(config, len(read.records.train))
    update = Update(config, policy, critic, session.world, plan.total_steps)
    loop = Loop(
        session, config, text, read.records, readers, Ppo(session, update, read.second), plan
    )
    loop.restore()
    loop.run()

    # 3. Policy, critic and averaged policy as plain model folders; the last, not the best.
    publish(session, config, text, update)
    folder = shlex.quote(config.output)
    return session.finish(f"rlhf sample {folder} prompts.jsonl --output answers.jsonl")


@dataclass(frozen=True)
class Ppo:
    """PPO as the method of the loop: generalised advantages, clipped losses, pretraining texts."""

    session: Session
    update: Update
    documents: Store | None

    @property
    def trainees(self) -> dict[str, Trainee]:
        """Policy and critic."""
        return {"model": self.update.policy, "critic": self.update.critic}

    @property
    def may_stop_early(self) -> bool:
        """Whether ``ppo.target_kl`` may end an iteration."""
        return self.update.config.ppo.target_kl is not None

    def estimate(self, rollout: Rollout, state: Mapping[str, Any]) -> Estimated:
        """Advantages and returns."""
        return estimate(rollout, self.update.config, kl_coef=state["kl_coef"])

    def step(self, rollout: Rollout, targets: Targets, rows: Sequence[int]) -> Metrics | None:
        """One optimiser step of policy and critic, with the next pretraining texts."""
        progress = self.session.progress
        first = progress.stage.setdefault("documents", 0)
        documents = self._documents(first, len(rows))
        figures = self.update.step(rollout, targets, rows, documents, progress.step)
        if figures is not None:
            progress.stage["documents"] = first + len(documents)
        return figures

    def _documents(self, first: int, episodes: int) -> list[Example]:
        """``ptx.ratio`` pretraining texts for each episode of a minibatch."""
        if self.documents is None:
            return []
        config = self.update.config
        count = episodes * config.ptx.ratio
        chosen = stream(len(self.documents), config.seed, first, count, name="ptx order")
        return [self.documents[int(n)] for n in chosen]


def publish(session: Session, config: PpoConfig, text: start.Text, update: Update) -> None:
    """Policy, critic and, where it is kept, the averaged policy."""
    critic, base = update.critic.network, terms.critic_source(config, text)
    actors.publish_policy(session, config, text, update.policy)
    valued = start.identity_of(session, text, "critic", mean=critic.mean, std=critic.std)
    start.publish(session, text, critic, "critic", valued, base=base)
    session.progress.selected = {"step": session.progress.step, "by": "last", "value": None}
