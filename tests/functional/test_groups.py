"""What must hold of advantages within a group, and of the losses that take them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stages.functional.group_advantages import grpo_advantages, rloo_advantages, same_rewards
from stages.functional.grpo import grpo_loss, reference_kl
from stages.functional.masking import loss_denominator
from stages.functional.policy_gradient import policy_loss
from stages.functional.reinforce import reinforce_loss

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_group_of_one_gives_no_advantage() -> None:
    alone = torch.tensor([[3.0], [-1e4]])
    for advantages in (grpo_advantages(alone), rloo_advantages(alone)):
        assert torch.equal(advantages, torch.zeros(2, 1))


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_no_advantage(reward: float, size: int) -> None:
    equal = torch.full((1, size), reward)
    for advantages in (grpo_advantages(equal), rloo_advantages(equal)):
        assert torch.equal(advantages, torch.zeros(1, size))


def test_the_baseline_of_rloo_does_not_depend_on_the_answer_itself() -> None:
    rewards = normal(3, 5, seed=0)
    baselines = rewards - rloo_advantages(rewards)
    for i in range(5):
        other = rewards.clone()
        other[:, i] += 7.0
        moved = other - rloo_advantages(other)
        torch.testing.assert_close(moved[:, i], baselines[:, i], rtol=1e-12, atol=1e-12)
        others = [j for j in range(5) if j != i]
        torch.testing.assert_close(moved[:, i], rewards[:, others].mean(dim=1))
        assert not torch.isclose(moved[:, others], baselines[:, others]).any()


def test_advantages_do_not_depend_on_a_constant_and_average_0() -> None:
    rewards = normal(4, 6, seed=1)
    for function in (grpo_advantages, rloo_advantages):
        advantages = function(rewards)
        torch.testing.assert_close(function(rewards + 100.0), advantages, rtol=1e-10, atol=1e-12)
        zero = torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(advantages.sum(dim=1), zero, rtol=0, atol=1e-12)


def test_groups_of_one_reward_are_counted() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 2.0], [0.0, 1.0, 0.0]])
    assert same_rewards(rewards).tolist() == [True, False, False]


def test_invariant_14_a_policy_that_is_the_reference_has_no_kl_term() -> None:
    logp, advantages = normal(*MASK.shape, seed=2), normal(len(MASK), seed=3)
    assert torch.equal(reference_kl(logp, logp, MASK), torch.zeros_like(logp))
    options = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "seq_mean",
        "denominator": loss_denominator(MASK, aggregation="seq_mean"),
    }
    each = advantages[:, None].expand_as(MASK)
    expected = policy_loss(logp, logp, each, MASK, **options)
    assert torch.equal(grpo_loss(logp, logp, logp, advantages, MASK, beta=9.0, **options), expected)


def test_at_ratio_1_the_clipped_loss_has_the_gradient_of_reinforce() -> None:
    logp, advantages = normal(*MASK.shape, seed=4), normal(len(MASK), seed=5)
    shared = {"aggregation": "seq_sum", "denominator": torch.tensor(3.0)}
    gradients = []
    for loss in (
        lambda x: reinforce_loss(x, advantages, MASK, **shared),
        lambda x: policy_loss(
            *(x, logp, advantages[:, None].expand_as(MASK), MASK),
            **{"clip_low": 0.2, "clip_high": 0.2, **shared},
        ),
    ):
        leaf = logp.clone().requires_grad_()
        gradients += torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_what_stands_under_the_mask_reaches_neither_loss_nor_gradient() -> None:
    dirty = torch.where(MASK, normal(*MASK.shape, seed=6), torch.nan).requires_grad_()
    advantages = normal(len(MASK), seed=7)
    shared = {"aggregation": "seq_sum", "denominator": torch.tensor(3.0)}
    clips = {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.1}
    for loss in (
        reinforce_loss(dirty, advantages, MASK, **shared),
        grpo_loss(dirty, dirty.detach(), dirty.detach(), advantages, MASK, **clips, **shared),
    ):
        (gradient,) = torch.autograd.grad(loss, dirty)
        assert loss.isfinite()
        assert torch.equal(gradient[~MASK], torch.zeros_like(gradient[~MASK]))
