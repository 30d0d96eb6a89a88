"""Moments of a stream are those of all its numbers, however it is cut."""

from __future__ import annotations

import statistics

import pytest
import torch

from stages.moments import Moments, joined, standardised

NUMBERS = [3.0, -1.5, 0.25, 8.0, 8.0, -2.0, 1e3]


@pytest.mark.parametrize("cuts", [[7], [1, 6], [3, 0, 4], [1] * 7])
def test_moments_are_those_of_all_numbers_however_they_are_cut(cuts: list[int]) -> None:
    known, rest = Moments(), NUMBERS
    for size in cuts:
        known, rest = joined(known, torch.tensor(rest[:size])), rest[size:]
    assert known.count == 7
    assert known.mean == pytest.approx(statistics.fmean(NUMBERS), rel=1e-12)
    assert known.squares / 7 == pytest.approx(statistics.pvariance(NUMBERS), rel=1e-12)


def test_standardised_numbers_have_mean_0_and_deviation_1() -> None:
    values = torch.tensor(NUMBERS, dtype=torch.float64)
    found = standardised(values, joined(Moments(), values))
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found.std(correction=0)) == pytest.approx(1.0, rel=1e-12)


def test_equal_numbers_become_0_and_before_any_is_known_nothing_changes() -> None:
    equal = torch.full((3,), 2.5)
    assert standardised(equal, joined(Moments(), equal)).tolist() == [0.0, 0.0, 0.0]
    assert standardised(equal, Moments()).tolist() == [2.5, 2.5, 2.5]
