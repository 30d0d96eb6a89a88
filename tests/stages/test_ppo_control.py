"""What steers stage 3: the KL coefficient, early stops, warnings, and where the critic starts."""

from __future__ import annotations

import pytest
import torch

from stages import ppo
from stages.errors import ConfigError
from stages.runtime.reporter import SilentReporter
from tests.families import save_tiny
from tests.stages.project import Listener, Project
from tests.stages.results import assert_equal, rows, weights
from tests.stages.watch import watch_models, watch_steps

QUIET = SilentReporter()


def test_a_fixed_coefficient_stays_and_an_adaptive_one_follows_the_kl(project: Project) -> None:
    changes = {"train.total_episodes": 30, "kl.coef": 0.1, "kl.target": 0.05, "kl.gain": 0.5}
    ppo.run(project.config("ppo", output="runs/fixed", **changes), QUIET)
    assert {row["objective/kl_coef"] for row in rows("runs/fixed")} == {0.1}
    ppo.run(project.config("ppo", **changes, **{"kl.controller": "adaptive"}), QUIET)
    found = rows("runs/ppo", "train")
    beta = 0.1
    for row in found:
        assert row["objective/kl_coef"] == pytest.approx(beta, rel=1e-12)
        error = min(max(row["objective/kl"] / 0.05 - 1, -0.2), 0.2)
        beta *= 1 + 0.5 * error
    assert found[0]["objective/kl_coef"] > found[1]["objective/kl_coef"], "KL 0 is below the target"
    assert len({row["objective/kl_coef"] for row in found}) == 5


def test_the_gain_of_the_adaptive_coefficient_follows_from_the_horizon(project: Project) -> None:
    changes = {"kl.controller": "adaptive", "kl.coef": 0.1, "kl.horizon": 60}
    ppo.run(project.config("ppo", **changes), QUIET)
    found = [row["objective/kl_coef"] for row in rows("runs/ppo", "train")]
    assert found == pytest.approx([0.1, 0.1 * (1 - 0.2 * 6 / 60)], rel=1e-12)


def test_target_kl_leaves_out_the_rest_of_an_iterations_updates(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    changes = {"ppo.epochs": 6, "ppo.target_kl": 1e-3, "train.learning_rate": 0.1}
    result = ppo.run(project.config("ppo", **changes), QUIET)
    taken = [step.figures is not None for step in seen]
    assert taken[0], "the first minibatch of an iteration has KL 0"
    assert taken.count(False) == 2, "each of two iterations stopped early"
    assert result.step == taken.count(True) < 24
    for step, ok in zip(seen, taken, strict=True):
        assert not ok or step.figures["policy/approx_kl_k3"] <= 1e-3  # type: ignore[index]


def test_cutting_the_distribution_is_warned_of_by_name(project: Project) -> None:
    for name, value in (("top_p", 0.9), ("top_k", 5)):
        listener = Listener()
        ppo.run(
            project.config("ppo", output=f"runs/{name}", **{f"rollout.{name}": value}), listener
        )
        assert any(f"rollout.{name}" in text for text in listener.warnings)
    plain = Listener()
    ppo.run(project.config("ppo"), plain)
    assert not any("rollout.top" in text for text in plain.warnings)


# The critic.


def test_the_critic_starts_from_the_reward_model_with_its_offset(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_models(monkeypatch)
    ppo.run(project.config("ppo"), QUIET)
    assert_equal(seen[0].before["critic"], seen[0].before["reward"])


def test_the_critic_may_start_from_the_policy_or_an_earlier_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_models(monkeypatch)
    ppo.run(project.config("ppo", output="runs/first", **{"critic.init": "policy"}), QUIET)
    backbone = {k: v for k, v in seen[0].before["critic"].items() if k != "score.weight"}
    assert_equal(backbone, {k: seen[0].before["policy"][k] for k in backbone})
    ppo.run(project.config("ppo", output="runs/second", **{"critic.init": "runs/first"}), QUIET)
    assert_equal(seen[1].before["critic"], weights("runs/first/critic"))


def test_the_critic_has_a_learning_rate_of_its_own(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_models(monkeypatch)
    ppo.run(project.config("ppo", **{"critic.learning_rate": 0.0}), QUIET)
    assert_equal(weights("runs/ppo/critic"), seen[0].before["critic"])
    assert not torch.equal(
        weights("runs/ppo/model")["lm_head.weight"], weights("base")["lm_head.weight"]
    )


def test_a_critic_cannot_start_from_a_reward_model_of_another_vocabulary(
    project: Project,
) -> None:
    save_tiny(project.folder / "foreign", "llama", kind="reward")
    with pytest.raises(ConfigError, match="vocabulary") as caught:
        ppo.run(project.config("ppo", **{"reward.path": "foreign"}), QUIET)
    assert caught.value.where == "critic.init: reward"
    assert "critic.init: policy" in caught.value.do
    assert not (project.folder / "runs/ppo/run.json").exists()
