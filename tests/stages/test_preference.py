"""dpo, odpo, kto, orpo and simpo against separate passes of transformers, and as runs."""

from __future__ import annotations

import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from rlhf_cli.app import main
from stages import check, preference, references
from stages.config import InvalidConfig, to_yaml
from stages.errors import DataError, Interrupted, ResourceError
from stages.runtime import room
from stages.runtime.reporter import SilentReporter
from tests.stages.project import (
    METHODS,
    RANKINGS,
    Listener,
    Project,
    ids_of,
    many_answers,
    rankings,
)
from tests.stages.results import (
    assert_equal,
    left_behind,
    logps,
    policy,
    rows,
    run_json,
    weights,
)
from tests.stages.world import Job, start_world

QUIET = SilentReporter()
LABELLED = [
    {"prompt": "ab:", "response": "cd", "label": True},
    {"prompt": "b:", "response": "ba", "label": False},
    {"prompt": "cab:", "completion": "e", "label": True},
]
ROOT = Path(__file__).parents[2]


def moved(project: Project, stage: str, **changes: Any) -> tuple[dict[str, Any], Any, Any]:
    """The second of two whole-batch steps: its row, the policy it was taken of, the reference."""
    both = {"train.max_steps": 2, "train.schedule": "constant", "output": "second", **changes}
    first_of_both = project.config(stage, **{**both, "train.max_steps": 1, "output": "one"})
    preference.run(first_of_both, QUIET)
    preference.run(project.config(stage, **both), QUIET)
    return rows("second", "train")[1], policy("one/model"), policy("base")


def read(model: Any, prompt: str, text: str) -> tuple[float, int]:
    """log π of a whole answer by one pass of transformers alone, and its tokens."""
    asked, answer = ids_of(prompt), ids_of(text, end=True)
    return float(logps(model, asked + answer)[len(asked) - 1 :].sum()), len(answer)


def log_sigmoid(x: float) -> float:
    return float(logsigmoid(torch.tensor(x, dtype=torch.float64)))


def odds(mean: float) -> float:
    return mean - math.log(-math.expm1(mean))


def by_hand(stage: str, variant: str, new: Any, ref: Any) -> float:
    """The loss of all RANKINGS, pair by pair, each answer read alone."""
    prompts = []
    for record in RANKINGS:
        answers = []
        for text, rank in record["responses"]:
            (lp, tokens), (lp_ref, _) = (read(m, record["prompt"], text) for m in (new, ref))
            answers.append((lp, tokens, lp - lp_ref, rank))
        pairs = [(a, b) for a, b in permutations(answers, 2) if a[3] < b[3]]
        prompts.append(float(np.mean([pair_loss(stage, variant, a, b) for a, b in pairs])))
    return float(np.mean(prompts))


def pair_loss(stage: str, variant: str, a: Any, b: Any) -> float:
    gap = a[2] - b[2]
    if variant == "length":
        gap = a[2] / a[1] - b[2] / b[1]
    mean_a, mean_b = a[0] / a[1], b[0] / b[1]
    if stage == "orpo":
        return -mean_a - 0.1 * log_sigmoid(odds(mean_a) - odds(mean_b))
    if stage == "simpo":
        return -log_sigmoid(2.0 * (mean_a - mean_b) - 1.0)
    if stage == "odpo":
        return -log_sigmoid(0.1 * gap - math.log(b[3] - a[3]))
    if variant == "ipo":
        return (gap - 5.0) ** 2
    if variant == "hinge":
        return max(0.0, 1 - 0.1 * gap)
    if variant == "smoothed":
        return -0.8 * log_sigmoid(0.1 * gap) - 0.2 * log_sigmoid(-0.1 * gap)
    return -log_sigmoid(0.1 * gap)


VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("dpo", "sigmoid"): {},
    ("dpo", "live"): {"dpo.reference_logps": "live"},
    ("dpo", "smoothed"): {"dpo.label_smoothing": 0.2},
    ("dpo", "ipo"): {"dpo.loss": "ipo"},
    ("dpo", "hinge"): {"dpo.loss": "hinge"},
    ("dpo", "length"): {"dpo.length_normalised": True},
    ("odpo", "rank"): {},
    ("orpo", ""): {},
    ("simpo", ""): {},
}


