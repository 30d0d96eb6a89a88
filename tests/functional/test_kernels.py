"""Kernels against numbers worked by hand, against each other, and at their limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stages.functional.control import learning_rate, next_kl_coef
from stages.functional.divergence import exact_kl, kl_estimate
from stages.functional.logprobs import entropy, token_logprobs
from stages.functional.masking import (
    aggregate,
    loss_denominator,
    masked_mean,
    masked_moments,
    masked_sum,
    whiten,
)
from stages.functional.policy_gradient import policy_diagnostics, policy_loss
from stages.functional.ranking import (
    normalise_by_mean,
    normalise_by_moments,
    pair_calibration,
    pair_statistics,
    per_prompt_loss,
    rank_margins,
    ranking_denominator,
    ranking_loss,
    strict_pairs,
)
from stages.functional.returns import after_last_mask, gae, process_scores, shape_rewards
from stages.functional.supervised import sft_loss
from stages.functional.value import explained_variance, value_clip_count, value_loss

NOTHING = torch.zeros(2, 3, dtype=torch.bool)
GARBAGE = torch.tensor([[math.nan, math.inf, 999.0], [-999.0, -math.inf, math.nan]])
TOKEN_MEAN = {"aggregation": "token_mean"}


def bools(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def doubles(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_mean_over_nothing_is_undefined_and_sum_is_zero() -> None:
    assert masked_sum(GARBAGE, NOTHING) == 0
    assert masked_mean(GARBAGE, NOTHING).isnan()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "fixed_length"])
def test_loss_over_nothing_is_zero_with_zero_gradient(aggregation: str) -> None:
    leaf = GARBAGE.clone().requires_grad_()
    denominator = loss_denominator(NOTHING, aggregation=aggregation, fixed_length=4)
    shared = {"aggregation": aggregation, "denominator": denominator}
    losses = [
        sft_loss(leaf, NOTHING, **shared),
        policy_loss(leaf, GARBAGE, GARBAGE, NOTHING, clip_low=0.2, clip_high=0.2, **shared),
        value_loss(leaf, GARBAGE, GARBAGE, NOTHING, clip_range=0.2, **shared),
    ]
    for loss in losses:
        assert loss == 0
        assert torch.autograd.grad(loss, leaf)[0].tolist() == NOTHING.float().tolist()


def test_denominators_count_tokens_sequences_and_slots() -> None:
    mask = bools([1, 1, 1], [0, 0, 0], [0, 0, 1])
    assert loss_denominator(mask, aggregation="token_mean") == 4
    assert loss_denominator(mask, aggregation="seq_mean") == 2
    assert loss_denominator(mask, aggregation="fixed_length", fixed_length=5) == 15
    with pytest.raises(ValueError, match="fixed_length"):
        loss_denominator(mask, aggregation="fixed_length")


def test_aggregations_of_two_rows_by_hand() -> None:
    losses, mask = doubles([[1.0, 2.0, 6.0], [5.0, 99.0, 99.0]]), bools([1, 1, 1], [1, 0, 0])
    expected = {"token_mean": 14 / 4, "seq_mean": (3 + 5) / 2, "fixed_length": 14 / 20}
    for aggregation, number in expected.items():
        denominator = loss_denominator(mask, aggregation=aggregation, fixed_length=10)
        assert aggregate(losses, mask, aggregation=aggregation, denominator=denominator) == (
            pytest.approx(number, rel=1e-12)
        )


def test_equal_values_have_no_variance_in_float32_either() -> None:
    values = torch.full((7, 11), 0.3)
    mean, var = masked_moments(values, torch.ones_like(values, dtype=torch.bool))
    assert mean == values[0, 0]
    assert var == 0


def test_whitening_large_values_keeps_its_digits_in_float32() -> None:
    values = torch.tensor([[100_000.0, 100_001.0, 100_002.0]])
    whitened = whiten(values, torch.ones_like(values, dtype=torch.bool)).values
    assert whitened.tolist()[0] == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)], rel=1e-6)


def test_whitening_nothing_gives_zeros() -> None:
    whitened = whiten(GARBAGE, NOTHING)
    assert whitened.values.tolist() == NOTHING.float().tolist()
    assert (whitened.mean, whitened.var) == (0, 0)


def test_mask_of_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match="bool"):
        masked_sum(torch.ones(2, 2), torch.ones(2, 2))


def test_shapes_that_differ_are_refused_by_name() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="values"):
        gae(torch.ones(2, 3), torch.ones(2, 1), mask, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="scores"):
        process_scores(torch.ones(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="labels"):
        token_logprobs(torch.ones(2, 3, 5), torch.ones(2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="margin"):
        per_prompt_loss(torch.ones(2, 3), torch.ones(2, 3), mask, margin=torch.ones(3, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_float32_log_probabilities(dtype: torch.dtype) -> None:
    logits = torch.linspace(-2, 2, 24).view(1, 4, 6).to(dtype)
    labels = torch.tensor([[0, 1, 2, 3]])
    for temperature in (1.0, 0.5):
        exact = token_logprobs(logits.double(), labels, temperature=temperature)
        ours = token_logprobs(logits, labels, temperature=temperature)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
        assert entropy(logits, temperature=temperature).dtype == torch.float32


def test_divided_logits_are_the_temperature() -> None:
    logits, labels = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 4, 2])
    torch.testing.assert_close(
        token_logprobs(logits, labels, temperature=0.7), token_logprobs(logits / 0.7, labels)
    )


def test_extreme_logits_give_finite_numbers_and_gradients() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    total = token_logprobs(logits, torch.tensor([1])).sum() + entropy(logits).sum()
    assert total.item() == pytest.approx(-2e4)
    assert torch.autograd.grad(total, logits)[0].isfinite().all()


def test_estimators_average_to_the_exact_divergence() -> None:
    p, q = doubles([0.1, -0.4, 0.9]), doubles([0.5, 0.2, -0.3])
    logp, logq = p.log_softmax(0), q.log_softmax(0)
    for estimator in ("k1", "k3"):
        expectation = (logp.exp() * kl_estimate(logp, logq, estimator=estimator)).sum()
        torch.testing.assert_close(expectation, exact_kl(p, q), rtol=1e-12, atol=0.0)


def test_estimates_of_a_token_twice_as_likely_by_hand() -> None:
    logp, logp_other = doubles([math.log(0.5)]), doubles([math.log(0.25)])
    ln2 = math.log(2)
    expected = {"k1": ln2, "k2": ln2**2 / 2, "k3": 0.5 - 1 + ln2}
    for estimator, number in expected.items():
        estimate = kl_estimate(logp, logp_other, estimator=estimator)
        assert estimate.item() == pytest.approx(number, rel=1e-12)


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator="k4")


def test_score_rules_come_in_order() -> None:
    scores, ended = doubles([9.0, 9.0, -9.0]), torch.tensor([True, False, False])
    assert process_scores(scores, ended, clip=5.0, subtract=1.0).tolist() == [5.0, 4.0, -6.0]
    assert process_scores(scores, ended, clip=0.5, replace=-1.0).tolist() == [0.5, -1.0, -1.0]
    assert process_scores(scores, ended).tolist() == scores.tolist()


def test_slot_after_the_last_token_is_found_from_the_mask() -> None:
    mask = bools([1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0])
    widened = bools([1, 1, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0])
    assert after_last_mask(mask).tolist() == widened.tolist()


def test_rewards_of_three_paddings_by_hand() -> None:
    mask = bools([1, 1, 0], [0, 1, 1], [0, 0, 0])
    old = torch.where(mask, doubles([[-1.0, -2.0, 7.0]] * 3), math.nan)
    ref = torch.where(mask, doubles([[-1.5, -2.0, 5.0]] * 3), math.nan)
    scores = doubles([3.0, 4.0, math.nan])
    last = shape_rewards(old, ref, mask, scores, kl_coef=0.1)
    assert last.kl.tolist() == [[0.5, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
    assert last.rewards.tolist() == [[-0.05, 3.0, 0.0], [0.0, 0.0, 3.8], [0.0, 0.0, 0.0]]
    after = shape_rewards(old, ref, mask, scores, kl_coef=0.1, position="after_last")
    assert after.rewards.tolist() == [[-0.05, 0.0, 3.0], [0.0, 0.0, 3.8], [0.0, 0.0, 0.0]]


def test_recursion_skips_masked_slots_wherever_they_stand() -> None:
    rewards, values = doubles([[1.0, 2.0, 3.0]]), doubles([[0.5, -0.5, 0.25]])
    whole = gae(rewards, values, bools([1, 1, 1]), gamma=0.9, lam=0.8)
    hole = bools([0, 1, 0, 1, 1, 0])
    spread = torch.full((2, 1, 6), math.nan, dtype=torch.float64)
    spread[:, hole] = torch.stack([rewards[0], values[0]])
    skipped = gae(spread[0], spread[1], hole, gamma=0.9, lam=0.8)
    for ours, theirs in zip(skipped, whole, strict=True):
        torch.testing.assert_close(ours[hole], theirs[0], rtol=1e-12, atol=0.0)
        assert (ours[~hole] == 0).all()


def test_lambda_zero_gives_the_temporal_difference() -> None:
    rewards, values = doubles([[1.0, 2.0, 4.0]]), doubles([[0.5, -0.5, 0.25]])
    estimate = gae(rewards, values, bools([1, 1, 1]), gamma=0.9, lam=0.0)
    delta = [1.0 + 0.9 * -0.5 - 0.5, 2.0 + 0.9 * 0.25 + 0.5, 4.0 - 0.25]
    assert estimate.advantages[0].tolist() == pytest.approx(delta, rel=1e-12)


def test_advantages_decay_with_gamma_times_lambda() -> None:
    rewards = doubles([[0.0, 0.0, 1.0]])
    estimate = gae(rewards, torch.zeros_like(rewards), bools([1, 1, 1]), gamma=0.5, lam=0.4)
    assert estimate.advantages[0].tolist() == pytest.approx([0.04, 0.2, 1.0], rel=1e-12)


def test_advantages_of_a_batch_without_a_column() -> None:
    nothing = torch.zeros(3, 0)
    estimate = gae(nothing, nothing, nothing.bool(), gamma=1.0, lam=0.95)
    assert estimate.advantages.shape == estimate.returns.shape == (3, 0)
    rewards, _ = shape_rewards(nothing, nothing, nothing.bool(), torch.zeros(3), kl_coef=0.1)
    assert rewards.shape == (3, 0)


def test_gradient_vanishes_only_where_the_clip_stops_an_improvement() -> None:
    ratios, advantages = doubles([[1.5, 0.5, 1.5, 0.5]]), doubles([[1.0, 1.0, -1.0, -1.0]])
    logp = ratios.log().requires_grad_()
    loss = policy_loss(
        logp, torch.zeros_like(ratios), advantages, bools([1, 1, 1, 1]),
        clip_low=0.2, clip_high=0.2, denominator=torch.tensor(1.0), **TOKEN_MEAN,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-1.2 - 0.5 + 1.5 + 0.8, rel=1e-12)
    gradient = torch.autograd.grad(loss, logp)[0]
    assert gradient[0].tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0], rel=1e-12)


def test_clip_range_may_differ_upwards_and_downwards() -> None:
    logp, advantages = doubles([[2.0, 0.5]]).log(), doubles([[1.0, -1.0]])
    loss = policy_loss(
        logp, torch.zeros_like(logp), advantages, bools([1, 1]),
        clip_low=0.1, clip_high=0.3, denominator=torch.tensor(1.0), **TOKEN_MEAN,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-1.3 + 0.9, rel=1e-12)


def test_supervised_loss_is_the_surprise_of_the_targets() -> None:
    logp = doubles([[math.log(0.5), math.log(0.25), math.nan]])
    loss = sft_loss(logp, bools([1, 1, 0]), denominator=torch.tensor(2.0), **TOKEN_MEAN)
    assert loss.item() == pytest.approx(1.5 * math.log(2), rel=1e-12)


def test_unchanged_policy_has_no_divergence_and_minus_the_advantage_as_loss() -> None:
    logp, advantages = -torch.rand(2, 3), torch.randn(2, 3)
    mask = bools([1, 1, 1], [1, 0, 0])
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    loss = policy_loss(
        logp, logp, advantages, mask, denominator=torch.tensor(4.0), **clips, **TOKEN_MEAN
    )
    torch.testing.assert_close(loss, -masked_mean(advantages, mask))
    sums = policy_diagnostics(logp, logp, advantages, mask, **clips)
    assert [float(x) for x in sums] == [4.0, 0.0, 0.0, 0.0, 0.0]


def test_value_errors_by_hand() -> None:
    new, old, goal = doubles([[1.0, 0.1]]), doubles([[0.0, 0.0]]), doubles([[1.5, 1.0]])
    mask = bools([1, 1])
    shared = {"denominator": torch.tensor(2.0), **TOKEN_MEAN}
    clipped = value_loss(new, old, goal, mask, clip_range=0.2, **shared)
    assert clipped.item() == pytest.approx((1.3**2 + 0.9**2) / 4, rel=1e-12)
    plain = value_loss(new, old, goal, mask, clip_range=None, **shared)
    assert plain.item() == pytest.approx((0.5**2 + 0.9**2) / 4, rel=1e-12)
    assert value_clip_count(new, old, goal, mask, clip_range=0.2) == 1
    assert value_clip_count(new, old, goal, mask, clip_range=None) == 0


def test_values_within_the_range_are_never_counted_as_clipped_by_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    old, step, goal = (torch.randn(50, 40, generator=generator) for _ in range(3))
    new = old + step.clamp(-0.19, 0.19)
    mask = torch.ones_like(new, dtype=torch.bool)
    assert value_clip_count(new, old, goal, mask, clip_range=0.2) == 0


def test_explained_variance_is_undefined_for_returns_that_do_not_vary() -> None:
    values, same = torch.tensor([[0.1, 0.2, 0.4]]), torch.full((1, 3), 0.7)
    mask = bools([1, 1, 1])
    assert explained_variance(values, same, mask).isnan()
    assert explained_variance(values, values, mask) == 1
    assert explained_variance(values, -values, mask).item() == pytest.approx(-3.0, rel=1e-6)
    assert explained_variance(GARBAGE, GARBAGE, NOTHING).isnan()


def ranking(scores: Tensor, ranks: Tensor, mask: Tensor, **options: object) -> Tensor:
    counting = {"ties": "drop", "pair_denominator": "pairs", "reduction": "prompt_mean"}
    counting |= {name: options.pop(name) for name in list(counting) if name in options}
    denominator = ranking_denominator(ranks, mask, **counting)
    return ranking_loss(scores, ranks, mask, denominator=denominator, **counting, **options)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_extreme_scores_give_finite_loss_and_gradient(scale: float) -> None:
    scores = torch.tensor([[1.0, -1.0, 0.0]]) * scale
    scores = scores.requires_grad_()
    loss = ranking(scores, torch.tensor([[1, 2, 3]]), bools([1, 1, 1]), ties="half")
    assert loss.isfinite()
    assert torch.autograd.grad(loss, scores)[0].isfinite().all()


def test_prompts_without_a_pair_add_nothing() -> None:
    scores = torch.tensor([[0.3, 0.7], [0.1, math.nan]], requires_grad=True)
    ranks, mask = torch.tensor([[1, 1], [1, 2]]), bools([1, 1], [1, 0])
    loss = ranking(scores, ranks, mask, center_coef=0.01)
    assert loss == 0
    assert torch.autograd.grad(loss, scores)[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert per_prompt_loss(scores, ranks, mask).isnan().all()


def test_pair_mean_weighs_every_pair_the_same() -> None:
    scores = doubles([[0.2, -0.1, 0.5], [1.0, 2.0, math.nan]])
    ranks, mask = torch.tensor([[1, 2, 3], [1, 2, 0]]), bools([1, 1, 1], [1, 1, 0])
    pairs = doubles([0.3, -0.3, -0.6, -1.0])  # s_w − s_l of (1,2) (1,3) (2,3), then (1,2)
    nll = (1 + (-pairs).exp()).log()
    assert strict_pairs(ranks, mask).sum(dim=(1, 2)).tolist() == [3, 1]
    loss = ranking(scores, ranks, mask, reduction="pair_mean")
    torch.testing.assert_close(loss, nll.mean(), rtol=1e-12, atol=0.0)
    by_prompt = ranking(scores, ranks, mask)
    expected = (nll[:3].mean() + nll[3]) / 2
    torch.testing.assert_close(by_prompt, expected, rtol=1e-12, atol=0.0)


def test_kept_tie_of_two_adds_half_of_both_orders() -> None:
    scores = doubles([[0.4, -0.2]])
    loss = ranking(scores, torch.tensor([[1, 1]]), bools([1, 1]), ties="half")
    both = [math.log1p(math.exp(-0.6)), math.log1p(math.exp(0.6))]
    assert loss.item() == pytest.approx(sum(both) / 2, rel=1e-12)


def test_pairs_may_be_counted_as_k_choose_two() -> None:
    scores, ranks, mask = doubles([[0.0, 0.0, 0.0]]), torch.tensor([[1, 2, 2]]), bools([1, 1, 1])
    assert ranking(scores, ranks, mask).item() == pytest.approx(math.log(2), rel=1e-12)
    fewer = ranking(scores, ranks, mask, pair_denominator="choose2")
    assert fewer.item() == pytest.approx(math.log(2) * 2 / 3, rel=1e-12)
    tied = ranking(scores, ranks, mask, ties="half", reduction="pair_mean")
    assert tied.item() == pytest.approx(math.log(2), rel=1e-12)


def test_margin_by_rank_grows_with_the_gap() -> None:
    scores, ranks, mask = doubles([[0.9, 0.5, 0.1]]), torch.tensor([[1, 2, 4]]), bools([1, 1, 1])
    margins = rank_margins(ranks, per_rank=0.1)
    gaps = doubles([0.4 - 0.1, 0.8 - 0.3, 0.4 - 0.2])
    torch.testing.assert_close(
        ranking(scores, ranks, mask, margin=margins), (1 + (-gaps).exp()).log().mean()
    )


def test_margins_of_another_precision_keep_the_precision_of_the_scores() -> None:
    scores, ranks, mask = torch.zeros(1, 2), torch.tensor([[1, 2]]), bools([1, 1])
    margins = torch.zeros(1, 2, 2, dtype=torch.float64)
    assert ranking(scores, ranks, mask, margin=margins).dtype == torch.float32


def test_pair_statistics_add_over_batches_of_unlike_width() -> None:
    wide = (torch.tensor([[3.0, 2.0, 2.0]]), torch.tensor([[1, 2, 3]]), bools([1, 1, 1]))
    narrow = (torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 2]]), bools([1, 1]))
    batches = [pair_statistics(*batch, max_answers=4) for batch in (wide, narrow)]
    total = [sum(parts) for parts in zip(*batches, strict=True)]
    assert [float(x) for x in total[:3]] == [4.0, 2.0, 1.0 + 1.0 + 0.0 - 1.0]
    nll = sum(math.log1p(math.exp(-d)) for d in (1.0, 1.0, 0.0, -1.0))
    assert float(total[3]) == pytest.approx(nll, rel=1e-6)
    assert total[4].tolist() == [0.0, 0.0, 1.0, 3.0, 0.0]
    assert total[5].tolist() == [0.0, 0.0, 0.0, 2.0, 0.0]


def test_empty_bins_are_undefined_and_cost_nothing() -> None:
    bins, ece, nll = pair_calibration(doubles([0.0, 0.0, 9.0, -50.0]), bins=10)
    assert bins.n.tolist() == [2.0] + [0.0] * 8 + [2.0]
    assert bins.accuracy[0] == 0
    assert bins.accuracy[-1] == 0.5
    assert bins.confidence[1:-1].isnan().all()
    high = 1 / (1 + math.exp(-9.0)) + 1.0
    assert ece.item() == pytest.approx((2 * 0.5 + high - 1) / 4, rel=1e-9)
    assert nll.item() == pytest.approx((2 * math.log(2) + math.exp(-9.0) + 50) / 4, rel=1e-5)


def test_normalisation_of_equal_scores_keeps_their_scale() -> None:
    mean, std = normalise_by_moments(torch.full((5,), 0.3))
    assert (mean, std) == (torch.tensor(0.3), 1)
    mean, std = normalise_by_mean(doubles([1.0, 2.0, 6.0]))
    assert (mean, std) == (3, 1)


def test_warm_up_of_one_step_is_a_tenth_of_the_peak() -> None:
    options = {"peak": 2.0, "total_steps": 11, "min_ratio": 0.1}
    for schedule in ("constant", "linear", "cosine"):
        rates = [
            learning_rate(step, schedule=schedule, warmup_steps=1, **options) for step in (0, 1)
        ]
        assert rates == pytest.approx([0.2, 2.0], rel=1e-12)


def test_schedule_starts_after_the_warm_up_and_ends_with_the_run() -> None:
    options = {"peak": 1.0, "total_steps": 14, "warmup_steps": 4, "min_ratio": 0.2}
    linear = [learning_rate(step, schedule="linear", **options) for step in (0, 3, 4, 9, 14, 99)]
    assert linear == pytest.approx([0.1, 1.0, 1.0, 0.5, 0.0, 0.0], rel=1e-12)
    cosine = [learning_rate(step, schedule="cosine", **options) for step in (4, 9, 14, 99)]
    assert cosine == pytest.approx([1.0, 0.6, 0.2, 0.2], rel=1e-12)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="sine"):
        learning_rate(0, peak=1.0, schedule="sine", total_steps=1, warmup_steps=0, min_ratio=0.1)


def test_coefficient_moves_by_at_most_a_fifth_of_the_gain() -> None:
    assert next_kl_coef(1.0, 1e9, target=6.0, gain=0.1) == pytest.approx(1.02)
    assert next_kl_coef(1.0, -1e9, target=6.0, gain=0.1) == pytest.approx(0.98)
    assert next_kl_coef(1.0, 6.6, target=6.0, gain=0.1) == pytest.approx(1.01)
