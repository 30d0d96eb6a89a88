"""What scores say of answers, against counting by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from stages.functional.judged import (
    best_of_n_kl,
    expected_best,
    expected_choice,
    rank_utility,
    selection_regret,
    win_rate,
)

NAN = math.nan


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_the_best_of_n_is_the_mean_over_all_subsets(n: int) -> None:
    scores = torch.tensor([[0.3, -2.0, 7.0, 0.3, 1.5, -0.1], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    found = expected_best(scores.double(), n=n)
    for row, value in zip(scores.double().tolist(), found.tolist(), strict=True):
        subsets = [max(subset) for subset in combinations(row, n)]
        assert value == pytest.approx(sum(subsets) / len(subsets), rel=1e-12)


def test_the_best_of_one_is_the_mean_and_of_all_the_maximum() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 10.0], dtype=torch.float64)
    assert expected_best(scores, n=1).item() == pytest.approx(4.0)
    assert expected_best(scores, n=4).item() == 10.0


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_best_of_n_is_averaged_over_every_choice_of_n(n: int) -> None:
    answers = [(0.3, 5.0), (-1.0, 2.0), (2.0, 1.0), (0.9, 7.0), (0.1, -4.0)]
    chosen = [max(choice)[1] for choice in combinations(answers, n)]
    judged, true = torch.tensor(answers, dtype=torch.float64).T
    found = expected_choice(judged, true, n=n)
    assert found.item() == pytest.approx(sum(chosen) / len(chosen))


@pytest.mark.parametrize("n", [0, 4])
def test_the_best_of_more_answers_than_there_are_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"best of {n} cannot be told from 3"):
        expected_best(torch.zeros(2, 3), n=n)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_kl_of_the_best_of_n_bounds_that_of_many_answers_closely(n: int) -> None:
    # The best of n out of M equally likely answers is answer i with (i^n - (i-1)^n) / M^n.
    many = 4000
    shares = [(i / many) ** n - ((i - 1) / many) ** n for i in range(1, many + 1)]
    exact = sum(share * math.log(share * many) for share in shares if share > 0)
    assert exact <= best_of_n_kl(n) + 1e-12
    assert exact == pytest.approx(best_of_n_kl(n), abs=1e-3)


def test_regret_is_what_the_choice_of_the_judge_falls_short_of() -> None:
    judged = torch.tensor([[1.0, 5.0, 2.0], [4.0, 4.0, 9.0], [0.0, 7.0, NAN], [NAN, NAN, NAN]])
    true = torch.tensor([[10.0, 4.0, 6.0], [3.0, 5.0, 99.0], [1.0, 2.0, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)
    # Chosen: the second; either of two that score alike; the best; nothing at all.
    assert selection_regret(judged, true, mask).tolist() == [6.0, 1.0, 0.0, 0.0]


def test_the_utility_of_a_rank_is_the_share_of_the_others_that_it_beats() -> None:
    ranks = torch.tensor([[1, 2, 2, 4], [3, 1, 2, 0], [1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    found = rank_utility(ranks, mask)
    assert found.tolist() == [[1.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.5, 0.0], [0.0] * 4]
    assert found.dtype == torch.float64


def test_a_tie_is_half_a_win() -> None:
    judged, other = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[1.0, 1.0], [3.0, 4.0]])
    assert win_rate(judged, other).item() == (0.5 + 1 + 0.5 + 0) / 4
    assert win_rate(judged, judged).item() == 0.5
    with pytest.raises(ValueError, match="differ"):
        win_rate(judged, other[0])
