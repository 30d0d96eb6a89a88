"""The scores of a reward model: their offset and scale, the head, held-out figures."""

from __future__ import annotations

import json
import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from stages import pairs, reward_model
from stages.batch import Group
from stages.models.load import load_reward
from stages.runtime.reporter import SilentReporter
from tests.families import arithmetic
from tests.stages.project import Listener, Project, ids_of, many_answers, rankings, still
from tests.stages.results import (
    assert_equal,
    classifier,
    identity,
    raw_score,
    rows,
    run_json,
    scored_by_hand,
    weights,
)

QUIET = SilentReporter()


def test_invariant_8_demonstrations_average_0_in_fp32(project: Project) -> None:
    config = project.config(
        "reward_model",
        train__precision="fp32",
        **{"normalise.demonstrations": "demonstrations.jsonl"},
    )
    reward_model.run(config, QUIET)
    folder = "runs/reward_model/model"
    told = identity(folder)
    model = classifier(folder).float()
    lines = (project.folder / "demonstrations.jsonl").read_text().splitlines()
    assert len(lines) == 5
    found = [
        (raw_score(model, ids_of(r["prompt"]) + ids_of(r["response"], end=True)) - told["mean"])
        for r in map(json.loads, lines)
    ]
    assert abs(np.mean(found)) <= 1e-5
    assert np.std(found) > 1e-3
    assert told["std"] == 1.0
    assert told["normalised_on"] == "demonstrations.jsonl"


def test_without_a_file_the_best_ranked_answers_average_0(project: Project) -> None:
    listener = Listener()
    reward_model.run(project.config("reward_model"), listener)
    folder = "runs/reward_model/model"
    best = [min(answers, key=lambda pair: pair[1])[0] for answers in scored_by_hand(folder)]
    assert np.mean(best) - identity(folder)["mean"] == pytest.approx(0.0, abs=1e-9)
    assert any("best-ranked answers" in note for note in listener.notes)
    config = classifier(folder).config
    assert (config.mean, config.std) == (identity(folder)["mean"], 1.0)


def test_samples_of_the_reference_get_mean_0_and_std_1(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[int]] = []
    real = reward_model.Normaliser._samples

    def sampled(self: Any) -> Any:
        found = real(self)
        measured.extend(example.ids.tolist() for example in found)
        return found

    monkeypatch.setattr(reward_model.Normaliser, "_samples", sampled)
    changes = {"normalise.on": "reference", "normalise.samples": 10, "normalise.max_new_tokens": 6}
    reward_model.run(project.config("reward_model", **changes), QUIET)
    told = identity("runs/reward_model/model")
    model = classifier("runs/reward_model/model")
    found = [(raw_score(model, ids) - told["mean"]) / told["std"] for ids in measured]
    assert len(found) == 10
    assert np.mean(found) == pytest.approx(0.0, abs=1e-9)
    assert np.std(found) == pytest.approx(1.0, rel=1e-9)
    assert [parent["role"] for parent in run_json("runs/reward_model")["parents"]] == [
        "model",
        "policy",
    ]


def test_without_normalisation_the_score_is_the_heads_output(project: Project) -> None:
    reward_model.run(project.config("reward_model", **{"normalise.on": "none"}), QUIET)
    told = identity("runs/reward_model/model")
    assert (told["mean"], told["std"], told["normalised_on"]) == (0.0, 1.0, "none")


def test_the_fresh_head_is_normal_with_variance_1_over_d_plus_1(project: Project) -> None:
    found = []
    for seed in range(3):
        reward_model.run(still(project, seed=seed, output=f"runs/{seed}"), QUIET)
        found.append(weights(f"runs/{seed}/model")["score.weight"])
    width = found[0].shape[1]
    assert found[0].shape == (1, width)
    assert not torch.equal(found[0], found[1])
    spread = float(torch.cat(found).square().mean()) * (width + 1)
    assert 0.5 < spread < 2.0


def test_a_reward_model_goes_on_with_its_own_head(project: Project) -> None:
    reward_model.run(project.config("reward_model", output="runs/first"), QUIET)
    reward_model.run(still(project, model="runs/first", output="runs/second"), QUIET)
    assert_equal(weights("runs/second/model"), weights("runs/first/model"))
    reward_model.run(
        still(
            project,
            model="runs/first",
            output="runs/third",
            **{"normalise.on": "demonstrations"},
        ),
        QUIET,
    )
    assert identity("runs/third/model")["mean"] == pytest.approx(
        identity("runs/first/model")["mean"], rel=1e-9
    )


