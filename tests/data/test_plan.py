"""The order of the data: permutations, optimiser batches, micro-batches, shares."""

from __future__ import annotations

import numpy as np
import pytest

from stages.data import plan


def test_an_epoch_visits_every_record_once():
    visited = [plan.optimiser_batch(10, 4, seed=3, step=step) for step in range(3)]
    assert [epoch for epoch, _ in visited] == [0, 0, 0]
    assert [len(indices) for _, indices in visited] == [4, 4, 2]
    assert sorted(np.concatenate([indices for _, indices in visited])) == list(range(10))


def test_the_next_epoch_has_another_order():
    assert plan.optimiser_batch(10, 4, seed=3, step=3)[0] == 1
    assert list(plan.order(50, 3, 0)) != list(plan.order(50, 3, 1))
    assert list(plan.order(50, 3, 0)) != list(plan.order(50, 4, 0))


def test_the_order_is_a_function_of_its_counters_alone():
    before = list(plan.order(50, 3, 7))
    plan.shuffled.cache_clear()
    np.random.default_rng().random()
    assert list(plan.order(50, 3, 7)) == before


def test_data_smaller_than_a_batch_make_one_step_an_epoch():
    epoch, indices = plan.optimiser_batch(3, 32, seed=0, step=5)
    assert epoch == 5
    assert sorted(indices) == [0, 1, 2]


def test_micro_batches_stay_within_the_budget_and_keep_every_example():
    lengths = [5, 1, 9, 3, 30, 4, 4]
    batches = plan.micro_batches(lengths, 10)
    assert sorted(n for batch in batches for n in batch) == list(range(7))
    assert all(sum(lengths[n] for n in batch) <= 10 or len(batch) == 1 for batch in batches)
    assert batches[0] == [4]


def test_no_example_makes_no_micro_batch():
    assert plan.micro_batches([], 10) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_disjoint_and_make_up_the_batch(size):
    lengths = [5, 1, 9, 3]
    shares = [plan.share(lengths, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(shares)) == [0, 1, 2, 3]


def test_shares_have_about_the_same_number_of_tokens():
    lengths = [100, 1, 1, 98, 50, 50]
    loads = [sum(lengths[n] for n in plan.share(lengths, rank, 2)) for rank in (0, 1)]
    assert loads == [150, 150]


def test_a_stream_runs_through_one_order_after_another():
    whole = [*plan.order(5, 3, 0), *plan.order(5, 3, 1), *plan.order(5, 3, 2)]
    assert list(plan.stream(5, 3, 0, 15)) == whole
    assert list(plan.stream(5, 3, 4, 7)) == whole[4:11]
    assert list(plan.stream(50, 3, 0, 50, name="ptx order")) != list(plan.stream(50, 3, 0, 50))
