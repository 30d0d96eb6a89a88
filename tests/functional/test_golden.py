"""Every golden case, in both precisions, as it is and padded further on either side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .adapters import ADAPTERS
from .golden import DTYPES, FOLDER, Case, padded, paddings_of, read_suites, run

SUITES = {
    *("whitening", "sft", "ranking_loss", "logprobs_entropy_kl", "reward_shaping", "gae"),
    *("policy_loss", "value_loss", "controllers_and_totals", "ppo_step", "seed_snippet"),
    *("preference_losses", "group_losses"),
}
CASES = read_suites()


def _runs() -> Iterator[object]:
    for cases in CASES.values():
        for case in cases:
            for precision in DTYPES:
                for padding in paddings_of(case):
                    yield pytest.param(
                        case, precision, padding, id=f"{case.id}-{precision}-{padding}"
                    )


@pytest.mark.parametrize(("case", "precision", "padding"), list(_runs()))
def test_case_gives_its_numbers(case: Case, precision: str, padding: str) -> None:
    assert case.expected, f"{case.id} expects nothing"
    assert run(padded(case, padding), ADAPTERS, precision) == []


@pytest.mark.parametrize("suite", sorted(CASES))
def test_suite_is_known(suite: str) -> None:
    assert suite in SUITES


def test_folder_holds_cases() -> None:
    assert CASES, f"no case files in {FOLDER}"