def test_the_saved_model_scores_in_transformers_as_in_the_tool(project: Project) -> None:
    from stages.batch import Example, pack
    from stages.models.forward import scores
    from stages.models.load import Loading

    reward_model.run(project.config("reward_model"), QUIET)
    folder = "runs/reward_model/model"
    network = load_reward("runs/reward_model", Loading(arithmetic()))
    model = classifier(folder)
    texts = [ids_of("ab:") + ids_of("cd", end=True), ids_of("b:eeee"), ids_of("cab:", end=True)]
    examples = [Example(np.array(ids), np.empty(0, np.int64)) for ids in texts]
    ours = scores(network, pack(examples)).tolist()
    told = identity(folder)
    theirs = [(raw_score(model, ids) - told["mean"]) / told["std"] for ids in texts]
    assert ours == pytest.approx(theirs, rel=1e-9)
    width = max(map(len, texts))
    padded = torch.tensor([ids + [told["pad_id"]] * (width - len(ids)) for ids in texts])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in texts])
    with torch.no_grad():
        batch = model(input_ids=padded, attention_mask=mask).logits[:, 0]
    assert ((batch - told["mean"]) / told["std"]).tolist() == pytest.approx(theirs, rel=1e-9)


def group(lengths: list[int], ranks: list[int]) -> Group:
    return Group(np.arange(2), tuple(np.arange(n) for n in lengths), tuple(ranks))


def test_held_out_figures_are_those_of_a_hand_made_table() -> None:
    held_out = [group([3, 5], [1, 2]), group([4, 2, 2], [1, 2, 2]), group([1, 1], [2, 2])]
    tables = [np.array([1.0, 1.5]), np.array([2.0, 0.0, 2.0]), np.array([0.0, 9.0])]
    found = pairs.judge(held_out, tables).figures
    # Strict pairs: -0.5 (the longer answer is worse), 2.0 and 0.0 (the longer answer is better).
    gaps = [-0.5, 2.0, 0.0]
    assert found["eval/accuracy"] == pytest.approx(1 / 3)
    assert found["eval/accuracy_k2"] == 0.0
    assert found["eval/accuracy_k3"] == pytest.approx(1 / 2)
    assert found["eval/margin"] == pytest.approx(0.5)
    assert found["eval/length_accuracy"] == pytest.approx(2 / 3)
    assert found["eval/loss"] == pytest.approx(np.mean([math.log1p(math.exp(-g)) for g in gaps]))
    # Confidences 0.622 (wrong), 0.881 (right), 0.5 (wrong), each in a bin of its own.
    confident = [1 / (1 + math.exp(-abs(g))) for g in gaps]
    assert found["eval/ece"] == pytest.approx(
        np.mean([confident[0], 1 - confident[1], confident[2]])
    )


def test_calibration_bins_hold_the_pairs_by_their_confidence() -> None:
    held_out = [group([3, 5], [1, 2]), group([4, 2, 2], [1, 2, 2])]
    tables = [np.array([1.0, 1.5]), np.array([2.0, 0.0, 2.0])]
    bins = pairs.judge(held_out, tables).bins
    assert [b["n"] for b in bins] == [1.0, 1.0, 1.0]
    assert [b["accuracy"] for b in bins] == [0.0, 0.0, 1.0]
    expected = [1 / (1 + math.exp(-gap)) for gap in (0.0, 0.5, 2.0)]
    assert [b["confidence"] for b in bins] == pytest.approx(expected)


def test_held_out_figures_of_a_run_are_those_of_its_model(project: Project) -> None:
    project.write("held_out.jsonl", rankings(many_answers()))
    changes = {"data.eval": "held_out.jsonl", "evaluate.every": 1}
    result = reward_model.run(project.config("reward_model", **changes), QUIET)
    evaluations = rows("runs/reward_model", "eval")
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3]
    assert result.selected is not None
    best = max(evaluations[1:], key=lambda row: row["eval/accuracy"])
    assert result.selected["value"] == best["eval/accuracy"]
    assert result.selected["step"] == best["step"]
    right: dict[int, list[bool]] = {}
    for answers in scored_by_hand("runs/reward_model/model", many_answers()):
        for (a, i), (b, j) in permutations(answers, 2):
            if i < j:
                right.setdefault(len(answers), []).append(a > b)
    for k, oks in right.items():
        assert best[f"eval/accuracy_k{k}"] == pytest.approx(np.mean(oks))
    assert best["eval/accuracy"] == pytest.approx(
        np.mean([ok for oks in right.values() for ok in oks])
    )


def test_the_averaged_reward_model_is_normalised_with_its_own_weights(project: Project) -> None:
    reward_model.run(project.config("reward_model", train__ema_decay=0.5), QUIET)
    found = {}
    for name in ("model", "model_ema"):
        folder = f"runs/reward_model/{name}"
        best = [min(answers, key=lambda pair: pair[1])[0] for answers in scored_by_hand(folder)]
        found[name] = identity(folder)["mean"]
        assert np.mean(best) - found[name] == pytest.approx(0.0, abs=1e-9)
    assert found["model"] != found["model_ema"]
