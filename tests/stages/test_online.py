"""grpo, rloo, reinforce and online-dpo against separate passes of transformers, and as runs."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_cli import gates
from rlhf_cli.app import main
from stages import check, diagnosis, online
from stages.config import InvalidConfig, to_yaml
from stages.errors import Interrupted, ResourceError, TrainingError
from stages.runtime import room
from stages.runtime.reporter import SilentReporter
from tests.stages.project import (
    ONLINE,
    PROMPTS,
    Listener,
    Project,
    enter,
    ids_of,
    make_models,
    score_token,
)
from tests.stages.results import (
    assert_equal,
    classifier,
    left_behind,
    logps,
    policy,
    raw_score,
    rows,
    run_json,
    samples,
    weights,
)
from tests.stages.world import Job, start_world

QUIET = SilentReporter()
ROOT = Path(__file__).parents[2]
LOSS = dict.fromkeys(ONLINE, "loss/policy") | {"online_dpo": "loss/preference"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project in which every method ran, with averages, evaluations and two passes for grpo."""
    with pytest.MonkeyPatch.context() as patch:
        project = enter(tmp_path_factory.mktemp("online"), patch)
        make_models(project)
        for stage in ONLINE:
            online.run(full(project, stage), QUIET)
        yield project


def full(project: Project, stage: str, **changes: Any) -> Any:
    """A run with everything that has a state."""
    values: dict[str, Any] = {
        "data.eval": "prompts.jsonl",
        "evaluate.every": 2,
        "train.ema_decay": 0.9,
        "train.total_episodes": 24,
    }
    if stage == "grpo":
        values["grpo.epochs"] = 2
    if stage == "reinforce":
        values["reinforce.baseline"] = "moving_average"
    if stage in ("rloo", "reinforce"):
        values |= {"kl.controller": "adaptive", "kl.gain": 0.5, "kl.target": 0.05}
    return project.config(stage, **values, **changes)


