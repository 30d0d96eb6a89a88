"""What the methods without a critic make of a rollout, and which loss each of them takes.

An answer is one action with one reward R. In rloo and reinforce the KL to the reference is in R, in
grpo and online-dpo it is in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages import methods
from stages.advantage import ruled_scores
from stages.config import CriticlessConfig, GrpoConfig, OnlineDpoConfig, ReinforceConfig
from stages.config.episodes import Kl
from stages.functional.control import ema
from stages.functional.dpo import dpo_losses
from stages.functional.group_advantages import grpo_advantages, rloo_advantages, same_rewards
from stages.functional.grpo import grpo_loss, reference_kl
from stages.functional.masking import Aggregation, loss_denominator, masked, masked_sum
from stages.functional.pairwise import pair_table, pairwise_loss
from stages.functional.policy_gradient import policy_diagnostics
from stages.functional.ranking import ranking_denominator
from stages.functional.reinforce import reinforce_loss
from stages.functional.returns import shape_rewards
from stages.minibatch import per_token
from stages.rollout import Rollout, Targets
from stages.rollout_method import Estimated
from stages.sampled import answer_figures

PAIRS: dict[str, Any] = {"ties": "drop", "pair_denominator": "pairs", "reduction": "prompt_mean"}
"""How the pairs of online-dpo are weighed: two answers of the same reward are none."""


class Seen(NamedTuple):
    """What the loss of a micro-batch sees of its B answers.

    Attributes:
        logp_new: ``[B, T]`` of the policy being trained, nats.
        logp_old: ``[B, T]`` of the policy that sampled, nats.
        logp_ref: ``[B, T]`` of the reference, nats.
        mask: ``[B, T]``, True = a real token.
        targets: ``[B]`` each, as ``estimate`` made them.
    """

    logp_new: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    mask: Tensor
    targets: Targets


def loss_name(config: CriticlessConfig) -> str:
    """The metric that the loss is told as."""
    return "loss/preference" if isinstance(config, OnlineDpoConfig) else "loss/policy"


def estimate(rollout: Rollout, config: CriticlessConfig, state: Mapping[str, Any]) -> Estimated:
    """Scores → one reward an answer → its advantage, or its rank among the answers to its prompt.

    Args:
        rollout: B answers, those to a prompt one behind the other.
        config: of the method.
        state: the stage's, with ``kl_coef`` and, after the first iteration, ``baseline``.

    Returns:
        Targets ``advantages`` or, for online-dpo, ``ranks``, ``[B]``.
    """
    rewards = _rewards(rollout, config, state["kl_coef"])
    figures = answer_figures(rollout) | {"objective/reward": float(rewards.mean())}
    if isinstance(config.kl, Kl):
        figures["objective/kl_coef"] = state["kl_coef"]
    if isinstance(config, ReinforceConfig):
        mean = figures["objective/reward"]
        baseline, kept = _baseline(config, mean, state.get("baseline"))
        figures["objective/baseline"] = baseline
        targets = {"advantages": rewards - baseline}
        return Estimated(targets, figures["objective/kl"], figures, kept)
    groups = rewards.view(-1, config.per_prompt)
    figures["objective/frac_zero_std"] = float(same_rewards(groups).double().mean())
    return Estimated(_compared(config, groups), figures["objective/kl"], figures, {})


def denominator(config: CriticlessConfig, mask: Tensor, targets: Targets) -> Tensor:
    """What the loss of a whole minibatch is divided by; it adds over micro-batches."""
    if isinstance(config, OnlineDpoConfig):
        ranks = targets["ranks"].view(-1, 2)
        return ranking_denominator(ranks, torch.ones_like(ranks, dtype=torch.bool), **PAIRS)
    length = config.rollout.max_new_tokens
    return loss_denominator(mask, aggregation=_aggregation(config), fixed_length=length)


def loss(config: CriticlessConfig, seen: Seen, whole: Tensor) -> Tensor:
    """A micro-batch's share of the loss; ``whole`` is the denominator of the minibatch."""
    if isinstance(config, OnlineDpoConfig):
        ratios, _ = _of_answers(seen)
        ranks, every = _ranks(seen)
        table = dpo_losses(pair_table(ratios, every), loss="sigmoid", beta=config.online_dpo.beta)
        return pairwise_loss(table, ranks, every, denominator=whole, **PAIRS)
    given: dict[str, Any] = {"aggregation": _aggregation(config), "denominator": whole}
    advantages = seen.targets["advantages"]
    if isinstance(config, GrpoConfig):
        return grpo_loss(
            *(seen.logp_new, seen.logp_old, seen.logp_ref, advantages, seen.mask),
            clip_low=config.grpo.clip_low,
            clip_high=config.grpo.clip_high,
            beta=config.grpo.beta,
            **given,
        )
    return reinforce_loss(seen.logp_new, advantages, seen.mask, **given)


