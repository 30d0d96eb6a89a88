"""Signs of a run of PPO that goes wrong: each rule speaks of its own case, and of no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import stages.update
from stages import diagnosis, ppo
from stages.diagnosis import QUIET_FOR, RULES, diagnose
from stages.models.forward import Logps
from tests.stages.project import Listener, Project
from tests.stages.results import rows

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEALTHY = {
    "objective/kl": 0.5,
    "objective/score": 0.1,
    "objective/score_std": 0.9,
    "policy/ratio_first": 1.0,
    "policy/shift_first": 1e-7,
    "policy/entropy": 1.2,
    "rollout/response_length_mean": 9.6,
    "rollout/cut": 0.02,
    "rollout/empty": 0.0,
    "value/explained_variance": 0.5,
}
DEMO = (
    (0.258, -3.148, 1.125, 9.8, 0.0031, 0.0, 0.008),
    (1.468, -0.943, 0.933, 9.79, 0.0, 0.0031, 0.18),
    (2.172, 0.404, 0.813, 9.66, 0.0, 0.0, 0.212),
    (2.306, 0.818, 0.771, 9.59, 0.0, 0.0, 0.301),
    (2.699, 0.573, 0.712, 9.7, 0.0, 0.0, 0.354),
    (3.444, 1.101, 0.647, 9.53, 0.0, 0.0, 0.441),
    (3.362, 1.467, 0.613, 9.52, 0.0, 0.0031, 0.604),
    (3.538, 1.282, 0.601, 9.62, 0.0, 0.0, 0.612),
    (3.556, 1.571, 0.625, 9.76, 0.0, 0.0, 0.65),
    (3.348, 1.292, 0.634, 9.75, 0.0, 0.0, 0.705),
    (3.363, 1.673, 0.638, 9.76, 0.0031, 0.0, 0.722),
    (3.578, 1.537, 0.604, 9.55, 0.0, 0.0, 0.666),
)
"""KL, score, entropy, length, share cut, share empty, explained variance: the rows of the demo."""
Rows = list[dict[str, float]]


def with_(count: int = 1, **changes: float) -> Rows:
    """As many healthy rows, each with some figures changed; ``__`` stands for the slash."""
    given = {name.replace("__", "/"): value for name, value in changes.items()}
    return [HEALTHY | given] * count


def spoken(rows: Rows, *, precision: str = "fp32", **limits: Any) -> list[tuple[int, str]]:
    """Iteration and text of every warning on these rows, one a row."""
    config = config_of(**limits)
    memory: dict[str, Any] = {}
    found = []
    for iteration, row in enumerate(rows, start=1):
        told, memory = diagnose(row, memory, config, precision=precision, iteration=iteration)
        found += [(iteration, text) for text in told]
    return found


def config_of(**changes: Any) -> Any:
    return Project(Path()).config("ppo", **changes)


SICK: dict[str, tuple[Rows, str, dict[str, Any]]] = {
    "ratio": (with_(policy__shift_first=3e-5, policy__ratio_first=1.002), "ratio 1.002", {}),
    "negative_kl": (with_(3, objective__kl=-0.2), "-0.2 nats per answer", {}),
    "kl_limit": (with_(objective__kl=6.5), "6.5 nats", {"kl.warn_above": 6.0}),
    "entropy": (with_(3) + with_(policy__entropy=0.2), "from 1.2 to 0.2", {}),
    "cut": (with_(rollout__cut=1.0), "100% of the answers are cut off at 5 tokens", {}),
    "equal_scores": (with_(objective__score_std=0.0), "the same score, 0.1", {}),
    "empty": (with_(rollout__empty=0.25), "25% of the answers are empty", {}),
    "length": (
        with_(3) + with_(3, rollout__response_length_mean=20.0, objective__score=0.6),
        "scores rise by 0.5 while answers grow from 9.6 to 20 tokens",
        {},
    ),
    "critic": (with_(5, value__explained_variance=-0.1), "worse than a constant", {}),
}
"""Rows by hand on which a rule speaks at the last one, and figures that it names."""

WELL: dict[str, tuple[Rows, dict[str, Any]]] = {
    "ratio": (with_(policy__shift_first=2e-5), {}),
    "negative_kl": (with_(2, objective__kl=-0.9) + with_(objective__kl=-0.05), {}),
    "kl_limit": (with_(objective__kl=6.0), {"kl.warn_above": 6.0}),
    "entropy": (with_(3) + with_(policy__entropy=0.25), {}),
    "cut": (with_(rollout__cut=0.94), {}),
    "equal_scores": (with_(objective__score_std=1e-3), {}),
    "empty": (with_(rollout__empty=0.15), {}),
    "length": (with_(3) + with_(9, rollout__response_length_mean=40.0, objective__score=0.0), {}),
    "critic": (with_(4, value__explained_variance=-1.0) + with_(4), {}),
}
"""Rows just inside of the bounds."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_speaks_of_its_case_with_figure_cause_and_key(rule: diagnosis.Rule) -> None:
    rows, figure, limits = SICK[rule.name]
    ((iteration, text),) = spoken(rows, **limits)
    assert iteration == len(rows)
    assert figure in text
    assert rule.cause in text
    (key, *_) = re.findall(r"`([a-z_]+\.[a-z_.]+)`", rule.change)
    assert key in text
    assert "`" not in text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_just_inside_of_its_bounds_a_rule_is_silent(rule: diagnosis.Rule) -> None:
    rows, limits = WELL[rule.name]
    assert spoken(rows, **limits) == []


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-10), ("fp32", 2e-5), ("bf16", 0.05)])
def test_the_bound_of_the_first_ratio_is_that_of_the_number_format(
    precision: str, bound: float
) -> None:
    assert spoken(with_(policy__shift_first=bound), precision=precision) == []
    assert len(spoken(with_(policy__shift_first=1.1 * bound), precision=precision)) == 1


