"""Gradients against finite differences in float64, away from the kinks of clips and maxima."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stages.functional.divergence import exact_kl, kl_estimate
from stages.functional.group_advantages import grpo_advantages, rloo_advantages
from stages.functional.grpo import grpo_loss
from stages.functional.logprobs import entropy, token_logprobs
from stages.functional.masking import aggregate, loss_denominator, whiten
from stages.functional.policy_gradient import policy_loss
from stages.functional.ranking import ranking_denominator, ranking_loss
from stages.functional.reinforce import reinforce_loss
from stages.functional.returns import gae, shape_rewards
from stages.functional.supervised import sft_loss
from stages.functional.value import value_loss

MASK = torch.tensor(
    [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool
)
AGGREGATIONS = ["token_mean", "seq_mean", "fixed_length"]


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(seed: int) -> Tensor:
    return normal(*MASK.shape, seed=seed)


def gradients_agree(function: Callable[..., Tensor], *inputs: Tensor) -> bool:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropy(temperature: float) -> None:
    labels = torch.tensor([[0, 3, 1], [2, 2, 0]])
    logits = normal(2, 3, 4, seed=0)
    assert gradients_agree(lambda x: token_logprobs(x, labels, temperature=temperature), logits)
    assert gradients_agree(lambda x: entropy(x, temperature=temperature), logits)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_estimates(estimator: str) -> None:
    assert gradients_agree(
        lambda p, q: kl_estimate(p, q, estimator=estimator), tokens(1), tokens(2)
    )


def test_exact_divergence() -> None:
    assert gradients_agree(exact_kl, normal(2, 4, seed=3), normal(2, 4, seed=4))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_losses_of_tokens(aggregation: str) -> None:
    shared = {
        "aggregation": aggregation,
        "denominator": loss_denominator(MASK, aggregation=aggregation, fixed_length=7),
    }
    old, advantages, goals = 0.3 * tokens(5), tokens(6), tokens(7)
    clips = {"clip_low": 0.2, "clip_high": 0.3}
    assert gradients_agree(lambda x: aggregate(x, MASK, **shared), tokens(8))
    assert gradients_agree(lambda x: sft_loss(x, MASK, **shared), tokens(9))
    assert gradients_agree(
        lambda x: policy_loss(x, old, advantages, MASK, **clips, **shared), 0.3 * tokens(10)
    )
    for clip_range in (0.2, None):
        assert gradients_agree(
            lambda x, c=clip_range: value_loss(x, old, goals, MASK, clip_range=c, **shared),
            tokens(11),
        )


@pytest.mark.parametrize("ties", ["drop", "half"])
@pytest.mark.parametrize("reduction", ["prompt_mean", "pair_mean"])
def test_ranking_loss(ties: str, reduction: str) -> None:
    ranks = torch.tensor([[1, 2, 2, 3], [2, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    options = {"ties": ties, "reduction": reduction, "pair_denominator": "choose2"}
    denominator = ranking_denominator(ranks, mask, **options)
    assert gradients_agree(
        lambda scores, margin: ranking_loss(
            scores,
            ranks,
            mask,
            margin=margin,
            center_coef=0.01,
            denominator=denominator,
            **options,
        ),
        normal(2, 4, seed=12),
        normal(2, 4, 4, seed=13),
    )


def test_rewards_advantages_and_whitening() -> None:
    scores = normal(len(MASK), seed=14)
    assert gradients_agree(
        lambda old, ref, score: shape_rewards(old, ref, MASK, score, kl_coef=0.1).rewards,
        tokens(15),
        tokens(16),
        scores,
    )
    assert gradients_agree(
        lambda r, v: gae(r, v, MASK, gamma=0.9, lam=0.8).advantages, tokens(17), tokens(18)
    )
    for shift_mean in (True, False):
        assert gradients_agree(
            lambda x, s=shift_mean: whiten(x, MASK, shift_mean=s).values, tokens(19)
        )


@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "seq_sum"])
def test_losses_of_whole_answers(aggregation: str) -> None:
    shared = {
        "aggregation": aggregation,
        "denominator": loss_denominator(MASK, aggregation=aggregation, fixed_length=7),
    }
    old, ref, advantages = 0.3 * tokens(20), 0.5 * tokens(21), normal(len(MASK), seed=22)
    options = {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.5}
    assert gradients_agree(
        lambda x: grpo_loss(x, old, ref, advantages, MASK, **options, **shared), 0.3 * tokens(23)
    )
    assert gradients_agree(lambda x: reinforce_loss(x, advantages, MASK, **shared), tokens(24))


def test_advantages_of_groups() -> None:
    for advantages in (grpo_advantages, rloo_advantages):
        assert gradients_agree(advantages, normal(3, 4, seed=25))
