"""Runs with low-rank adapters: what they train, write, share and go on from, at each stage."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from stages import check, ppo, reward_model, sft
from stages.errors import CheckpointError, Interrupted
from stages.models import lora
from stages.runtime import run_dir
from stages.runtime.estimate import MIB
from stages.runtime.reporter import SilentReporter
from stages.update import Update
from tests.families import FAMILIES
from tests.stages.project import Listener, Project, ids_of, score_token
from tests.stages.results import (
    assert_equal,
    checkpoints,
    classifier,
    identity,
    left_behind,
    logps,
    policy,
    raw_score,
    rows,
    run_json,
    weights,
)
from tests.stages.test_processes import require_ppo_of_two_equal
from tests.stages.watch import in_rollout_order, watch_models, watch_steps

QUIET = SilentReporter()
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}
STAGES = ("sft", "reward_model", "ppo")
IDS = ids_of("ab:cd", end=True)


def adapted(project: Project, stage: str, **changes: Any) -> Any:
    """A stage's config with adapters of rank 2."""
    return project.config(stage, **{"lora.rank": 2, "train.learning_rate": 0.05, **changes})


def test_the_three_stages_run_one_after_the_other_on_merged_folders(project: Project) -> None:
    sft.run(adapted(project, "sft"), QUIET)
    reward_model.run(adapted(project, "reward_model", model="runs/sft"), QUIET)
    changes = {"model": "runs/sft", "reward.path": "runs/reward_model"}
    result = ppo.run(adapted(project, "ppo", **changes), QUIET)
    assert result.status == "done"
    for folder in ("runs/sft/model", "runs/ppo/model"):
        assert weights(folder).keys() == weights("base").keys()
    for folder in ("runs/reward_model/model", "runs/ppo/critic"):
        assert weights(folder).keys() == weights("reward").keys()
    assert identity("runs/ppo/model")["parent"]["path"] == "runs/sft"
    folders = ("base", "runs/sft/model", "runs/ppo/model")
    assert len({round(float(logps(policy(folder), IDS).sum()), 6) for folder in folders}) == 3


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
def test_the_adapter_beside_the_model_is_that_of_the_kept_model(
    project: Project, stage: str
) -> None:
    held_out = {"sft": "demonstrations.jsonl", "reward_model": "rankings.jsonl"}[stage]
    # A huge step at the end, so that an earlier model is the best one.
    changes = {"data.eval": held_out, "evaluate.every": 1, "train.max_steps": 4}
    config = adapted(project, stage, **changes, **{"train.learning_rate": 3.0})
    RUNS[stage](config, QUIET)
    folder = Path(config.output)
    assert run_json(config.output)["selected"]["step"] < 4
    assert (folder / "last").is_dir()
    base = policy("base") if stage == "sft" else classifier_of_base()
    theirs = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    kept = weights(folder / "model")
    for name, value in theirs.state_dict().items():
        if name in kept:
            torch.testing.assert_close(kept[name], value, rtol=1e-12, atol=1e-12)
    assert any(
        not torch.equal(kept[name], value) for name, value in weights(folder / "last").items()
    )


def classifier_of_base() -> Any:
    """The base model under a random head, which the adapter replaces."""
    return AutoModelForSequenceClassification.from_pretrained(
        "base", num_labels=1, dtype=torch.float64
    )


def test_ppo_writes_the_adapters_of_policy_and_critic(project: Project) -> None:
    ppo.run(adapted(project, "ppo"), QUIET)
    for base, name, model in (
        (policy("base"), "adapter", "model"),
        (classifier("reward"), "adapter_critic", "critic"),
    ):
        theirs = PeftModel.from_pretrained(base, Path("runs/ppo") / name).merge_and_unload()
        kept = weights(Path("runs/ppo") / model)
        for key, value in kept.items():
            torch.testing.assert_close(theirs.state_dict()[key], value, rtol=1e-12, atol=1e-12)
    before, after = weights("reward")["score.weight"], weights("runs/ppo/critic")["score.weight"]
    assert not torch.equal(before, after)