def test_a_kl_far_below_zero_is_told_at_once() -> None:
    ((iteration, _),) = spoken(with_(objective__kl=-1.5))
    assert iteration == 1


def test_one_answer_an_iteration_has_no_spread_of_scores_to_speak_of() -> None:
    alone = {"rollout.batch_size": 1, "train.batch_size": 1}
    assert spoken(with_(objective__score_std=0.0), **alone) == []


def test_the_rows_of_the_demo_are_no_sign_of_anything() -> None:
    names = (
        "objective/kl",
        "objective/score",
        "policy/entropy",
        "rollout/response_length_mean",
        "rollout/cut",
        "rollout/empty",
        "value/explained_variance",
    )
    rows = [HEALTHY | dict(zip(names, row, strict=True)) for row in DEMO]
    assert spoken(rows, **{"kl.warn_above": 6.0}) == []


def test_a_figure_that_a_row_lacks_is_no_sign() -> None:
    assert spoken([{}] * 12) == []


def test_a_lasting_sign_is_told_again_after_a_while_and_not_in_between() -> None:
    told = spoken(with_(2 * QUIET_FOR + 1, rollout__cut=1.0))
    assert [iteration for iteration, _ in told] == [1, 1 + QUIET_FOR, 1 + 2 * QUIET_FOR]


def test_the_memory_stays_small_and_is_plain_json() -> None:
    memory: dict[str, Any] = {}
    for iteration in range(1, 100):
        _, memory = diagnose(HEALTHY, memory, config_of(), precision="fp32", iteration=iteration)
    assert json.loads(json.dumps(memory)) == memory
    assert len(json.dumps(memory)) < 2000


def test_the_page_lists_every_rule_in_its_own_words() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("\n## Warnings of the online methods\n")[2]
    page = page.partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    told = [tuple(cell.strip() for cell in row) for row in cells]
    assert told == [(f"`{r.name}`", r.when, r.cause, r.change) for r in RULES]
    assert f"{QUIET_FOR} iterations" in page


# Real runs.


def one(warnings: list[str], words: str) -> str:
    """The only warning with these words; a random model of a few letters deserves others too."""
    (found,) = (text for text in warnings if words in text)
    return found


def warnings_of(config: Any, **how: Any) -> list[str]:
    listener = Listener()
    assert ppo.run(config, listener, **how).status == "done"
    return listener.warnings


def test_answers_that_are_all_cut_off_are_told(project: Project) -> None:
    told = warnings_of(project.config("ppo", **{"rollout.max_new_tokens": 1}))
    text = one(told, "100% of the answers are cut off at 1 tokens")
    assert "raise rollout.max_new_tokens" in text


def test_a_reward_model_that_knows_one_score_is_told(project: Project) -> None:
    file = project.folder / "reward" / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"].zero_()
    save_file(weights, file, metadata={"format": "pt"})
    text = one(warnings_of(project.config("ppo")), "all answers have the same score, 0")
    assert "reward.path" in text


def test_a_kl_above_its_limit_is_told_with_both_figures(project: Project) -> None:
    config = project.config("ppo", **{"kl.coef": 0.0, "kl.warn_above": 1e-3})
    text = one(warnings_of(config), "above kl.warn_above 0.001")
    assert "raise kl.coef" in text


def test_an_update_that_sees_another_policy_than_sampling_is_told(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = stages.update.response_logps

    def other(*given: Any, **options: Any) -> Logps:
        found = read(*given, **options)
        return Logps(found.logp + 1e-3, found.entropy)

    monkeypatch.setattr(stages.update, "response_logps", other)
    text = one(warnings_of(project.config("ppo")), "differ by 0.001 nats")
    assert "in fp64 explains 1e-10" in text


def test_a_run_that_goes_as_it_should_is_silent(project: Project) -> None:
    changes = {
        "rollout.batch_size": 24,
        "rollout.max_new_tokens": 24,
        "train.batch_size": 12,
        "train.total_episodes": 96,
        "train.learning_rate": 3e-3,
        "kl.warn_above": 20.0,
    }
    assert warnings_of(project.config("ppo", **changes)) == []


def test_what_was_said_before_a_stop_is_not_said_again_after_it(project: Project) -> None:
    changes = {"rollout.max_new_tokens": 1}
    first = project.config("ppo", **changes)
    assert one(warnings_of(first), "cut off")
    longer = project.config("ppo", **changes, **{"train.total_episodes": 24})
    assert not any("cut off" in text for text in warnings_of(longer, resume=True))


def test_figures_of_the_rules_are_in_the_rows(project: Project) -> None:
    ppo.run(project.config("ppo"), Listener())
    for row in rows("runs/ppo", "train"):
        assert row["policy/shift_first"] <= 1e-10
        assert row["objective/score_std"] > 0
