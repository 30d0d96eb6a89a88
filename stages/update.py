"""One PPO minibatch: gradients of policy, pretraining text and critic, then a step of each network.

    L_policy = -E[min(ρ·A, clip(ρ, 1-ε, 1+ε)·A)] - c·H + γ·NLL_pretrain     (PPO Eq. 7, IGPT Eq. 2)
    L_value  = ½·E[max((V - R)², (clip(V, V_old ± ε_v) - R)²)]

Denominators are those of the whole minibatch over all processes, so no number depends on how the
minibatch is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stages.batch import Example, pack
from stages.config import PpoConfig
from stages.functional.masking import loss_denominator, masked_sum
from stages.functional.policy_gradient import policy_diagnostics, policy_loss
from stages.functional.supervised import sft_loss
from stages.functional.value import value_clip_count, value_loss
from stages.minibatch import Row, packed, per_token, rows_of
from stages.models.forward import response_logps, response_values
from stages.rollout import Rollout, Targets
from stages.runtime.loop import accumulate, require_finite
from stages.runtime.optim import (
    Trainee,
    clip,
    gradient_norm,
    learning_rate_at,
    sum_gradients,
    take_step,
)
from stages.runtime.processes import World

Metrics = dict[str, float]
Backward = Callable[[list[Row]], dict[str, Tensor]]


@dataclass(frozen=True)
class Update:
    """The networks in training, and what every minibatch of a run shares."""

    config: PpoConfig
    policy: Trainee
    critic: Trainee
    world: World
    total_steps: int

    def step(
        self,
        rollout: Rollout,
        targets: Targets,
        rows: Sequence[int],
        documents: Sequence[Example],
        step: int,
    ) -> Metrics | None:
        """One optimiser step of policy and critic on a minibatch.

        Args:
            rollout: the iteration's answers.
            targets: advantages and returns.
            rows: the minibatch's rows of the rollout.
            documents: pretraining texts of this minibatch; none without ptx.
            step: optimiser steps done before.

        Returns:
            The metrics, or None where the policy has moved further than ``ppo.target_kl`` and no
            step was taken.

        Raises:
            TrainingError: a loss or gradient is not finite.
        """
        minibatch = rows_of(rollout, rows)
        what = f"step {step + 1}"
        for trained in (self.policy, self.critic):
            trained.network.module.train()  # activations are recomputed in this mode only
        figures = self._policy_gradient(rollout, targets, minibatch)
        require_finite(figures["loss/policy"], what=f"{what}, loss/policy")
        limit = self.config.ppo.target_kl
        if limit is not None and figures["policy/approx_kl_k3"] > limit:
            self.policy.adam.zero_grad(set_to_none=True)
            return None
        sum_gradients(self.policy, self.world)
        if documents:
            figures |= self._add_pretraining(documents)
            require_finite(figures["loss/ptx"], what=f"{what}, loss/ptx")
        figures |= self._value_gradient(rollout, targets, minibatch)
        require_finite(figures["loss/value"], what=f"{what}, loss/value")
        sum_gradients(self.critic, self.world)
        train = self.config.train
        lr = learning_rate_at(train, step, self.total_steps, peak=train.learning_rate)
        peak = self.config.critic.learning_rate
        critic_lr = learning_rate_at(
            train, step, self.total_steps, peak=train.learning_rate if peak is None else peak
        )
        norm = clip(self.policy, what=f"{what}, loss/policy")
        figures.setdefault("optim/grad_norm_policy", norm)
        critic_norm = clip(self.critic, what=f"{what}, loss/value")
        take_step(self.policy, lr=lr)
        take_step(self.critic, lr=critic_lr)
        return figures | {"optim/lr": lr, "optim/grad_norm_critic": critic_norm}

    def _policy_gradient(
        self, rollout: Rollout, targets: Targets, minibatch: Sequence[Row]
    ) -> Metrics:
        """Gradient of the clipped surrogate and the entropy bonus; diagnostics of the update."""
        options, clip = self.config.ppo, self.config.ppo.clip_range
        rows = [row.index for row in minibatch]
        denominator = self._denominator(rollout.mask[rows])
        tokens = float(rollout.mask[rows].sum())

        def backward(micro_batch: list[Row]) -> dict[str, Tensor]:
            batch, at = packed(micro_batch, rollout, self._device)
            out = response_logps(
                self.policy.network,
                batch,
                temperature=self.config.rollout.temperature,
                entropy="gradient" if options.ent_coef else "value",
            )
            old, advantages = at(rollout.logp_old), at(targets["advantages"])
            loss = policy_loss(
                out.logp,
                old,
                advantages,
                batch.mask,
                clip_low=clip,
                clip_high=clip,
                aggregation=options.aggregation,
                denominator=denominator,
            )
            bonus = masked_sum(out.entropy, batch.mask) / tokens
            (loss - options.ent_coef * bonus if options.ent_coef else loss).backward()
            sums = policy_diagnostics(
                out.logp.detach(), old, advantages, batch.mask, clip_low=clip, clip_high=clip
            )
            return {"loss/policy": loss, "policy/entropy": bonus, **per_token(sums, tokens)}

        return self._accumulate(minibatch, backward)

    def _value_gradient(
        self, rollout: Rollout, targets: Targets, minibatch: Sequence[Row]
    ) -> Metrics:
        """Gradient of the clipped value loss."""
        clip, after_last = self.config.ppo.value_clip_range, self.config.after_last
        mask = targets["value_mask"][[row.index for row in minibatch]]
        denominator = self._denominator(mask)
        tokens = float(mask.sum())

        def backward(micro_batch: list[Row]) -> dict[str, Tensor]:
            batch, at = packed(micro_batch, rollout, self._device)
            values = response_values(self.critic.network, batch, after_last=after_last)
            old, returns, mask = (
                at(rollout.values_old),
                at(targets["returns"]),
                at(targets["value_mask"]),
            )
            loss = value_loss(
                values,
                old,
                returns,
                mask,
                clip_range=clip,
                aggregation=self.config.ppo.aggregation,
                denominator=denominator,
            )
            loss.backward()
            clipped = value_clip_count(values.detach(), old, returns, mask, clip_range=clip)
            return {"loss/value": loss, "value/clip_fraction": clipped / tokens}

        return self._accumulate(minibatch, backward)

    def _add_pretraining(self, documents: Sequence[Example]) -> Metrics:
        """Add γ times the gradient of the pretraining loss to that of the policy; both norms."""
        kept = [p.grad for p in self.policy.parameters]
        figures = {"optim/grad_norm_policy": gradient_norm(self.policy)}
        self.policy.adam.zero_grad(set_to_none=True)
        ptx = self.config.ptx
        lengths = torch.tensor([len(document.targets) for document in documents])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        denominator = loss_denominator(mask, aggregation=ptx.aggregation).to(self._device)

        def backward(micro_batch: list[Row]) -> dict[str, Tensor]:
            batch = pack([row.example for row in micro_batch]).to(self._device)
            logp = response_logps(self.policy.network, batch).logp
            loss = sft_loss(logp, batch.mask, aggregation=ptx.aggregation, denominator=denominator)
            (ptx.coef * loss).backward()
            return {"loss/ptx": loss}

        rows = [Row(n, document) for n, document in enumerate(documents)]
        figures |= self._accumulate(rows, backward)
        sum_gradients(self.policy, self.world)
        figures["optim/grad_norm_ptx"] = gradient_norm(self.policy)
        for p, grad in zip(self.policy.parameters, kept, strict=True):
            assert p.grad is not None
            assert grad is not None
            p.grad += grad
        return figures

    def _accumulate(self, rows: Sequence[Row], backward: Backward) -> Metrics:
        return accumulate(
            rows,
            np.array([len(row.example.ids) for row in rows]),
            world=self.world,
            budget=self.config.train.tokens_per_micro_batch,
            backward=backward,
        )

    def _denominator(self, mask: Tensor) -> Tensor:
        return loss_denominator(
            mask,
            aggregation=self.config.ppo.aggregation,
            fixed_length=self.config.rollout.max_new_tokens,
        ).to(self._device)

    @property
    def _device(self) -> torch.device:
        return self.policy.network.device
