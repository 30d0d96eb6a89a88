"""Stage 3: it learns what is rewarded, counts as its config says, and tells what it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stages import ppo
from stages.runtime.reporter import SilentReporter
from tests.stages.project import END_ID, PROMPTS, Listener, Project, ids_of, score_token
from tests.stages.results import (
    assert_equal,
    classifier,
    identity,
    policy,
    raw_score,
    rows,
    run_json,
    samples,
    weights,
)
from tests.stages.watch import watch_steps

QUIET = SilentReporter()

METRICS = {
    "objective/kl",
    "objective/kl_coef",
    "objective/score",
    "objective/reward",
    "policy/ratio",
    "policy/ratio_first",
    "policy/clip_fraction",
    "policy/approx_kl_k1",
    "policy/approx_kl_k2",
    "policy/approx_kl_k3",
    "policy/entropy",
    "value/explained_variance",
    "value/clip_fraction",
    "loss/policy",
    "loss/value",
    "optim/lr",
    "optim/grad_norm_policy",
    "optim/grad_norm_critic",
    "rollout/response_length_mean",
    "rollout/response_length_min",
    "rollout/response_length_max",
    "rollout/ended",
    "rollout/cut",
    "rollout/empty",
}
TIMES = {"time/rollout", "time/score", "time/train"}
PTX = {"loss/ptx", "optim/grad_norm_ptx"}


def probability(folder: str, prompt: str, token: int) -> float:
    with torch.no_grad():
        logits = policy(folder)(input_ids=torch.tensor([ids_of(prompt)])).logits[0, -1]
    return float(logits.softmax(-1)[token])


def test_the_probability_of_the_only_rewarded_token_rises_to_almost_1(project: Project) -> None:
    token = ids_of("q")[0]
    reward = score_token(project, "likes_q", token, score=4.0)
    config = project.config(
        "ppo",
        train__total_episodes=64 * 15,
        train__batch_size=32,
        train__schedule="constant",
        train__learning_rate=4e-2,
        train__precision="fp32",
        **{"reward.path": reward, "rollout.batch_size": 64, "rollout.max_new_tokens": 1},
    )
    result = ppo.run(config, QUIET)
    scores = [row["objective/score"] for row in rows("runs/ppo", "train")]
    for record in PROMPTS:
        before = probability("base", record["prompt"], token)
        after = probability("runs/ppo/model", record["prompt"], token)
        assert before < 0.5 < 0.9 < after
    assert scores[0] < 2.0 < 3.6 < scores[-1]
    assert result.metrics["objective/kl"] > 0.5


def test_a_large_kl_coefficient_holds_the_policy_at_its_reference(project: Project) -> None:
    reward = score_token(project, "likes_q", ids_of("q")[0], score=4.0)
    found = {}
    for coef in (0.0, 20.0):
        config = project.config(
            "ppo",
            train__total_episodes=64 * 12,
            train__batch_size=64,
            train__precision="fp32",
            output=f"runs/{coef}",
            **{
                "reward.path": reward,
                "rollout.batch_size": 64,
                "rollout.max_new_tokens": 1,
                "kl.coef": coef,
            },
        )
        found[coef] = ppo.run(config, QUIET).metrics["objective/kl"]
    assert found[20.0] < 0.2 * found[0.0]


def test_every_metric_of_the_stage_is_in_the_rows(project: Project) -> None:
    project.write("held_out.jsonl", [{"prompt": "fa:"}, {"prompt": "gab:"}])
    changes = {"data.eval": "held_out.jsonl", "ptx.data": "documents.jsonl", "ptx.coef": 0.1}
    ppo.run(project.config("ppo", **changes), QUIET)
    for row in rows("runs/ppo", "train", timed=True):
        assert row.keys() >= (METRICS | TIMES | PTX)
        assert {"kind", "step", "iteration", "records", "seconds"} <= row.keys()
    evaluations = rows("runs/ppo", "eval")
    assert [row["iteration"] for row in evaluations] == [0, 2]
    for row in evaluations:
        assert {"eval/score", "eval/kl", "eval/response_length_mean"} <= row.keys()
    assert evaluations[0]["eval/kl"] == 0.0


def test_a_row_is_the_mean_over_the_steps_of_its_iteration(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    ppo.run(project.config("ppo", **{"ppo.epochs": 2, "train.batch_size": 4}), QUIET)
    found = rows("runs/ppo", "train")
    assert [row["step"] for row in found] == [4, 8]
    assert [row["records"] for row in found] == [6, 12]
    assert [len(step.rows) for step in seen] == [4, 2] * 4
    for n, row in enumerate(found):
        figures = [step.figures for step in seen[4 * n : 4 * n + 4]]
        for name in ("loss/policy", "loss/value", "policy/ratio", "optim/lr"):
            assert row[name] == pytest.approx(np.mean([f[name] for f in figures if f]), rel=1e-12)
        assert row["policy/ratio_first"] == pytest.approx(1.0, abs=1e-9)


def test_an_epoch_of_minibatches_takes_every_answer_once(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    ppo.run(project.config("ppo", **{"ppo.epochs": 2, "train.batch_size": 4}), QUIET)
    for n in range(0, 8, 2):
        assert sorted(seen[n].rows + seen[n + 1].rows) == [0, 1, 2, 3, 4, 5]
    assert seen[0].rows + seen[1].rows != seen[2].rows + seen[3].rows


def test_samples_hold_the_score_that_transformers_gives_to_their_ids(project: Project) -> None:
    """The reward model scores an answer alike alone and inside a rollout."""
    config = project.folder / "reward" / "config.json"
    config.write_text(config.read_text().replace("{", '{"mean": 0.5, "std": 2.0,', 1))
    ppo.run(project.config("ppo"), QUIET)
    model, found = classifier("reward"), samples("runs/ppo")
    assert [sample["iteration"] for sample in found] == [1] * 6 + [2] * 6
    for sample in found:
        raw = raw_score(model, ids_of(sample["prompt"]) + sample["response_ids"])
        assert sample["score"] == pytest.approx((raw - 0.5) / 2.0, rel=1e-9)
        assert sample["ended"] == (sample["response_ids"][-1] == END_ID)
        text = [token for token in sample["response_ids"] if token > 3]
        assert ids_of(sample["response"]) == text
    mean = np.mean([sample["score"] for sample in found[:6]])
    assert rows("runs/ppo")[0]["objective/score"] == pytest.approx(mean, rel=1e-9)


def test_episodes_are_rounded_up_to_whole_rollouts(project: Project) -> None:
    result = ppo.run(project.config("ppo", train__total_episodes=13), QUIET)
    assert result.step == 6
    assert run_json("runs/ppo")["iteration"] == 3
    assert rows("runs/ppo")[-1]["records"] == 18


def test_by_default_the_prompts_are_passed_over_once(project: Project) -> None:
    config = project.config("ppo", train__total_episodes=None, **{"rollout.batch_size": 2})
    ppo.run(config, QUIET)
    assert run_json("runs/ppo")["iteration"] == 3
    shown = [sample["prompt"] for sample in samples("runs/ppo")]
    assert len(set(shown)) == len(shown)


def test_fewer_prompts_than_a_rollout_are_answered_again_with_other_noise(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("prompts.jsonl", PROMPTS[:2])
    seen = watch_steps(monkeypatch)
    ppo.run(project.config("ppo"), QUIET)
    rollout = seen[0].rollout
    prompts = [tuple(ids) for ids in rollout.prompts]
    assert len(set(prompts)) == 2
    assert all(prompts.count(prompt) == 3 for prompt in prompts)
    answers = {tuple(answer) for answer in rollout.answers}
    assert len(answers) > 2


def test_max_steps_may_end_a_run_inside_an_iteration(project: Project) -> None:
    result = ppo.run(project.config("ppo", train__max_steps=3), QUIET)
    assert result.step == 3
    assert [row["step"] for row in rows("runs/ppo", "train")] == [2, 3]
    assert_equal(weights("runs/ppo/model"), weights("runs/ppo/checkpoints/step-000003"))


def test_a_minibatch_larger_than_the_rollout_is_the_rollout(project: Project) -> None:
    assert ppo.run(project.config("ppo", train__batch_size=100), QUIET).step == 2


@pytest.mark.parametrize("preset", ["walkthrough", "instructgpt"])
def test_a_preset_runs_on_a_tiny_model(project: Project, preset: str) -> None:
    changes: dict[str, Any] = {"preset": preset, "train.total_episodes": 6}
    if preset == "instructgpt":
        changes |= {"ptx.data": "documents.jsonl", "ptx.ratio": 2, "train.learning_rate": 1e-5}
    listener = Listener()
    ppo.run(project.config("ppo", **changes), listener)
    row = rows("runs/ppo", "train")[0]
    if preset == "walkthrough":
        assert row["objective/kl_coef"] == 0.1
        assert not (project.folder / "runs/ppo/model_ema").exists()
    else:
        assert row["objective/kl_coef"] == 0.02
        assert row["optim/lr"] < 2e-6, "the first of 80 warm-up steps is at a tenth of the peak"
        assert "loss/ptx" in row
        assert (project.folder / "runs/ppo/model_ema").exists()
        assert any("does not print" in note for note in listener.notes)


def test_policy_and_critic_are_folders_that_transformers_loads(project: Project) -> None:
    ppo.run(project.config("ppo", train__ema_decay=0.5), QUIET)
    for name, kind, load in (
        ("model", "policy", policy),
        ("model_ema", "policy", policy),
        ("critic", "critic", classifier),
    ):
        folder = f"runs/ppo/{name}"
        load(folder)
        assert identity(folder)["kind"] == kind
    assert not torch.equal(
        weights("runs/ppo/model")["lm_head.weight"], weights("base")["lm_head.weight"]
    )
