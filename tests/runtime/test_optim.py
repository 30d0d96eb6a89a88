"""One optimiser step against AdamW by its formulas; guards; a state that comes back bit by bit."""

from __future__ import annotations

import math

import pytest
import torch

from stages.batch import pack
from stages.config.shared import Optimisation
from stages.errors import CheckpointError, TrainingError
from stages.models.forward import response_logps
from stages.runtime import optim
from stages.runtime.optim import (
    clip,
    gradient_norm,
    learning_rate_at,
    load_optimiser_state,
    load_weights,
    optimiser_state,
    require_finite_weights,
    sum_gradients,
    swapped,
    take_step,
    trainee,
    weights,
)
from stages.runtime.processes import World
from tests.families import tiny_policy
from tests.models.alone import examples

ALONE = World()


def make(family: str = "gpt2", seed: int = 0, **train):
    return trainee(tiny_policy(family, seed=seed), Optimisation(**train))


def backward(trained, seed: int = 0) -> None:
    loss = -response_logps(trained.network, pack(examples((3, 4), (2, 2), seed=seed))).logp.sum()
    loss.backward()


def step(trained, seed: int = 0, lr: float = 0.01) -> float:
    backward(trained, seed)
    sum_gradients(trained, ALONE)
    norm = clip(trained, what="step 1, loss/sft")
    take_step(trained, lr=lr)
    return norm


def copies(tensors) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def test_two_steps_are_those_of_adamw_by_its_formulas():
    """Loshchilov and Hutter 2019, Algorithm 2, in float64 with matrices alone decayed."""
    trained = make(adam_betas=(0.8, 0.9), adam_eps=1e-6, weight_decay=0.1, max_grad_norm=1e9)
    value = copies(weights(trained))
    first = {name: torch.zeros_like(p) for name, p in value.items()}
    second = copies(first)
    for t, lr in ((1, 0.01), (2, 0.03)):
        backward(trained, seed=t)
        for name, p in trained.network.parameters():
            first[name] = 0.8 * first[name] + 0.2 * p.grad
            second[name] = 0.9 * second[name] + 0.1 * p.grad**2
            if p.ndim >= 2:
                value[name] = value[name] * (1 - lr * 0.1)
            mean, spread = first[name] / (1 - 0.8**t), second[name] / (1 - 0.9**t)
            value[name] = value[name] - lr * mean / (spread.sqrt() + 1e-6)
        take_step(trained, lr=lr)
        for name, p in trained.network.parameters():
            assert p.grad is None
            torch.testing.assert_close(p.detach(), value[name], rtol=1e-10, atol=1e-12)


def test_every_parameter_is_trained_once_and_vectors_are_not_decayed():
    for family in ("llama", "qwen3", "gpt2"):
        trained = make(family, weight_decay=0.1)
        groups = {g["weight_decay"]: g["params"] for g in trained.adam.param_groups}
        assert {p.ndim for p in groups[0.1]} == {2}
        assert {p.ndim for p in groups[0.0]} == {1}
        together = [id(p) for group in groups.values() for p in group]
        assert sorted(together) == sorted(id(p) for p in trained.network.module.parameters())


