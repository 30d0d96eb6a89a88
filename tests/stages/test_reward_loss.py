"""The ranking loss of stage 2 against separate passes of transformers, each answer read once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid

import stages.models.load
from stages import reward_model
from stages.models.probe import Verdict
from stages.runtime.reporter import SilentReporter
from tests.stages.project import RANKINGS, Project, ids_of, many_answers, rankings, still
from tests.stages.results import Scored, assert_equal, rows, scored_by_hand, weights

QUIET = SilentReporter()


def log_loss(difference: float) -> float:
    return float(-logsigmoid(torch.tensor(difference, dtype=torch.float64)))


def loss_by_hand(
    table: Scored,
    *,
    ties: str = "drop",
    denominator: str = "pairs",
    reduction: str = "prompt_mean",
    margin: Any = lambda better, worse: 0.0,
    center: float = 0.0,
) -> float:
    """The loss of Ouyang et al. 2022, Eq. 1, pair by pair."""
    sums, sizes = [], []
    for answers in table:
        total = count = 0.0
        for (a, i), (b, j) in combinations(answers, 2):
            squares = center * (a + b) ** 2
            if i != j:
                (high, best), (low, worst) = sorted([(a, i), (b, j)], key=lambda pair: pair[1])
                total += log_loss(high - low - margin(best, worst)) + squares
                count += 1
            elif ties == "half":
                total += 0.5 * (log_loss(a - b) + log_loss(b - a)) + squares
                count += 1
        if count:
            sums.append(total)
            sizes.append(count if denominator == "pairs" else math.comb(len(answers), 2))
    if reduction == "pair_mean":
        return sum(sums) / sum(sizes)
    return float(np.mean([total / size for total, size in zip(sums, sizes, strict=True)]))


def test_accuracy_reaches_1_on_three_separable_prompts(project: Project) -> None:
    project.write("rankings.jsonl", rankings(RANKINGS[:3]))
    result = reward_model.run(
        project.config("reward_model", train__max_steps=60, train__schedule="constant"), QUIET
    )
    assert result.metrics["reward_model/accuracy"] == 1.0
    for answers in scored_by_hand("runs/reward_model/model", RANKINGS[:3]):
        for (a, i), (b, j) in permutations(answers, 2):
            assert not (i < j and a <= b)


@pytest.mark.parametrize("ties", ["drop", "half"])
@pytest.mark.parametrize("denominator", ["pairs", "choose2"])
@pytest.mark.parametrize("reduction", ["prompt_mean", "pair_mean"])
def test_the_loss_of_a_step_is_eq_1_on_separate_forward_passes(
    project: Project, ties: str, denominator: str, reduction: str
) -> None:
    options = {"ties": ties, "denominator": denominator, "reduction": reduction}
    config = still(
        project,
        **{f"ranking.{name}": value for name, value in options.items()},
        **{"ranking.center_coef": 0.01},
    )
    reward_model.run(config, QUIET)
    table = scored_by_hand("runs/reward_model/model")
    expected = loss_by_hand(table, center=0.01, **options)
    assert rows("runs/reward_model")[0]["loss/ranking"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("margin", "by_hand"),
    [(0.7, lambda i, j: 0.7), ({"per_rank": 0.3}, lambda i, j: 0.3 * (j - i))],
    ids=["number", "per_rank"],
)
def test_a_margin_widens_the_distance_of_strict_pairs_only(
    project: Project, margin: Any, by_hand: Any
) -> None:
    reward_model.run(still(project, **{"ranking.margin": margin, "ranking.ties": "half"}), QUIET)
    table = scored_by_hand("runs/reward_model/model")
    expected = loss_by_hand(table, ties="half", margin=by_hand)
    assert rows("runs/reward_model")[0]["loss/ranking"] == pytest.approx(expected, rel=1e-9)


def test_margins_of_the_data_come_from_the_line_or_from_the_scores(project: Project) -> None:
    project.write(
        "rankings.jsonl",
        [
            {
                "prompt": "ab:",
                "margin": 1.5,
                "responses": [{"text": "cd", "rank": 1}, {"text": "e", "rank": 2}],
            },
            {
                "prompt": "b:",
                "responses": [{"text": "cd", "score": 0.5}, {"text": "a", "score": 3.0}],
            },
        ],
    )
    reward_model.run(still(project, **{"ranking.margin": "data"}), QUIET)
    records = [
        {"prompt": "ab:", "responses": [("cd", 1), ("e", 2)]},
        {"prompt": "b:", "responses": [("a", 1), ("cd", 2)]},
    ]
    (first, second) = scored_by_hand("runs/reward_model/model", records)
    losses = [
        log_loss(first[0][0] - first[1][0] - 1.5),
        log_loss(second[0][0] - second[1][0] - 2.5),
    ]
    expected = float(np.mean(losses))
    assert rows("runs/reward_model")[0]["loss/ranking"] == pytest.approx(expected, rel=1e-9)


def test_accuracy_and_margin_of_a_step_are_means_over_its_strict_pairs(project: Project) -> None:
    reward_model.run(still(project), QUIET)
    gaps = [
        a - b
        for answers in scored_by_hand("runs/reward_model/model")
        for (a, i), (b, j) in permutations(answers, 2)
        if i < j
    ]
    row = rows("runs/reward_model")[0]
    assert row["reward_model/margin"] == pytest.approx(float(np.mean(gaps)), rel=1e-9)
    assert row["reward_model/accuracy"] == np.mean([gap > 0 for gap in gaps])


@contextmanager
def tokens_read(vocabulary: int) -> Iterator[list[tuple[int, int]]]:
    """The shape of every input of a token embedding: what really passes through the backbone."""
    seen: list[tuple[int, int]] = []

    def hook(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.Embedding) and module.num_embeddings == vocabulary:
            seen.append(tuple(inputs[0].shape))

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("mode", ["tree", "packed", "padded"])
def test_invariant_7_k_answers_are_read_once_each_however_many_pairs(
    project: Project, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    verdict = Verdict(mode, mode != "padded")
    monkeypatch.setattr(stages.models.load, "verdict_of", lambda config: verdict)
    records = many_answers()
    project.write("rankings.jsonl", rankings(records))
    vocabulary = len(weights("base")["model.embed_tokens.weight"])
    with tokens_read(vocabulary) as seen:
        reward_model.run(still(project, **{"train.batch_size": 8}), QUIET)
    prompts = [len(ids_of(r["prompt"])) for r in records]
    answers = [[len(ids_of(t, end=True)) for t, _ in r["responses"]] for r in records]
    counts = [len(lengths) for lengths in answers]
    assert sorted(counts) == [2, 3, 4, 5, 6, 7, 8, 9]
    total = sum(map(sum, answers))
    if mode == "tree":
        assert seen == [(1, total + sum(prompts))]
    elif mode == "packed":
        assert seen == [(1, total + int(np.dot(prompts, counts)))]
    else:
        longest = max(p + max(a) for p, a in zip(prompts, answers, strict=True))
        assert seen == [(sum(counts), longest)]
    expected = loss_by_hand(scored_by_hand("runs/reward_model/model", records))
    assert rows("runs/reward_model")[0]["loss/ranking"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("reduction", ["prompt_mean", "pair_mean"])
def test_invariant_5_the_token_budget_changes_neither_losses_nor_weights(
    project: Project, reduction: str
) -> None:
    project.write("rankings.jsonl", rankings(many_answers()))
    found = []
    for budget in (1, 60, 100_000):
        config = project.config(
            "reward_model",
            output=f"runs/{budget}",
            train__batch_size=5,
            train__tokens_per_micro_batch=budget,
            ranking__reduction=reduction,
        )
        reward_model.run(config, QUIET)
        found.append((rows(f"runs/{budget}"), weights(f"runs/{budget}/model")))
    assert_equal(found[0], found[2], rtol=1e-10)
    assert_equal(found[1], found[2], rtol=1e-10)


def test_dropout_is_off_in_reward_training(project: Project) -> None:
    project.model("gpt2", "gpt2", dropout=0.4, dtype=torch.float64)
    reward_model.run(still(project, model="gpt2"), QUIET)
    expected = loss_by_hand(scored_by_hand("runs/reward_model/model"))
    assert rows("runs/reward_model")[0]["loss/ranking"] == pytest.approx(expected, rel=1e-9)