@pytest.mark.parametrize(("stage", "variant"), VARIANTS)
def test_the_loss_of_a_step_is_that_of_separate_forward_passes(
    project: Project, stage: str, variant: str
) -> None:
    row, new, ref = moved(project, stage, **VARIANTS[stage, variant])
    assert row["loss/preference"] == pytest.approx(by_hand(stage, variant, new, ref), rel=1e-9)


def test_the_loss_of_kto_is_that_of_separate_passes_and_of_mismatched_prompts(
    project: Project,
) -> None:
    project.write("labelled.jsonl", LABELLED[:2])
    changes = {"data.train": "labelled.jsonl", "kto.undesirable_weight": 1.33}
    row, new, ref = moved(project, "kto", **changes)

    def ratio(prompt: str, text: str) -> float:
        return read(new, prompt, text)[0] - read(ref, prompt, text)[0]

    point = max(0.0, (ratio("ab:", "ba") + ratio("b:", "cd")) / 2)
    good, bad = ratio("ab:", "cd"), ratio("b:", "ba")
    sigmoid = [1 / (1 + math.exp(-0.1 * (x - point))) for x in (good, bad)]
    expected = ((1 - sigmoid[0]) + 1.33 * sigmoid[1]) / 2
    assert row["loss/preference"] == pytest.approx(expected, rel=1e-9)
    assert row["preference/kl"] == pytest.approx(point, rel=1e-9, abs=1e-12)
    assert row["preference/reward_chosen"] == pytest.approx(0.1 * good, rel=1e-9)


def test_invariant_14_dpo_begins_at_ln_2_and_kto_at_half_the_weight(project: Project) -> None:
    expected = {"dpo": math.log(2), "kto": 0.5}
    for stage, loss in expected.items():
        preference.run(project.config(stage), QUIET)
        assert rows(f"runs/{stage}", "train")[0]["loss/preference"] == pytest.approx(loss, rel=1e-9)


def test_plackett_luce_of_two_answers_is_dpo(project: Project) -> None:
    project.write("rankings.jsonl", rankings(RANKINGS[2:3]))
    for loss in ("sigmoid", "plackett_luce"):
        preference.run(project.config("dpo", **{"dpo.loss": loss, "output": loss}), QUIET)
    assert_equal(rows("plackett_luce"), rows("sigmoid"), rtol=1e-9)
    assert_equal(weights("plackett_luce/model"), weights("sigmoid/model"), rtol=1e-9)