def statistics(config: CriticlessConfig, seen: Seen, tokens: float) -> dict[str, Tensor]:
    """Figures of a micro-batch as its share of the minibatch's, and sums over its pairs.

    Args:
        config: of the method.
        seen: the micro-batch, without gradient.
        tokens: of the whole minibatch.
    """
    low, high = math.inf, math.inf
    if isinstance(config, GrpoConfig):
        low, high = config.grpo.clip_low, config.grpo.clip_high
    advantages = seen.targets.get("advantages", torch.zeros_like(seen.logp_new[:, 0]))
    sums = policy_diagnostics(
        *(seen.logp_new, seen.logp_old, advantages[:, None].expand_as(seen.mask), seen.mask),
        clip_low=low,
        clip_high=high,
    )
    figures = per_token(sums, tokens)
    if isinstance(config, GrpoConfig):
        kl = reference_kl(seen.logp_new, seen.logp_ref, seen.mask)
        return figures | {"policy/reference_kl": masked_sum(kl, seen.mask) / tokens}
    del figures["policy/clip_fraction"]  # nothing is clipped
    if isinstance(config, OnlineDpoConfig):
        ratios, logps = _of_answers(seen)
        figures |= methods.pair_sums(config.online_dpo.beta * ratios, logps, *_ranks(seen))
    return figures


def figures(sums: Mapping[str, float]) -> dict[str, float]:
    """The figures of a step: those that are finished, and those that its pairs make."""
    pairs = {name: value for name, value in sums.items() if "/" not in name}
    told = {name: value for name, value in sums.items() if "/" in name}
    return told | (methods.figures(pairs, None) if pairs else {})


def _rewards(rollout: Rollout, config: CriticlessConfig, kl_coef: float) -> Tensor:
    """R of each answer, ``[B]``: its score after the rules and, where it is there, the KL."""
    score = ruled_scores(rollout, config.score)
    if not isinstance(config.kl, Kl):
        return score
    shaped = shape_rewards(
        *(rollout.logp_old, rollout.logp_ref, rollout.mask, score),
        kl_coef=kl_coef,
        estimator=config.kl.estimator,
    )
    return shaped.rewards.sum(dim=1)


def _baseline(
    config: ReinforceConfig, mean: float, average: float | None
) -> tuple[float, dict[str, float]]:
    """What is taken off the rewards of a rollout with this mean, and what is kept for the next.

    The moving average is that of the rollouts before, so no reward is in its own baseline; the
    first rollout has none before it and takes its own mean.
    """
    kind = config.reinforce.baseline
    if kind != "moving_average":
        return (mean if kind == "batch_mean" else 0.0), {}
    if average is None:
        return mean, {"baseline": mean}
    so_far, now = (torch.tensor(value, dtype=torch.float64) for value in (average, mean))
    return average, {"baseline": float(ema(so_far, now, decay=config.reinforce.decay))}


def _compared(config: CriticlessConfig, groups: Tensor) -> Targets:
    """Targets from the rewards ``[P, G]`` of the answers to each prompt."""
    if isinstance(config, OnlineDpoConfig):
        best = groups.amax(dim=1, keepdim=True)
        return {"ranks": (1 + (groups < best).long()).flatten()}
    if isinstance(config, GrpoConfig):
        scaled = config.grpo.variant == "grpo"
        return {"advantages": grpo_advantages(groups, scaled=scaled).flatten()}
    return {"advantages": rloo_advantages(groups).flatten()}


def _aggregation(config: CriticlessConfig) -> Aggregation:
    if isinstance(config, GrpoConfig):
        return "seq_mean" if config.grpo.variant == "grpo" else "fixed_length"
    return "seq_sum"


def _of_answers(seen: Seen) -> tuple[Tensor, Tensor]:
    """log(π/π_ref) and log π of whole answers, ``[P, 2]`` each."""
    logps, said = (
        masked(logp, seen.mask).sum(dim=1).view(-1, 2) for logp in (seen.logp_new, seen.logp_ref)
    )
    return logps - said, logps


def _ranks(seen: Seen) -> tuple[Tensor, Tensor]:
    """Ranks and mask of the two answers to each prompt, ``[P, 2]`` each."""
    ranks = seen.targets["ranks"].view(-1, 2)
    return ranks, torch.ones_like(ranks, dtype=torch.bool)