@pytest.mark.parametrize("family", FAMILIES)
def test_ppo_starts_with_kl_0_and_ratio_1_and_its_reference_and_reward_model_stay(
    project: Project, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.model("policy", family, dtype=torch.float64)
    project.model("judge", family, kind="reward", dtype=torch.float64, seed=1)
    in_rollout_order(monkeypatch)
    seen, models = watch_steps(monkeypatch), watch_models(monkeypatch)
    changes = {"model": "policy", "reward.path": "judge", "train.batch_size": 6}
    ppo.run(adapted(project, "ppo", **changes), QUIET)
    first, second = seen
    assert first.figures is not None
    assert torch.equal(first.rollout.logp_old, first.rollout.logp_ref)
    assert rows("runs/ppo", "train")[0]["objective/kl"] == 0.0
    assert first.figures["policy/ratio"] == pytest.approx(1.0, abs=1e-12)
    readers = models[0].readers
    assert readers.reference.module is readers.policy.module
    assert readers.critic is not None
    assert readers.reward.module is readers.critic.module
    # After a step the policy has moved; what it is held to and judged by has not.
    assert not torch.equal(second.rollout.logp_old, second.rollout.logp_ref)
    reference, judge = policy("policy"), classifier("judge")
    rollout = second.rollout
    for n, (prompt, answer) in enumerate(zip(rollout.prompts, rollout.answers, strict=True)):
        ids = [*prompt.tolist(), *answer.tolist()]
        expected = logps(reference, ids)[len(prompt) - 1 :]
        got = rollout.logp_ref[n][: len(answer)]
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)
        assert float(rollout.scores[n]) == pytest.approx(raw_score(judge, ids), rel=1e-5, abs=1e-5)


def test_ppo_gives_the_same_numbers_with_copies_of_the_shared_models(project: Project) -> None:
    ppo.run(adapted(project, "ppo"), QUIET)
    project.model("twin", dtype=torch.float64)
    project.model("judge", kind="reward", dtype=torch.float64, seed=1)
    changes = {"reference": "twin", "critic.init": "judge", "output": "runs/apart"}
    ppo.run(adapted(project, "ppo", **changes), QUIET)
    assert_equal(rows("runs/apart"), rows("runs/ppo"))
    assert_equal(weights("runs/apart/model"), weights("runs/ppo/model"))
    assert_equal(weights("runs/apart/critic"), weights("runs/ppo/critic"))