def test_k_answers_are_read_once_each_however_many_pairs(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("rankings.jsonl", rankings(many_answers()))
    seen: list[int] = []
    real = nn.Embedding.forward

    def forward(self: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.numel())
        return real(self, ids)

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    for stage in ("dpo", "simpo"):
        seen.clear()
        config = project.config(stage, **{"train.max_steps": 1, "train.batch_size": 64})
        preference.run(config, QUIET)
        tokens = sum(
            len(ids_of(r["prompt"])) + sum(len(ids_of(t, end=True)) for t, _ in r["responses"])
            for r in many_answers()
        )
        once = 2 if stage == "dpo" else 1  # the reference reads them too, in its one pass
        assert sum(n for n in seen if n > 4) >= once * tokens
        assert seen.count(tokens) == once


@pytest.mark.parametrize("stage", METHODS)
def test_a_run_raises_its_accuracy_and_leaves_a_policy(project: Project, stage: str) -> None:
    project.write("three.jsonl", rankings(RANKINGS[:3]))
    changes: dict[str, Any] = {
        "data.train": "three.jsonl",
        "data.eval": "three.jsonl",
        "train.max_steps": 24,
    }
    changes["evaluate.every"] = 12
    config = project.config(stage, **changes, **{"train.schedule": "constant"})
    result = preference.run(config, QUIET)
    assert result.metrics["preference/accuracy"] == 1.0
    assert result.metrics["preference/margin"] > 0
    assert run_json(config.output)["selected"]["by"] == (
        "eval/loss" if stage in ("kto", "orpo") else "eval/accuracy"
    )
    assert policy(f"{config.output}/model").config.model_type == "llama"


@pytest.mark.parametrize("stage", METHODS)
def test_a_run_that_the_disk_cannot_hold_ends_before_anything_is_written(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_disk", lambda folder: 0)
    config = project.config(stage)
    with pytest.raises(ResourceError, match="MiB are needed for models and training"):
        preference.run(config, QUIET)
    assert not Path(config.output, "run.json").exists()


@pytest.mark.parametrize("stage", METHODS)
def test_invariant_12_a_stop_and_resume_leave_no_trace(project: Project, stage: str) -> None:
    changes = {
        "data.eval": "rankings.jsonl",
        "evaluate.every": 2,
        "train.batch_size": 3,
        "train.max_steps": 4,
        "train.ema_decay": 0.9,
    }
    preference.run(project.config(stage, **changes, output="whole"), QUIET)
    config = project.config(stage, **changes, output="parts")
    with pytest.raises(Interrupted):
        preference.run(config, Listener(stop_at=2))
    preference.run(config, QUIET, resume=True)
    assert_equal(left_behind("parts"), left_behind("whole"))


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_the_token_budget_changes_neither_losses_nor_weights(project: Project, stage: str) -> None:
    for name, budget in (("whole", 8192), ("cut", 1)):
        changes = {"train.tokens_per_micro_batch": budget, "output": name}
        preference.run(project.config(stage, **changes, **{"data.eval": "rankings.jsonl"}), QUIET)
    drop = {"time/tokens_per_second"}
    cut, whole = ([{k: v for k, v in r.items() if k not in drop} for r in rows(n)]
                  for n in ("cut", "whole"))  # fmt: skip
    assert_equal(cut, whole, rtol=1e-9)
    assert_equal(weights("cut/model"), weights("whole/model"), rtol=1e-9)


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_with_adapters_the_reference_is_the_policy_without_them(
    project: Project, stage: str
) -> None:
    changes: dict[str, Any] = {"lora.rank": 2, "train.max_steps": 3}
    live = {"dpo.reference_logps": "live"} if stage == "dpo" else {}
    preference.run(project.config(stage, **changes, **live, output="shared"), QUIET)
    report = check.run(project.config(stage, **changes, **live), QUIET)
    assert report["models"]["reference"]["shares_the_weights_of"] == "model"
    assert report["memory"]["reference"] == {}
    assert Path("shared/adapter").is_dir()
    if stage == "dpo":
        preference.run(project.config(stage, **changes, output="cached"), QUIET)
        assert_equal(rows("shared"), rows("cached"), rtol=1e-9)


def test_what_the_reference_said_is_found_again_and_a_damaged_file_is_made_anew(
    project: Project,
) -> None:
    told = "the reference reads every answer once"
    for n, expected in enumerate((True, False, True)):
        if n == 2:
            (kept,) = Path("cache/references").glob("*.npz")
            kept.write_bytes(kept.read_bytes()[:-40])
        listener = Listener()
        preference.run(project.config("dpo", output=f"run{n}"), listener)
        assert (told in listener.notes) is expected
    assert_equal(weights("run1/model"), weights("run0/model"))
    assert_equal(weights("run2/model"), weights("run0/model"))
    project.write("rankings.jsonl", rankings(RANKINGS[:2]))
    preference.run(project.config("dpo", output="other"), QUIET)
    assert len(list(Path("cache/references").glob("*.npz"))) == 2


@pytest.mark.parametrize("stage", ["orpo", "simpo"])
def test_without_a_reference_none_is_loaded_nor_remembered(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    real = preference.load_policy
    monkeypatch.setattr(
        preference, "load_policy", lambda *a, **k: loaded.append(a[0]) or real(*a, **k)
    )
    monkeypatch.setattr(references, "remembered", None)
    preference.run(project.config(stage), QUIET)
    assert loaded == ["base"]
    assert not Path("cache/references").exists()


def test_kto_reads_a_ranking_as_answers_that_win_or_lose_more_often(project: Project) -> None:
    check.run(project.config("kto"), QUIET, dump="dump.jsonl")
    lines = [json.loads(line) for line in Path("dump.jsonl").read_text().splitlines()]
    # What stands in the middle of its ranking wins as often as it loses, and is left out.
    assert [(line["text"].removesuffix("<|end|>"), line["rank"]) for line in lines] == [
        *(("ab:cd", 1), ("ab:e", 2), ("b:d", 1), ("b:eeee", 2), ("cab:e", 2), ("cab:fg", 1)),
        *(("d:ab", 1), ("d:ba", 1), ("d:a", 2)),
    ]


def test_offsets_by_score_need_scores_that_agree_with_the_ranks(project: Project) -> None:
    score = {"odpo.offset": "score"}
    with pytest.raises(DataError, match="has not a score for every answer"):
        preference.run(project.config("odpo", **score), QUIET)
    answers = [{"text": "cd", "rank": 1, "score": 0.5}, {"text": "e", "rank": 2, "score": 0.7}]
    project.write("rankings.jsonl", [{"prompt": "ab:", "responses": answers}])
    with pytest.raises(DataError, match="no higher score") as caught:
        preference.run(project.config("odpo", **score), QUIET)
    assert caught.value.where == "rankings.jsonl:1"
    preference.run(project.config("odpo", **score, **{"odpo.scale": "identity"}), QUIET)
    loss = rows("runs/odpo", "train")[0]["loss/preference"]
    assert loss == pytest.approx(-log_sigmoid(0.2), rel=1e-9)


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo", "dpo", "odpo", "orpo", "simpo"])
def test_labelled_answers_are_refused_everywhere_else_with_an_explanation(
    project: Project, stage: str
) -> None:
    project.write("labelled.jsonl", LABELLED)
    with pytest.raises(DataError, match="an answer with a label") as caught:
        check.run(project.config(stage, **{"data.train": "labelled.jsonl"}), QUIET)
    assert "labelled answers train kto" in caught.value.do
    assert caught.value.where == "labelled.jsonl:1"


def test_kto_refuses_demonstrations(project: Project) -> None:
    with pytest.raises(DataError, match="where labelled answers are needed"):
        preference.run(project.config("kto", **{"data.train": "demonstrations.jsonl"}), QUIET)


@pytest.mark.parametrize(
    ("stage", "changes", "words"),
    [
        ("dpo", {"dpo.loss": "ipo", "dpo.label_smoothing": 0.1}, "is for loss: sigmoid"),
        ("dpo", {"dpo.loss": "plackett_luce", "ranking.ties": "half"}, "takes whole orders"),
        ("kto", {"train.batch_size": 1}, "2 or more"),
        ("dpo", {"dpo.beta": 0.0}, "above 0"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    project: Project, stage: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        project.config(stage, **changes)


@pytest.mark.parametrize("stage", METHODS)
def test_the_command_runs_on_the_sample_data(project: Project, stage: str) -> None:
    small = [
        "model=base",
        f"data.train={ROOT}/data_samples/rankings.jsonl",
        *("data.chat_template=chatml", "data.limit=6", "train.max_steps=1", "device=cpu"),
        *("data.max_response_tokens=64", "data.max_prompt_tokens=64", "data.overlong=truncate"),
    ]
    if stage == "odpo":
        small.append("odpo.offset=rank")
    assert main([stage, f"{ROOT}/configs/{stage}.yaml", *small, "--quiet"]) == 0
    assert (Path(f"runs/{stage}") / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_give_the_rows_and_weights_of_one(project: Project) -> None:
    changes = {"data.eval": "rankings.jsonl", "train.batch_size": 3}
    for stage in ("dpo", "kto"):
        config = project.config(stage, **changes, output=f"{stage}-two")
        Path(f"{stage}.yaml").write_text(to_yaml(config), encoding="utf-8")
    jobs = [Job([stage, f"{stage}.yaml", "--json"]) for stage in ("dpo", "kto")]
    child = start_world(project.folder, jobs)
    for stage in ("dpo", "kto"):
        preference.run(project.config(stage, **changes, output=f"{stage}-one"), QUIET)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    for stage in ("dpo", "kto"):
        assert_equal(rows(f"{stage}-two"), rows(f"{stage}-one"), rtol=1e-10)
        two, one = (weights(f"{stage}-{n}/model") for n in ("two", "one"))
        assert_equal(two, one, rtol=1e-8)