@pytest.fixture
def inside(shared: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The shared project as the current folder, with data and models at hand."""
    monkeypatch.chdir(shared.folder)
    monkeypatch.setenv("RLHF_CACHE", str(shared.folder / "cache"))
    return shared


# By hand.

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"grpo.beta": 0.3}),
    "dr_grpo": ("grpo", {"grpo.beta": 0.3, "grpo.variant": "dr_grpo"}),
    "rloo": ("rloo", {"kl.coef": 0.4}),
    "batch_mean": ("reinforce", {"kl.coef": 0.4}),
    "none": ("reinforce", {"kl.coef": 0.4, "reinforce.baseline": "none"}),
    "online_dpo": ("online_dpo", {"online_dpo.beta": 0.7}),
}
"""Whole-batch steps: a name, its stage and its settings."""


def by_hand(name: str, each: int) -> float:
    """The loss of the answers of the second iteration, each read alone by transformers."""
    new, ref, judge = policy("one/model"), policy("base"), classifier("reward")
    found = []
    for sample in samples("second")[-8:]:
        asked, answer = ids_of(sample["prompt"]), sample["response_ids"]
        lp, lp_ref = (logps(m, asked + answer)[len(asked) - 1 :].numpy() for m in (new, ref))
        found.append((raw_score(judge, asked + answer), lp, lp_ref))
    groups = [found[n : n + each] for n in range(0, 8, each)]
    losses = {
        "grpo": lambda: [grpo_answer(g, i, 0.3) for g in groups for i in range(each)],
        "dr_grpo": lambda: [dr_grpo_answer(g, i, 0.3) for g in groups for i in range(each)],
        "rloo": lambda: [rloo_answer(g, i, 0.4) for g in groups for i in range(each)],
        "batch_mean": lambda: [reinforce_answer(found, i, 0.4, mean=True) for i in range(8)],
        "none": lambda: [reinforce_answer(found, i, 0.4, mean=False) for i in range(8)],
        "online_dpo": lambda: [pair(g, 0.7) for g in groups],
    }
    return float(np.mean(losses[name]()))


def k3(answer: Any) -> Any:
    _, lp, lp_ref = answer
    return np.exp(lp_ref - lp) - (lp_ref - lp) - 1


def grpo_answer(group: Any, i: int, beta: float) -> float:
    scores = [score for score, _, _ in group]
    advantage = (scores[i] - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-4)
    return float(np.mean(-advantage + beta * k3(group[i])))


def dr_grpo_answer(group: Any, i: int, beta: float) -> float:
    advantage = group[i][0] - np.mean([score for score, _, _ in group])
    return float(np.sum(-advantage + beta * k3(group[i]))) / 5  # rollout.max_new_tokens


def reward(answer: Any, coef: float) -> float:
    score, lp, lp_ref = answer
    return float(score - coef * (lp.sum() - lp_ref.sum()))


def rloo_answer(group: Any, i: int, coef: float) -> float:
    others = [reward(answer, coef) for j, answer in enumerate(group) if j != i]
    return float(-(reward(group[i], coef) - np.mean(others)) * group[i][1].sum())


def reinforce_answer(found: Any, i: int, coef: float, *, mean: bool) -> float:
    baseline = np.mean([reward(answer, coef) for answer in found]) if mean else 0.0
    return float(-(reward(found[i], coef) - baseline) * found[i][1].sum())


def pair(group: Any, beta: float) -> float:
    better, worse = sorted(group, key=lambda answer: -answer[0])
    gap = (better[1] - better[2]).sum() - (worse[1] - worse[2]).sum()
    return math.log1p(math.exp(-beta * gap))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_of_a_step_is_that_of_separate_forward_passes(project: Project, name: str) -> None:
    stage, changes = VARIANTS[name]
    changes = {**changes, "train.batch_size": 8, "train.schedule": "constant", "log.samples": 8}
    changes["rollout.stop"] = list("abcdefgh")  # answers of several lengths
    first = project.config(stage, **changes, output="one", **{"train.total_episodes": 8})
    online.run(first, QUIET)
    both = project.config(stage, **changes, output="second")
    online.run(both, QUIET)
    row = rows("second", "train")[1]
    assert row[LOSS[stage]] == pytest.approx(by_hand(name, both.per_prompt), rel=1e-9)
    assert row["objective/kl"] != 0
    assert row["policy/ratio"] == pytest.approx(1.0, abs=1e-9)
    told = samples("second")[-8:]
    assert len({len(sample["response_ids"]) for sample in told}) > 1
    for n in range(0, 8, both.per_prompt):
        assert len({sample["prompt"] for sample in told[n : n + both.per_prompt]}) == 1


@pytest.mark.parametrize("stage", ["grpo", "online_dpo"])
def test_invariant_14_where_the_policy_is_the_reference_the_kl_term_is_0(
    project: Project, stage: str
) -> None:
    online.run(project.config(stage, **{"train.learning_rate": 0.0, "log.samples": 8}), QUIET)
    for row in rows(f"runs/{stage}", "train"):
        assert row["objective/kl"] == pytest.approx(0, abs=1e-12)
        if stage == "grpo":
            assert row["policy/reference_kl"] == pytest.approx(0, abs=1e-12)
            assert row["loss/policy"] == pytest.approx(0, abs=1e-9)  # advantages average 0
        else:
            assert row["loss/preference"] == pytest.approx(math.log(2), rel=1e-12)


def test_the_moving_average_is_that_of_the_rollouts_before(inside: Project) -> None:
    found = rows("runs/reinforce", "train")
    mean = [row["objective/reward"] for row in found]
    expected = [mean[0], mean[0], 0.9 * mean[0] + 0.1 * mean[1]]
    assert [row["objective/baseline"] for row in found] == pytest.approx(expected, rel=1e-12)


# Runs.


def probability(folder: str, prompt: str, token: int) -> float:
    with torch.no_grad():
        logits = policy(folder)(input_ids=torch.tensor([ids_of(prompt)])).logits[0, -1]
    return float(logits.softmax(-1)[token])


@pytest.mark.parametrize("stage", ONLINE)
def test_the_only_rewarded_token_becomes_likely(project: Project, stage: str) -> None:
    token = ids_of("q")[0]
    changes = {
        "reward.path": score_token(project, "likes_q", token, score=4.0),
        "rollout.batch_size": 64,
        "rollout.max_new_tokens": 1,
        "train.total_episodes": 64 * 10,
        "train.batch_size": 32,
        "train.schedule": "constant",
        "train.learning_rate": 4e-2,
        "train.precision": "fp32",
    }
    online.run(project.config(stage, **changes), QUIET)
    scores = [row["objective/score"] for row in rows(f"runs/{stage}", "train")]
    assert scores[0] < 2.0 < 3.0 < scores[-1]
    for record in PROMPTS:
        before = probability("base", record["prompt"], token)
        assert before < 0.5 < probability(f"runs/{stage}/model", record["prompt"], token)


@pytest.mark.parametrize("stage", ONLINE)
def test_a_run_writes_every_metric_of_its_stage_and_no_other(inside: Project, stage: str) -> None:
    found = {name for row in rows(f"runs/{stage}", timed=True) for name in row if "/" in name}
    assert found == {*gates.names(stage), "score/model", "eval/score_model"}


@pytest.mark.parametrize("stage", ONLINE)
def test_a_run_leaves_a_policy_its_average_and_nothing_of_a_critic(
    inside: Project, stage: str
) -> None:
    folder = Path(f"runs/{stage}")
    assert policy(f"{folder}/model").config.model_type == "llama"
    assert not (folder / "critic").exists()
    assert not (folder / "last").exists()
    told = run_json(str(folder))
    assert told["selected"] == {"step": told["step"], "by": "last", "value": None}
    averaged, last = weights(folder / "model_ema"), weights(folder / "model")
    assert any(not torch.equal(averaged[name], last[name]) for name in last)


@pytest.mark.parametrize("stage", ONLINE)
def test_invariant_12_a_stop_within_an_iteration_leaves_no_trace(
    inside: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = full(inside, stage, output=f"parts/{stage}")
    with monkeypatch.context() as patch:
        stop_in_third_step(patch)
        with pytest.raises(Interrupted):
            online.run(config, QUIET)
    assert list(Path(config.output).rglob("rollout.safetensors"))
    online.run(config, QUIET, resume=True)
    assert_equal(left_behind(config.output), left_behind(f"runs/{stage}"))


def stop_in_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM inside an iteration."""
    real, calls = online.Criticless.step, [0]

    def step(self: online.Criticless, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    monkeypatch.setattr(online.Criticless, "step", step)


def test_a_stop_between_iterations_leaves_no_trace_either(inside: Project) -> None:
    config = full(inside, "reinforce", output="between")
    with pytest.raises(Interrupted):
        online.run(config, Listener(stop_at=2))
    online.run(config, QUIET, resume=True)
    assert_equal(left_behind("between"), left_behind("runs/reinforce"))


@pytest.mark.parametrize("stage", ["grpo", "online_dpo"])
def test_the_token_budget_changes_neither_losses_nor_weights(inside: Project, stage: str) -> None:
    config = full(inside, stage, output=f"cut/{stage}", **{"train.tokens_per_micro_batch": 1})
    online.run(config, QUIET)
    assert_equal(rows(config.output), rows(f"runs/{stage}"), rtol=1e-8, atol=1e-11)
    cut, whole = (weights(f"{folder}/{stage}/model") for folder in ("cut", "runs"))
    assert_equal(cut, whole, rtol=1e-8)


def test_answers_of_the_same_score_teach_nothing(project: Project) -> None:
    file = project.folder / "reward" / "model.safetensors"
    zero = load_file(file)
    zero["score.weight"].zero_()
    save_file(zero, file, metadata={"format": "pt"})
    for stage, changes in {"grpo": {"grpo.beta": 0.0}, "rloo": {"kl.coef": 0.0}}.items():
        online.run(project.config(stage, **changes), QUIET)
    online.run(project.config("online_dpo"), QUIET)
    for stage in ("grpo", "rloo", "online_dpo"):
        for row in rows(f"runs/{stage}", "train"):
            assert row["objective/frac_zero_std"] == 1.0
            assert row[LOSS[stage]] == pytest.approx(0, abs=1e-12)
            assert "preference/accuracy" not in row
        assert_equal(weights(f"runs/{stage}/model"), weights("base"), rtol=1e-9)


@pytest.mark.parametrize("stage", ONLINE)
def test_with_adapters_the_reference_is_the_policy_without_them(
    project: Project, stage: str
) -> None:
    config = project.config(stage, **{"lora.rank": 2})
    online.run(config, QUIET)
    report = check.run(project.config(stage, **{"lora.rank": 2, "output": "other"}), QUIET)
    assert list(report["models"]) == ["policy", "reference", "reward"]
    assert report["models"]["reference"]["shares_the_weights_of"] == "policy"
    assert report["memory"]["reference"] == {}
    assert (Path(config.output) / "adapter").is_dir()
    assert not (Path(config.output) / "adapter_critic").exists()
    first, *_ = rows(config.output, "train")
    assert first["objective/kl"] == pytest.approx(0, abs=1e-12)


def test_a_run_of_adapters_that_was_stopped_and_resumed_is_the_run_that_was_not(
    inside: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"lora.rank": 2}
    online.run(full(inside, "online_dpo", output="adapted", **changes), QUIET)
    config = full(inside, "online_dpo", output="adapted-parts", **changes)
    with monkeypatch.context() as patch:
        stop_in_third_step(patch)
        with pytest.raises(Interrupted):
            online.run(config, QUIET)
    online.run(config, QUIET, resume=True)
    assert_equal(left_behind("adapted-parts"), left_behind("adapted"))


def test_check_counts_prompts_and_not_answers(project: Project) -> None:
    listener = Listener()
    report = check.run(project.config("grpo", **{"train.total_episodes": None}), listener)
    batches = report["batches"]
    assert batches["times_each_prompt_in_an_iteration"] == pytest.approx(2 / len(PROMPTS))
    assert batches["iterations"] == 3  # six prompts, four answers each, eight answers a rollout
    assert batches["passes_over_the_prompts"] == 1.0
    assert not any("fewer prompts" in text for text in listener.warnings)
    held_out = check.run(project.config("grpo", **{"data.eval": "prompts.jsonl"}), listener)
    assert held_out["disk"]["models"] == report["disk"]["models"]  # the last model, and no best one


# Guards.


@pytest.mark.parametrize("stage", ONLINE)
def test_a_loss_that_breaks_stops_the_run_and_names_step_and_quantity(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = online.response_logps, [0]

    def broken(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        calls[0] += 1
        return found._replace(logp=found.logp * math.nan) if calls[0] == 3 else found

    monkeypatch.setattr(online, "response_logps", broken)
    with pytest.raises(TrainingError, match=f"step 3, {LOSS[stage]} is nan") as caught:
        online.run(project.config(stage), QUIET)
    assert caught.value.exit_code == 5
    assert run_json(f"runs/{stage}")["status"] == "failed"
    monkeypatch.setattr(online, "response_logps", real)
    assert online.run(project.config(stage), QUIET, resume=True).step == 4


@pytest.mark.parametrize(
    ("stage", "key"), [("grpo", "grpo.beta"), ("online_dpo", "online_dpo.beta")]
)
def test_a_policy_too_far_away_ends_the_run_with_the_key_that_holds_it(
    project: Project, stage: str, key: str
) -> None:
    with pytest.raises(TrainingError, match="iteration 2: the KL to the reference") as caught:
        online.run(project.config(stage, **{"kl.stop_above": 1e-4}), QUIET)
    assert f"raise {key} or lower" in caught.value.do


def test_a_rollout_that_a_guard_refused_does_not_move_the_baseline(project: Project) -> None:
    changes = {"reinforce.baseline": "moving_average", "kl.coef": 0.0, "train.total_episodes": 24}
    online.run(project.config("reinforce", **changes, output="free"), QUIET)
    limits = {"kl.stop_above": 1e-4}
    with pytest.raises(TrainingError, match="iteration 2"):
        online.run(project.config("reinforce", **changes, **limits), QUIET)
    online.run(project.config("reinforce", **changes), QUIET, resume=True)
    assert_equal(left_behind("runs/reinforce"), left_behind("free"))


@pytest.mark.parametrize("stage", ONLINE)
def test_a_run_that_the_disk_cannot_hold_ends_before_anything_is_written(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_disk", lambda folder: 0)
    config = project.config(stage)
    with pytest.raises(ResourceError, match="MiB are needed for models and training"):
        online.run(config, QUIET)
    assert not Path(config.output, "run.json").exists()


@pytest.mark.parametrize("stage", ONLINE)
def test_a_warning_names_keys_that_the_stage_has(project: Project, stage: str) -> None:
    config = project.config(stage)
    assert config.leash in {"kl.coef", f"{stage}.beta"}
    told = [rule.told("seen", config) for rule in diagnosis.RULES if rule.name != "critic"]
    assert any(f"raise {config.leash}" in text for text in told)
    assert not any("ppo." in text for text in told)
    if config.leash != "kl.coef":
        assert not any("kl.coef" in text for text in told)


# Bad input.


@pytest.mark.parametrize(
    ("stage", "changes", "words"),
    [
        ("grpo", {"grpo.group_size": 1}, "grpo.group_size: is 1.* set it to 2 or more"),
        ("rloo", {"rloo.group_size": 1}, "rloo.group_size: is 1.* set it to 2 or more"),
        (
            "grpo",
            {"rollout.batch_size": 10},
            r"rollout.batch_size: must be a multiple of grpo.group_size \(4\), got 10; 12 is one",
        ),
        (
            "online_dpo",
            {"rollout.batch_size": 7},
            "rollout.batch_size: must be a multiple of 2, the answers to a prompt, got 7; 8 is one",
        ),
        (
            "online_dpo",
            {"train.batch_size": 3},
            "train.batch_size: must be a multiple of 2, the answers to a prompt, got 3; 4 is one",
        ),
        ("reinforce", {"reinforce.decay": 0.5}, "reinforce.decay: is for baseline: moving_average"),
        ("grpo", {"kl.coef": 0.1}, "kl.coef: unknown key"),
        ("grpo", {"critic.init": "policy"}, "critic: unknown key"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    project: Project, stage: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        project.config(stage, **changes)


def test_the_config_of_another_stage_is_refused_with_the_command_that_takes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["grpo", f"{ROOT}/configs/online_dpo.yaml"]) == 2
    assert "this is an online_dpo config; run rlhf online-dpo " in capsys.readouterr().err
    assert main(["online-dpo", f"{ROOT}/configs/grpo.yaml"]) == 2
    assert "this is a grpo config; run rlhf grpo " in capsys.readouterr().err
    assert main(["rloo", f"{ROOT}/configs/rloo.yaml", "rloo.group_size=1"]) == 2
    told = capsys.readouterr().err
    assert "set it to 2 or more" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("stage", ONLINE)
def test_the_command_runs_on_the_sample_data(project: Project, stage: str) -> None:
    small = [
        "model=base",
        "reward.path=reward",
        f"data.train={ROOT}/data_samples/prompts.jsonl",
        *("data.chat_template=chatml", "data.limit=6", "train.max_steps=1", "device=cpu"),
        *("data.max_prompt_tokens=64", "data.overlong=truncate"),
        *("rollout.batch_size=8", "rollout.max_new_tokens=4"),
    ]
    word = stage.replace("_", "-")
    assert main([word, f"{ROOT}/configs/{stage}.yaml", *small, "--quiet"]) == 0
    assert (Path(f"runs/{stage}") / "model" / "model.safetensors").is_file()
    assert main(["check", f"{ROOT}/configs/{stage}.yaml", *small, "output=o", "--quiet"]) == 0


@pytest.mark.slow
def test_two_processes_give_the_rows_and_weights_of_one(inside: Project) -> None:
    jobs = []
    for stage in ONLINE:
        config = full(inside, stage, output=f"two/{stage}")
        Path(f"{stage}.yaml").write_text(to_yaml(config), encoding="utf-8")
        jobs.append(Job([stage.replace("_", "-"), f"{stage}.yaml", "--json"]))
    child = start_world(inside.folder, jobs)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    for stage in ONLINE:
        assert_equal(rows(f"two/{stage}"), rows(f"runs/{stage}"), rtol=1e-9, atol=1e-11)
        two, one = (weights(f"{folder}/{stage}/model") for folder in ("two", "runs"))
        assert_equal(two, one, rtol=1e-8)
