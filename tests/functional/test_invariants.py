"""What must hold for any input: numbered statements about the pipeline, at the level of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stages.functional.control import ema, next_kl_coef
from stages.functional.logprobs import entropy, token_logprobs
from stages.functional.masking import aggregate, loss_denominator, masked_sum, whiten
from stages.functional.policy_gradient import policy_diagnostics, policy_loss, total_loss
from stages.functional.ranking import (
    normalise_by_mean,
    per_prompt_loss,
    ranking_denominator,
    ranking_loss,
)
from stages.functional.returns import after_last_mask, gae, shape_rewards
from stages.functional.supervised import sft_loss
from stages.functional.value import explained_variance, value_clip_count, value_loss

LENGTHS = [4, 0, 6, 1, 3]
WIDTH = 6
AGGREGATIONS = ["token_mean", "seq_mean", "fixed_length"]
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-5, 2e-6)}

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def mask_of(lengths: list[int], width: int, side: str) -> Tensor:
    slots = torch.arange(width)
    ends = torch.tensor(lengths)[:, None]
    return slots < ends if side == "right" else slots >= width - ends


def placed(rows: Tensor, lengths: list[int], width: int, side: str, filler: float) -> Tensor:
    """Rows of real values in a wider tensor, padded on one side."""
    result = torch.full((len(lengths), width), filler, dtype=rows.dtype)
    for row, values, n in zip(result, rows, lengths, strict=True):
        if n:
            row[slice(n) if side == "right" else slice(-n, None)] = values[:n]
    return result


def differentiated(loss: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return loss, torch.autograd.grad(loss, leaf)[0]


def _policy(aggregation: str) -> Kernel:
    def kernel(a: Tensor, b: Tensor, c: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        a = (0.2 * a).requires_grad_()
        denominator = loss_denominator(mask, aggregation=aggregation, fixed_length=9)
        clips = {"clip_low": 0.2, "clip_high": 0.2}
        loss = policy_loss(
            a, 0.2 * b, c, mask, aggregation=aggregation, denominator=denominator, **clips
        )
        return *differentiated(loss, a), *policy_diagnostics(a, 0.2 * b, c, mask, **clips)

    return kernel


def _value(aggregation: str) -> Kernel:
    def kernel(a: Tensor, b: Tensor, c: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        a = a.clone().requires_grad_()
        denominator = loss_denominator(mask, aggregation=aggregation, fixed_length=9)
        loss = value_loss(
            a, b, c, mask, clip_range=0.2, aggregation=aggregation, denominator=denominator
        )
        clipped = value_clip_count(a, b, c, mask, clip_range=0.2)
        return *differentiated(loss, a), clipped, explained_variance(a, c, mask)

    return kernel


def _sft(aggregation: str) -> Kernel:
    def kernel(a: Tensor, b: Tensor, c: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        a = a.clone().requires_grad_()
        denominator = loss_denominator(mask, aggregation=aggregation, fixed_length=9)
        loss = sft_loss(a, mask, aggregation=aggregation, denominator=denominator)
        return differentiated(loss, a)

    return kernel


def _rollout(a: Tensor, b: Tensor, c: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    scores = torch.arange(float(len(mask)), dtype=a.dtype)
    rewards, kl = shape_rewards(a, b, mask, scores, kl_coef=0.1, estimator="k3")
    estimate = gae(rewards, c, mask, gamma=0.9, lam=0.8)
    return rewards, kl, *estimate, whiten(estimate.advantages, mask).values


KERNELS: dict[str, Kernel] = {
    **{f"policy_{name}": _policy(name) for name in AGGREGATIONS},
    **{f"value_{name}": _value(name) for name in AGGREGATIONS},
    **{f"sft_{name}": _sft(name) for name in AGGREGATIONS},
    "rollout": _rollout,
}


def inputs_of(dtype: torch.dtype) -> list[Tensor]:
    return [normal(len(LENGTHS), WIDTH, seed=seed, dtype=dtype) for seed in (1, 2, 3)]


def at_the_real_tokens(results: tuple[Tensor, ...], mask: Tensor) -> list[Tensor]:
    """Tensors ``[B, T]`` reduced to their real entries, after a look that all others are 0."""
    for result in results:
        assert result.dim() == 0 or (result[~mask] == 0).all()
    return [result if result.dim() == 0 else result[mask] for result in results]


def assert_close(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCE[dtype]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def test_invariant_1_unchanged_policy_has_ratio_one_and_minus_the_mean_advantage_as_loss() -> None:
    logp, _, advantages = inputs_of(torch.float32)
    mask = mask_of(LENGTHS, WIDTH, "right")
    advantages = whiten(advantages, mask).values
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    tokens = loss_denominator(mask, aggregation="token_mean")
    loss = policy_loss(
        logp, logp, advantages, mask, aggregation="token_mean", denominator=tokens, **clips
    )
    assert abs(loss.item()) < 1e-6
    sums = policy_diagnostics(logp, logp, advantages, mask, **clips)
    assert [float(x) for x in sums] == [float(tokens), 0.0, 0.0, 0.0, 0.0]
    assert value_clip_count(logp, logp, advantages, mask, clip_range=0.2) == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("position", ["last", "after_last"])
def test_invariant_2_policy_equal_to_the_reference_pays_no_kl(
    estimator: str, position: str
) -> None:
    logp, scores = inputs_of(torch.float32)[0], torch.tensor([1.5, 9.0, -2.0, 0.25, 3.0])
    mask = mask_of(LENGTHS, WIDTH, "right")
    rewards, kl = shape_rewards(
        logp, logp, mask, scores, kl_coef=0.1, estimator=estimator, position=position
    )
    assert (kl == 0).all()
    assert rewards.sum(dim=1).tolist() == [1.5, 0.0, -2.0, 0.25, 3.0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_invariant_3_kl_part_of_the_rewards_is_the_log_ratio_of_the_sequence(side: str) -> None:
    beta, mask = 0.07, mask_of(LENGTHS, WIDTH, side)
    labels = torch.randint(5, mask.shape, generator=torch.Generator().manual_seed(0))
    old, ref = (
        token_logprobs(normal(*mask.shape, 5, seed=seed), labels, temperature=0.7)
        for seed in (4, 5)
    )
    rewards, _ = shape_rewards(old, ref, mask, torch.zeros(5).double(), kl_coef=beta)
    for row, real in enumerate(mask):
        log_ratio = sum(old[row][real].tolist()) - sum(ref[row][real].tolist())
        assert rewards[row].sum().item() == pytest.approx(-beta * log_ratio, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_invariant_4_padding_changes_no_number(name: str, dtype: torch.dtype) -> None:
    kernel, rows = KERNELS[name], inputs_of(dtype)

    def results(width: int, side: str, filler: float) -> list[Tensor]:
        mask = mask_of(LENGTHS, width, side)
        padded = [placed(x, LENGTHS, width, side, filler) for x in rows]
        return at_the_real_tokens(kernel(*padded, mask), mask)

    plain = results(WIDTH, "right", 0.0)
    for filler in (math.nan, math.inf, -999.0):
        for ours, theirs in zip(results(WIDTH, "right", filler), plain, strict=True):
            assert torch.equal(ours, theirs), f"the content {filler} of the padding shows"
    for width, side in ((WIDTH, "left"), (WIDTH + 5, "left"), (WIDTH + 3, "right")):
        assert_close(results(width, side, math.nan), plain, dtype)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "rollout"])
def test_invariant_4_order_of_the_rows_changes_no_number(name: str) -> None:
    rows, mask = inputs_of(torch.float64), mask_of(LENGTHS, WIDTH, "right")
    order = torch.tensor([3, 1, 4, 0, 2])
    plain = KERNELS[name](*rows, mask)
    moved = KERNELS[name](*(x[order] for x in rows), mask[order])
    back = [x if x.dim() == 0 else x[order.argsort()] for x in moved]
    assert_close(back, list(plain), torch.float64)


def test_invariant_4_advantages_of_a_row_do_not_depend_on_its_neighbours() -> None:
    rewards, values, _ = inputs_of(torch.float64)
    mask = mask_of(LENGTHS, WIDTH, "right")
    together = gae(rewards, values, mask, gamma=0.99, lam=0.95)
    for row in range(len(mask)):
        alone = gae(*(x[[row]] for x in (rewards, values, mask)), gamma=0.99, lam=0.95)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])


@pytest.mark.parametrize(
    "split", [[[0, 1], [2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 2], [1, 3, 0]]]
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_invariant_5_micro_batches_add_up_to_the_whole_batch(
    aggregation: str, split: list[list[int]]
) -> None:
    (a, b, c), mask = inputs_of(torch.float64), mask_of(LENGTHS, WIDTH, "right")
    parts = [loss_denominator(mask[r], aggregation=aggregation, fixed_length=9) for r in split]
    whole = loss_denominator(mask, aggregation=aggregation, fixed_length=9)
    assert sum(parts) == whole
    shared = {"aggregation": aggregation, "denominator": sum(parts)}
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    losses: list[Callable[[Tensor, list[int]], Tensor]] = [
        lambda x, r: policy_loss(0.2 * x[r], 0.2 * b[r], c[r], mask[r], **clips, **shared),
        lambda x, r: value_loss(x[r], b[r], c[r], mask[r], clip_range=0.2, **shared),
        lambda x, r: sft_loss(x[r], mask[r], **shared),
    ]
    for loss in losses:
        leaf = a.clone().requires_grad_()
        at_once = differentiated(loss(leaf, list(range(len(LENGTHS)))), leaf)
        in_parts = differentiated(sum(loss(leaf, rows) for rows in split), leaf)
        for ours, theirs in zip(in_parts, at_once, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", ["prompt_mean", "pair_mean"])
@pytest.mark.parametrize("ties", ["drop", "half"])
@pytest.mark.parametrize("pair_denominator", ["pairs", "choose2"])
def test_invariant_5_micro_batches_of_prompts_add_up_to_the_whole_batch(
    reduction: str, ties: str, pair_denominator: str
) -> None:
    scores, ranks, mask = normal(4, 5, seed=6), RANKS, RANKED
    counting = {"ties": ties, "pair_denominator": pair_denominator, "reduction": reduction}
    split = [[0, 3], [1], [2]]
    whole = sum(ranking_denominator(ranks[r], mask[r], **counting) for r in split)
    assert whole == ranking_denominator(ranks, mask, **counting)
    leaf = scores.requires_grad_()

    def share(r: list[int]) -> Tensor:
        return ranking_loss(
            leaf[r], ranks[r], mask[r], center_coef=0.01, denominator=whole, **counting
        )

    at_once = differentiated(share([0, 1, 2, 3]), leaf)
    in_parts = differentiated(sum(share(rows) for rows in split), leaf)
    for ours, theirs in zip(in_parts, at_once, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_invariant_5_diagnostics_add_up_to_those_of_the_whole_batch() -> None:
    (a, b, c), mask = inputs_of(torch.float64), mask_of(LENGTHS, WIDTH, "left")
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    whole = policy_diagnostics(a, b, c, mask, **clips)
    parts = [policy_diagnostics(a[r], b[r], c[r], mask[r], **clips) for r in ([0, 4], [1, 2, 3])]
    for total, part in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(sum(part), total, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_invariant_6_undiscounted_returns_are_the_rewards_to_go_whatever_the_values(
    side: str,
) -> None:
    rewards, values, others = inputs_of(torch.float64)
    mask = mask_of(LENGTHS, WIDTH, side)
    to_go = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1) * mask
    for critic in (values, 100 * others):
        estimate = gae(rewards, critic, mask, gamma=1.0, lam=1.0)
        torch.testing.assert_close(estimate.returns, to_go, rtol=1e-9, atol=1e-10)


RANKS = torch.tensor([[1, 2, 3, 4, 5], [2, 1, 2, 3, 9], [1, 1, 9, 9, 9], [2, 1, 9, 9, 9]])
RANKED = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.bool
)


def ranked_loss(scores: Tensor, ranks: Tensor, mask: Tensor, **options: float) -> Tensor:
    counting = {"ties": "half", "pair_denominator": "pairs", "reduction": "prompt_mean"}
    denominator = ranking_denominator(ranks, mask, **counting)
    return ranking_loss(scores, ranks, mask, denominator=denominator, **counting, **options)


def test_invariant_7_two_answers_are_bradley_terry() -> None:
    scores, ranks = normal(6, 2, seed=7), torch.tensor([[1, 2]] * 6)
    everything = torch.ones_like(ranks, dtype=torch.bool)
    won = 1 / (1 + (scores[:, 1] - scores[:, 0]).exp())
    torch.testing.assert_close(per_prompt_loss(scores, ranks, everything), -won.log())
    torch.testing.assert_close(ranked_loss(scores, ranks, everything), -won.log().mean())


def test_invariant_7_a_constant_on_all_scores_of_a_prompt_changes_nothing() -> None:
    scores = normal(4, 5, seed=8).requires_grad_()
    shift = torch.tensor([[3.0], [-20.0], [100.0], [0.5]])
    loss, gradient = differentiated(ranked_loss(scores, RANKS, RANKED), scores)
    torch.testing.assert_close(ranked_loss(scores + shift, RANKS, RANKED), loss)
    assert gradient.sum(dim=1).tolist() == pytest.approx([0.0] * 4, abs=1e-15)
    centred = ranked_loss(scores, RANKS, RANKED, center_coef=0.01)
    assert ranked_loss(scores + shift, RANKS, RANKED, center_coef=0.01) > centred


def test_invariant_7_permuting_answers_with_their_ranks_changes_nothing() -> None:
    scores, order = normal(4, 5, seed=9).requires_grad_(), torch.tensor([4, 2, 0, 1, 3])
    loss, gradient = differentiated(ranked_loss(scores, RANKS, RANKED), scores)
    moved, moved_gradient = differentiated(
        ranked_loss(scores[:, order], RANKS[:, order], RANKED[:, order]), scores
    )
    torch.testing.assert_close(moved, loss, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(moved_gradient, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("offset", [0.0, -3.0, 40.0])
def test_invariant_8_normalised_demonstrations_average_to_zero(offset: float) -> None:
    raw = normal(4096, seed=10, dtype=torch.float32) + offset
    mean, std = normalise_by_mean(raw)
    assert abs(((raw - mean) / std).double().mean().item()) <= 1e-5
    assert std == 1


def test_invariant_10_switched_off_terms_leave_plain_ppo() -> None:
    policy, value = torch.tensor(0.3), torch.tensor(0.7)
    other, nll = torch.tensor(2.0), torch.tensor(3.0)
    off = total_loss(policy, value, other, nll, vf_coef=1.0, ent_coef=0.0, ptx_coef=0.0)
    assert torch.equal(off, policy + value)


def test_invariant_10_an_infinite_clip_range_is_no_clipping() -> None:
    (a, b, c), mask = inputs_of(torch.float64), mask_of(LENGTHS, WIDTH, "right")
    tokens = loss_denominator(mask, aggregation="token_mean")
    shared = {"aggregation": "token_mean", "denominator": tokens}
    leaf = a.clone().requires_grad_()
    wide = policy_loss(leaf, b, c, mask, clip_low=math.inf, clip_high=math.inf, **shared)
    ratios = torch.where(mask, (leaf - b).exp() * c, 0.0)
    plain = -ratios.sum() / tokens
    for ours, theirs in zip(differentiated(wide, leaf), differentiated(plain, leaf), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
    wide = value_loss(leaf, b, c, mask, clip_range=math.inf, **shared)
    plain = value_loss(leaf, b, c, mask, clip_range=None, **shared)
    for ours, theirs in zip(differentiated(wide, leaf), differentiated(plain, leaf), strict=True):
        assert torch.equal(ours, theirs)


def test_invariant_13_average_without_decay_is_the_value() -> None:
    average, value = inputs_of(torch.float32)[:2]
    assert torch.equal(ema(average, value, decay=0.0), value)
    assert torch.equal(ema(average, value, decay=1.0), average)


@pytest.mark.parametrize("target", [0.3, 6.0, 11.0])
def test_invariant_13_coefficient_stays_where_the_kl_is_on_target(target: float) -> None:
    assert next_kl_coef(0.15, target, target=target, gain=0.0512) == 0.15


def test_slot_after_the_last_token_keeps_the_sum_of_the_rewards() -> None:
    (old, ref, _), mask = inputs_of(torch.float64), mask_of(LENGTHS, WIDTH, "right")
    scores = normal(len(LENGTHS), seed=11)
    sums = [
        shape_rewards(old, ref, mask, scores, kl_coef=0.1, position=position).rewards.sum(dim=1)
        for position in ("last", "after_last")
    ]
    torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)
    widened = after_last_mask(mask)
    assert (widened.sum(dim=1) - mask.sum(dim=1)).tolist() == [1, 0, 0, 1, 1]


def test_entropy_is_the_mean_surprise_and_aggregates_like_a_loss() -> None:
    logits, mask = normal(5, WIDTH, 4, seed=12), mask_of(LENGTHS, WIDTH, "right")
    every = torch.stack(
        [token_logprobs(logits, torch.full(mask.shape, token)) for token in range(4)]
    )
    surprise = -(every.exp() * every).sum(dim=0)
    torch.testing.assert_close(entropy(logits), surprise, rtol=1e-12, atol=0.0)
    tokens = loss_denominator(mask, aggregation="token_mean")
    mean = aggregate(surprise, mask, aggregation="token_mean", denominator=tokens)
    torch.testing.assert_close(mean, masked_sum(surprise, mask) / mask.sum())
