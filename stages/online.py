"""``rlhf grpo``, ``rloo``, ``reinforce`` and ``online-dpo``: sampled answers without a critic.

One iteration is that of ppo without values: a rollout, its scores, what they make of each answer,
then minibatches on it. One network is trained. What a method makes of the scores, and its loss,
stand in ``stages/criticless.py``; the formulas in ``stages/functional/``, a file each.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from stages import actors, budget, criticless, inputs, roles
from stages.config import CriticlessConfig
from stages.criticless import Seen
from stages.functional.masking import masked_sum
from stages.iterations import Loop
from stages.minibatch import Row, packed, rows_of
from stages.models.forward import response_logps
from stages.rollout import Rollout, Targets
from stages.rollout_method import Estimated
from stages.runtime import start
from stages.runtime.loop import Plan, accumulate, require_finite
from stages.runtime.opening import begin, opened, require_parents
from stages.runtime.optim import (
    Trainee,
    clip,
    learning_rate_at,
    sum_gradients,
    take_step,
    trainee,
)
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import Result
from stages.runtime.session import Metrics, Session


def run(
    config: CriticlessConfig, reporter: Reporter, *, resume: bool = False, overwrite: bool = False
) -> Result:
    """Train a policy on its own answers and write the run folder.

    Args:
        config: the resolved config of one of the methods.
        reporter: hears about the progress.
        resume: continue from the newest checkpoint, or start where there is none.
        overwrite: replace what an earlier run left in the output folder.

    Returns:
        What the run came to.
    """
    with opened(config, reporter, resume=resume, overwrite=overwrite) as session:
        return session.done or _train(session, config)


def _train(session: Session, config: CriticlessConfig) -> Result:
    # 1. Text, prompts and the three models; everything that can be refused is refused here.
    text = start.text_of(config, stop=config.rollout.stop)
    models = roles.models(session, config, text)
    read = inputs.prompts(session, config, text)
    budget.require_disk(session, config, models, read)
    readers = actors.load(session, config, text)
    require_parents(session, actors.parents(config))
    begin(session)

    # 2. Iterations: rollout, advantages or ranks, minibatches.
    policy = trainee(readers.policy, config.train)
    plan = Plan.of(config, len(read.records.train))
    method = Criticless(session, config, policy, plan.total_steps)
    loop = Loop(session, config, text, read.records, readers, method, plan)
    loop.restore()
    loop.run()

    # 3. Policy and averaged policy as plain model folders; the last, not the best.
    actors.publish_policy(session, config, text, policy)
    session.progress.selected = {"step": session.progress.step, "by": "last", "value": None}
    folder = shlex.quote(config.output)
    return session.finish(f"rlhf sample {folder} prompts.jsonl --output answers.jsonl")


@dataclass(frozen=True)
class Criticless:
    """A method without a critic as the method of the loop."""

    session: Session
    config: CriticlessConfig
    policy: Trainee
    total_steps: int
    may_stop_early: bool = False

    @property
    def trainees(self) -> dict[str, Trainee]:
        """The policy alone."""
        return {"model": self.policy}

    def estimate(self, rollout: Rollout, state: Mapping[str, Any]) -> Estimated:
        """Advantages, or the ranks of the answers to a prompt."""
        return criticless.estimate(rollout, self.config, state)

    def step(self, rollout: Rollout, targets: Targets, rows: Sequence[int]) -> Metrics:
        """One optimiser step of the policy on some rows of a rollout.

        Raises:
            TrainingError: the loss or its gradient is not finite.
        """
        policy, train, step = self.policy, self.config.train, self.session.progress.step
        name = criticless.loss_name(self.config)
        what = f"step {step + 1}, {name}"
        policy.network.module.train()  # activations are recomputed in this mode only
        sums = self._gradient(rollout, targets, rows)
        require_finite(sums[name], what=what)
        sum_gradients(policy, self.session.world)
        lr = learning_rate_at(train, step, self.total_steps, peak=train.learning_rate)
        norm = clip(policy, what=what)
        take_step(policy, lr=lr)
        return criticless.figures(sums) | {"optim/lr": lr, "optim/grad_norm": norm}

    def _gradient(self, rollout: Rollout, targets: Targets, rows: Sequence[int]) -> Metrics:
        """Gradient of the loss, and what there is to tell of the minibatch.

        Answers that the loss compares are one item, so no process or micro-batch parts them.
        """
        config, together = self.config, self.config.together
        chosen = list(rows)
        mask = rollout.mask[chosen]
        tokens = float(mask.sum())
        device = self.policy.network.device
        of_rows = {name: target[chosen] for name, target in targets.items()}
        whole = criticless.denominator(config, mask, of_rows).to(device)
        minibatch = rows_of(rollout, chosen)
        items = [minibatch[n : n + together] for n in range(0, len(minibatch), together)]

        def backward(micro_batch: list[list[Row]]) -> dict[str, Tensor]:
            batch, at = packed([row for item in micro_batch for row in item], rollout, device)
            out = response_logps(
                self.policy.network,
                batch,
                temperature=config.rollout.temperature,
                entropy="value",
            )
            of_batch = {name: at(target) for name, target in targets.items()}
            old, ref = at(rollout.logp_old), at(rollout.logp_ref)
            loss = criticless.loss(config, Seen(out.logp, old, ref, batch.mask, of_batch), whole)
            loss.backward()
            seen = Seen(out.logp.detach(), old, ref, batch.mask, of_batch)
            return {
                criticless.loss_name(config): loss,
                "policy/entropy": masked_sum(out.entropy, batch.mask) / tokens,
                **criticless.statistics(config, seen, tokens),
            }

        return accumulate(
            items,
            np.array([sum(len(row.example.ids) for row in item) for item in items]),
            world=self.session.world,
            budget=config.train.tokens_per_micro_batch,
            backward=backward,
        )