@pytest.mark.parametrize("init", ["policy", "runs/first"])
def test_a_critic_that_is_not_the_reward_model_keeps_it_apart(
    project: Project, init: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if init == "runs/first":
        ppo.run(adapted(project, "ppo", output=init), QUIET)
    seen = watch_models(monkeypatch)
    ppo.run(adapted(project, "ppo", **{"critic.init": init}), QUIET)
    readers = seen[0].readers
    assert readers.critic is not None
    assert readers.reward.module is not readers.critic.module
    assert readers.reference.module is readers.policy.module
    assert not any(p.requires_grad for p in readers.reward.module.parameters())


def test_ppo_with_adapters_raises_the_probability_of_the_only_rewarded_token(
    project: Project,
) -> None:
    score_token(project, "judge", ids_of("c")[0])
    changes = {
        "reward.path": "judge",
        "rollout.max_new_tokens": 1,
        "rollout.batch_size": 24,
        "train.batch_size": 24,
        "train.total_episodes": 240,
        "kl.coef": 0.0,
    }
    ppo.run(adapted(project, "ppo", **changes), QUIET)
    scores = [row["objective/score"] for row in rows("runs/ppo", "train")]
    assert scores[-1] > scores[0] + 0.3


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_what_is_trained_and_nothing_else(project: Project, stage: str) -> None:
    config = adapted(project, stage, **{"train.ema_decay": 0.9})
    RUNS[stage](config, QUIET)
    state = checkpoints(config.output)[-1]
    for file in state.glob("*.safetensors"):
        if file.stem != "rollout":
            for name in load_file(file):
                assert ".lora_" in name or name.startswith("score.modules_to_save."), name
    averaged = weights(Path(config.output) / "model_ema")
    assert averaged.keys() == weights(Path(config.output) / "model").keys()
    average = load_file(state / "ema.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = (average[f"{name}.lora_{x}.default.weight"] for x in "AB")
    expected = weights("base")[f"{name}.weight"] + 16 / 2 * b @ a
    torch.testing.assert_close(averaged[f"{name}.weight"], expected, rtol=1e-12, atol=1e-12)


FULL: dict[str, dict[str, Any]] = {
    "sft": {"lora.dropout": 0.3, "train.max_steps": 4, "train.ema_decay": 0.9},
    "reward_model": {"lora.dropout": 0.3, "train.max_steps": 4, "train.ema_decay": 0.9},
    "ppo": {"train.ema_decay": 0.9, "ppo.epochs": 2},
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = {"sft": "demonstrations", "reward_model": "rankings", "ppo": "prompts"}[stage]
    changes = {"data.eval": f"{held_out}.jsonl", "evaluate.every": 1, **FULL[stage]}
    RUNS[stage](adapted(project, stage, output="whole", **changes), QUIET)
    config = adapted(project, stage, output="parts", **changes)
    listener = Listener(stop_at=None if stage == "ppo" else 2)
    with monkeypatch.context() as patch:
        if stage == "ppo":
            stop_in_third_step(patch)
        with pytest.raises(Interrupted):
            RUNS[stage](config, listener)
    RUNS[stage](config, QUIET, resume=True)
    assert_equal(left_behind("parts"), left_behind("whole"))


def stop_in_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM inside an iteration of ppo."""
    real, calls = Update.step, [0]

    def step(self: Update, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    monkeypatch.setattr(Update, "step", step)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({}, {"lora.rank": 2}, "lora: was null"),
        ({"lora.rank": 2}, {}, "lora: was {"),
        ({"lora.rank": 2}, {"lora.rank": 3}, "lora.rank: was 2"),
        ({"lora.targets": ["q_proj"]}, {"lora.targets": ["k_proj"]}, "lora.targets: was"),
    ],
)
def test_other_adapters_are_no_continuation(
    project: Project, before: dict[str, Any], after: dict[str, Any], named: str
) -> None:
    sft.run(project.config("sft", **before), QUIET)
    longer = project.config("sft", **after, **{"train.max_steps": 5})
    with pytest.raises(CheckpointError) as caught:
        sft.run(longer, QUIET, resume=True)
    assert named in str(caught.value)


def test_overwriting_a_run_with_adapters_by_one_without_leaves_none(project: Project) -> None:
    ppo.run(adapted(project, "ppo"), QUIET)
    assert {"adapter", "adapter_critic"} <= {path.name for path in Path("runs/ppo").iterdir()}
    ppo.run(project.config("ppo"), QUIET, overwrite=True)
    assert not {"adapter", "adapter_critic"} & {path.name for path in Path("runs/ppo").iterdir()}
    assert {"adapter", "adapter_critic"} <= set(run_dir.MODELS)


@pytest.mark.parametrize("stage", STAGES)
def test_estimates_count_adapters_and_shared_models_once(project: Project, stage: str) -> None:
    config = adapted(project, stage, **{"train.ema_decay": 0.9})
    report = check.run(config, QUIET)
    RUNS[stage](config, QUIET)
    state = checkpoints(config.output)[-1]
    files = [file for file in state.glob("*.safetensors") if file.stem != "rollout"]
    numbers = sum(w.nbytes for file in files for w in load_file(file).values())
    assert report["disk"]["one_checkpoint"] * MIB == pytest.approx(numbers, rel=0.02)
    folders = Path(config.output).glob("*/*model.safetensors")
    numbers = sum(w.nbytes for file in folders for w in load_file(file).values())
    assert report["disk"]["models"] * MIB == pytest.approx(numbers, rel=0.02)
    role = "policy" if stage == "ppo" else "model"
    trained = load_file(state / "model.safetensors")
    size = sum(w.nbytes for w in trained.values()) / MIB
    memory = report["memory"]
    assert memory[role]["gradients"] == memory[role]["average"] == size
    assert memory[role]["optimiser"] == 2 * size
    assert report["models"][role]["trained_parameters"] * 8 / MIB == size
    if stage == "ppo":
        assert memory["reference"] == memory["reward"] == {}
        shared = [
            report["models"][name]["shares_the_weights_of"] for name in ("reference", "reward")
        ]
        assert shared == ["policy", "critic"]
        apart = check.run(adapted(project, "ppo", **{"critic.init": "policy"}), QUIET)
        assert apart["memory"]["reward"].keys() == {"weights"}


def test_a_wrong_target_is_refused_by_check_and_stage_in_the_same_words(project: Project) -> None:
    config = adapted(project, "reward_model", **{"lora.targets": ["score"]})
    told = []
    for run in (check.run, reward_model.run):
        with pytest.raises(lora.ConfigError) as caught:
            run(config, QUIET)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "'score' is no linear layer" in told[0]
    assert not Path(config.output).exists()


@pytest.mark.slow
def test_two_processes_train_the_adapters_that_one_trains(project: Project) -> None:
    require_ppo_of_two_equal(project, **{"lora.rank": 2})


def test_gradient_checkpointing_changes_no_number(project: Project) -> None:
    for name, on in (("plain", False), ("frugal", True)):
        changes = {"train.gradient_checkpointing": on, "output": name}
        ppo.run(adapted(project, "ppo", **changes), QUIET)
    assert_equal(rows("frugal"), rows("plain"), rtol=1e-9)
    assert_equal(weights("frugal/critic"), weights("plain/critic"), rtol=1e-9)
