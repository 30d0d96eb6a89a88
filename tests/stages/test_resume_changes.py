"""What a continuation may change, what it is told then, and what it may not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import online, ppo, reward_model, sft
from stages.config import STAGES
from stages.data.chat_template import CHATML
from stages.errors import CheckpointError, Interrupted
from stages.runtime.reporter import SilentReporter
from stages.runtime.resume import HARMLESS, require_same_meaning
from tests.stages.project import Listener, Project
from tests.stages.results import assert_equal, checkpoints, left_behind, rows, run_json
from tests.stages.test_resume import RUNS, full, whole

QUIET = SilentReporter()

# Keys.


def leaves(values: Any) -> list[tuple[str, ...]]:
    """Every key of a resolved config; what a user names in ``data.columns`` is one value."""
    found: list[tuple[str, ...]] = []

    def walk(inner: Any, path: tuple[str, ...]) -> None:
        if isinstance(inner, dict) and path != ("data", "columns"):
            for key, value in inner.items():
                walk(value, (*path, key))
        else:
            found.append(path)

    walk(values, ())
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_is_either_refused_by_name_or_listed_as_harmless(
    project: Project, stage: str
) -> None:
    config = project.config(stage, **{"lora.rank": 2, "data.columns": {"question": "prompt"}})
    stored = json.loads(json.dumps(config.model_dump(mode="json")))
    for path in leaves(stored):
        key, changed = ".".join(path), json.loads(json.dumps(stored))
        section = changed
        for name in path[:-1]:
            section = section[name]
        section[path[-1]] = "another value"
        if key.startswith(HARMLESS):
            require_same_meaning(changed, config)
            continue
        with pytest.raises(CheckpointError) as caught:
            require_same_meaning(changed, config)
        assert caught.value.where == f"{config.output}: {key}"
        assert 'was "another value" when the run was started and is' in caught.value.what
        assert key not in caught.value.what, "the place has it already"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, {"question": "prompt"}),
        ({"question": "prompt"}, None),
        ({"question": "prompt"}, {"question": "prompt", "answer": "response"}),
        ({"question": "prompt", "answer": "response"}, {"question": "prompt"}),
    ],
)
def test_a_column_more_or_less_is_another_run(project: Project, before: Any, now: Any) -> None:
    stored = project.config("sft", **{"data.columns": before}).model_dump(mode="json")
    with pytest.raises(CheckpointError, match=r"data\.columns: was"):
        require_same_meaning(stored, project.config("sft", **{"data.columns": now}))


# Files.


@pytest.mark.parametrize("role", ["policy", "reference", "reward", "critic"])
def test_whichever_parent_of_ppo_has_changed_is_named(project: Project, role: str) -> None:
    project.model("anchor", dtype=torch.float64, seed=2)
    project.model("judge", kind="reward", dtype=torch.float64, seed=3)
    config = project.config("ppo", reference="anchor", **{"critic.init": "judge"})
    with pytest.raises(Interrupted):
        ppo.run(config, Listener(stop_at=1))
    place = {"policy": "base", "reference": "anchor", "reward": "reward", "critic": "judge"}[role]
    kind = "policy" if role in ("policy", "reference") else "reward"
    project.model(place, kind=kind, dtype=torch.float64, seed=9)
    with pytest.raises(CheckpointError, match=f"the weights of the {role} have changed") as caught:
        ppo.run(config, QUIET, resume=True)
    assert caught.value.where == place
    assert caught.value.exit_code == 4


def test_a_score_that_is_scaled_otherwise_is_refused(project: Project) -> None:
    reward_model.run(project.config("reward_model", **{"train.max_steps": 1}), QUIET)
    config = project.config("grpo", reward={"path": "runs/reward_model"})
    with pytest.raises(Interrupted):
        online.run(config, Listener(stop_at=1))
    told = Path("runs/reward_model/model/rlhf.json")
    before, values = told.read_text(), json.loads(told.read_text())
    told.write_text(json.dumps(values | {"mean": values["mean"] + 1}))
    with pytest.raises(CheckpointError, match="the scores of the reward had mean ") as caught:
        online.run(config, QUIET, resume=True)
    assert caught.value.where == "runs/reward_model: rlhf.json"
    told.write_text(before)
    assert online.run(config, QUIET, resume=True).status == "done"


def test_a_template_file_that_has_changed_is_refused(project: Project) -> None:
    """The config names the file alone."""
    template = Path("turns.jinja")
    template.write_text(CHATML)
    changes = {"data.chat_template": "turns.jinja", "data.as_messages": True}
    config = project.config("sft", **changes)
    with pytest.raises(Interrupted):
        sft.run(config, Listener(stop_at=1))
    before = left_behind("runs/sft")
    template.write_text(CHATML.replace("assistant", "helper"))
    with pytest.raises(CheckpointError, match="the chat template has changed since") as caught:
        sft.run(config, QUIET, resume=True)
    assert caught.value.exit_code == 4
    assert_equal(left_behind("runs/sft"), before)
    template.write_text(CHATML)
    assert sft.run(config, QUIET, resume=True).step == 3


# Length.


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
@pytest.mark.parametrize(
    ("schedule", "before", "after"),
    # At step 4 (s = 3) of 4 and of 12 steps, peak 0.01: linear 1 − s/n, cosine as in the paper.
    [("linear", 0.0025, 0.0075), ("cosine", 0.002318, 0.008682)],
)
def test_a_new_length_is_told_with_the_learning_rate_before_and_after(
    project: Project, stage: str, schedule: str, before: float, after: float
) -> None:
    changes: dict[str, Any] = {"train.schedule": schedule, "train.max_steps": 4}
    if stage == "ppo":  # iterations of three steps
        changes |= {"train.total_episodes": None, "train.batch_size": 2}
    stop = Listener(stop_at=1 if stage == "ppo" else 3)
    with pytest.raises(Interrupted):
        RUNS[stage](project.config(stage, **changes), stop)
    assert run_json(f"runs/{stage}")["step"] == 3
    listener = Listener()
    RUNS[stage](project.config(stage, **{**changes, "train.max_steps": 12}), listener, resume=True)
    (told,) = [note for note in listener.notes if "was to have" in note]
    assert "the run was to have 4 steps and is to have 12 now" in told
    assert f"its {schedule} schedule follows the new length" in told
    assert told.endswith(f"of step 4 is {after:.4g}, where it would have been {before:.4g}")
    if stage != "ppo":
        assert rows(f"runs/{stage}")[3]["optim/lr"] == pytest.approx(after, rel=1e-3)


def test_a_constant_schedule_has_no_learning_rate_to_tell_of(project: Project) -> None:
    sft.run(project.config("sft", **{"train.schedule": "constant"}), QUIET)
    listener = Listener()
    longer = project.config("sft", **{"train.schedule": "constant", "train.max_steps": 5})
    sft.run(longer, listener, resume=True)
    (told,) = [note for note in listener.notes if "was to have" in note]
    assert told == "the run was to have 3 steps and is to have 5 now"


def test_a_run_of_the_same_length_is_told_nothing(project: Project) -> None:
    with pytest.raises(Interrupted):
        sft.run(project.config("sft"), Listener(stop_at=1))
    listener = Listener()
    sft.run(project.config("sft"), listener, resume=True)
    assert not any("was to have" in note or "process" in note for note in listener.notes)


CUT = {
    "train.total_episodes": None,
    "train.schedule": "constant",
    "data.eval": None,
    "log.every": 1,
    "ppo.target_kl": None,
}


@pytest.mark.parametrize("steps", [3, 4, 6])
def test_more_steps_go_on_inside_the_iteration_that_max_steps_cut(
    project: Project, steps: int
) -> None:
    """An iteration has four steps: two epochs of two minibatches."""
    changes = {**CUT, "train.max_steps": 10}
    ppo.run(full(project, "ppo", "runs/parts", **{**CUT, "train.max_steps": steps}), QUIET)
    assert run_json("runs/parts")["step"] == steps
    assert rows("runs/parts", "train")[-1]["step"] == steps, "the cut iteration is logged"
    ppo.run(full(project, "ppo", "runs/parts", **changes), QUIET, resume=True)
    assert_equal(left_behind("runs/parts"), whole(project, "ppo", **changes))


def test_a_cut_iteration_is_closed_after_a_kill(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is written before the iteration is closed; the kill comes in between."""
    changes = {**CUT, "train.max_steps": 10}

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    config = full(project, "ppo", "runs/parts", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            ppo.run(config, QUIET)
    assert (checkpoints("runs/parts")[-1] / "rollout.safetensors").is_file()
    ppo.run(config, QUIET, resume=True)
    assert_equal(left_behind("runs/parts"), whole(project, "ppo", **changes))


def test_an_iteration_that_target_kl_ended_is_not_gone_on_with(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**CUT, "ppo.epochs": 6, "ppo.target_kl": 1e-3, "train.learning_rate": 0.1}
    config = project.config("ppo", **{**changes, "train.max_steps": 2, "output": "runs/parts"})
    ppo.run(config, QUIET)
    longer = {**changes, "train.max_steps": 5}
    ppo.run(project.config("ppo", **longer, output="runs/parts"), QUIET, resume=True)
    ppo.run(project.config("ppo", **longer, output="runs/whole"), QUIET)
    assert_equal(left_behind("runs/parts"), left_behind("runs/whole"))


# Processes.


def test_another_number_of_processes_is_told_on_resume(project: Project) -> None:
    with pytest.raises(Interrupted):
        sft.run(project.config("sft"), Listener(stop_at=1))
    told = run_json("runs/sft")
    Path("runs/sft/run.json").write_text(json.dumps({**told, "processes": 2}))
    listener = Listener()
    sft.run(project.config("sft"), listener, resume=True)
    (note,) = [note for note in listener.notes if "process" in note]
    assert note.startswith("the run goes on with 1 process, where it had 2 processes: the order of")
    assert run_json("runs/sft")["processes"] == 1