@pytest.mark.parametrize("limit", [1e-3, 1e9])
def test_gradients_are_scaled_down_to_the_limit_and_the_norm_before_is_told(limit):
    trained = make(max_grad_norm=limit)
    backward(trained)
    flat = torch.cat([p.grad.flatten() for p in trained.parameters])
    norm = clip(trained, what="")
    assert norm == pytest.approx(float(flat.norm()), rel=1e-9)
    after = torch.cat([p.grad.flatten() for p in trained.parameters])
    torch.testing.assert_close(after, flat * min(1.0, limit / norm), rtol=2e-3, atol=0)
    assert gradient_norm(trained) == pytest.approx(min(norm, limit), rel=2e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_the_step_with_weights_and_moments_unchanged(value):
    trained = make()
    step(trained)
    before, moments = copies(weights(trained)), copies(optimiser_state(trained))
    backward(trained)
    trained.parameters[3].grad.view(-1)[0] = value
    sum_gradients(trained, ALONE)
    with pytest.raises(TrainingError, match="step 12, loss/sft") as caught:
        clip(trained, what="step 12, loss/sft")
    assert caught.value.exit_code == 5
    for name, p in weights(trained).items():
        assert torch.equal(p, before[name])
    for name, moment in optimiser_state(trained).items():
        assert torch.equal(moment, moments[name])
    assert all(p.grad is None for p in trained.parameters)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_weight_that_is_not_finite_is_named(value):
    trained = make()
    require_finite_weights(trained, what="step 3")
    with torch.no_grad():
        trained.parameters[2].view(-1)[1] = value
    with pytest.raises(TrainingError, match="step 3") as caught:
        require_finite_weights(trained, what="step 3")
    assert trained.names[2] in caught.value.what


def test_a_process_without_data_adds_zeros():
    trained = make()
    sum_gradients(trained, ALONE)
    assert all(not bool(p.grad.any()) for p in trained.parameters)


class Twice(World):
    """A world of two processes that hold the same gradients."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2)
        object.__setattr__(self, "sizes", [])

    def sum(self, tensor):
        self.sizes.append(tensor.numel())
        return tensor.mul_(2)


@pytest.mark.parametrize("bucket", [1, 100, 1 << 24])
def test_gradients_are_summed_once_each_in_buckets_of_a_fixed_order(bucket, monkeypatch):
    monkeypatch.setattr(optim, "BUCKET", bucket)
    trained = make("qwen3")
    backward(trained)
    expected = [2 * p.grad for p in trained.parameters]
    trained.parameters[0].grad, world = None, Twice()
    sum_gradients(trained, world)
    assert sum(world.sizes) == sum(p.numel() for p in trained.parameters)
    assert all(size <= max(bucket, 97 * 16) for size in world.sizes)
    assert not bool(trained.parameters[0].grad.any())
    for p, gradient in list(zip(trained.parameters, expected, strict=True))[1:]:
        assert torch.equal(p.grad, gradient)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_invariant_12_a_restored_optimiser_goes_on_bit_by_bit(family):
    straight = make(family, ema_decay=0.5)
    for n in range(2):
        step(straight, seed=n)
    kept = copies(weights(straight)), copies(optimiser_state(straight))
    average = copies(straight.average)
    for n in range(2, 4):
        step(straight, seed=n)
    resumed = make(family, seed=9, ema_decay=0.5)
    load_weights(resumed, kept[0])
    load_optimiser_state(resumed, kept[1])
    resumed.average = average
    for name, moment in optimiser_state(resumed).items():
        assert torch.equal(moment, kept[1][name])
    for n in range(2, 4):
        step(resumed, seed=n)
    for name, p in weights(straight).items():
        assert torch.equal(weights(resumed)[name], p), name
        assert torch.equal(resumed.average[name], straight.average[name]), name


def test_loading_moments_leaves_the_saved_ones_alone():
    trained = make()
    step(trained)
    kept = copies(optimiser_state(trained))
    other = make(seed=9)
    saved = copies(kept)
    load_optimiser_state(other, saved)
    step(other)
    for name, moment in saved.items():
        if name.endswith(".step"):
            assert torch.equal(moment, kept[name])


def test_the_state_before_the_first_step_is_empty_and_comes_back():
    trained = make()
    assert optimiser_state(trained) == {}
    load_optimiser_state(trained, {})
    step(trained)


def test_a_state_of_another_model_is_refused():
    trained = make()
    step(trained)
    other = trainee(tiny_policy("llama"), Optimisation())
    with pytest.raises(CheckpointError, match="of shape"):
        load_weights(other, weights(trained))
    with pytest.raises(CheckpointError, match="has nothing for"):
        load_optimiser_state(other, optimiser_state(trained))


def test_invariant_13_an_average_with_decay_0_equals_the_weights():
    trained = make(ema_decay=0.0)
    for n in range(3):
        step(trained, seed=n)
        for name, p in weights(trained).items():
            assert torch.equal(trained.average[name], p)


def test_the_average_follows_once_a_step():
    trained = make(ema_decay=0.75)
    expected = copies(weights(trained))
    for n in range(3):
        step(trained, seed=n)
        for name, p in weights(trained).items():
            expected[name] = 0.75 * expected[name] + 0.25 * p
    for name, value in trained.average.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)


def test_no_average_is_kept_where_none_is_asked_for():
    assert make().average is None
    train = Optimisation(ema_decay=0.9)
    assert trainee(tiny_policy("gpt2"), train, with_average=False).average is None


def test_other_weights_are_lent_for_a_while_and_come_back_even_after_an_error():
    trained = make()
    before = copies(weights(trained))
    other = {name: p + 1 for name, p in before.items()}
    with swapped(trained, other):
        assert all(torch.equal(p, other[n]) for n, p in weights(trained).items())
    with pytest.raises(RuntimeError), swapped(trained, other):
        raise RuntimeError
    assert all(torch.equal(p, before[n]) for n, p in weights(trained).items())
    with swapped(trained, None):
        assert all(torch.equal(p, before[n]) for n, p in weights(trained).items())


def test_learning_rate_zero_changes_no_weight():
    trained = make(weight_decay=0.1)
    before = copies(weights(trained))
    step(trained, lr=0.0)
    assert all(torch.equal(p, before[n]) for n, p in weights(trained).items())


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"schedule": "constant"}, [2.0, 2.0, 2.0, 2.0, 2.0]),
        ({"schedule": "linear"}, [2.0, 1.6, 1.2, 0.8, 0.4]),
        ({"schedule": "cosine", "min_learning_rate_ratio": 0.0},
         [2.0, 1 + math.cos(0.2 * math.pi), 1 + math.cos(0.4 * math.pi),
          1 + math.cos(0.6 * math.pi), 1 + math.cos(0.8 * math.pi)]),
        ({"schedule": "constant", "warmup_steps": 3}, [0.2, 1.1, 2.0, 2.0, 2.0]),
        ({"schedule": "linear", "warmup_steps": 1}, [0.2, 2.0, 1.5, 1.0, 0.5]),
    ],
)  # fmt: skip
def test_the_learning_rate_of_each_step_follows_the_schedule(train, expected):
    got = [learning_rate_at(Optimisation(**train), s, 5, peak=2.0) for s in range(5)]
    assert got == pytest.approx(expected)
