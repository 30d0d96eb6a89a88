"""``--require``: what is accepted, what is refused at once, and what a finished run must keep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_cli import gates
from rlhf_cli.config_file import COMMANDS
from stages.errors import ConfigError, GateError

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.mark.parametrize(
    ("text", "passes", "fails"),
    [
        ("eval/accuracy>=0.7", 0.7, 0.69),
        ("eval/loss<=1.5", 1.5, 1.51),
        ("eval/kl<2", 1.9, 2.0),
        ("eval/score > -1e-1", 0.0, -0.1),
        ("rollout/ended==1", 1.0, 0.99),
    ],
)
def test_each_comparison_keeps_its_bound(text: str, passes: float, fails: float) -> None:
    gate = gates.parse(text)
    assert gate.objection({gate.metric: passes}) is None
    assert gate.objection({gate.metric: fails}) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eval/accuracy",
        "eval/accuracy=0.7",
        "eval/accuracy>=good",
        "eval/accuracy>=0.7>=0.6",
        "eval/loss<=nan",
        "eval/loss<=inf",
        "accuracy>=0.7",
        "eval/>=1",
        ">=0.7",
    ],
)
def test_a_requirement_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gates.parse(text)
    assert caught.value.where == "command line: --require"


def test_an_unknown_group_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        gates.parse("evl/accuracy>=0.7")
    assert caught.value.do == "write eval/accuracy"


def test_a_failed_gate_names_metric_value_and_bound() -> None:
    with pytest.raises(GateError) as caught:
        gates.check([gates.parse("eval/accuracy>=0.7")], {"eval/accuracy": 0.62})
    assert caught.value.what == "eval/accuracy is 0.62 (required: eval/accuracy>=0.7)"


def test_all_failed_gates_are_named_and_met_ones_are_not() -> None:
    bounds = [gates.parse(text) for text in ("eval/loss<1", "eval/kl<1", "eval/score>0")]
    with pytest.raises(GateError) as caught:
        gates.check(bounds, {"eval/loss": 2.0, "eval/kl": 0.5, "eval/score": -1.0})
    assert "eval/loss is 2" in caught.value.what
    assert "eval/score is -1" in caught.value.what
    assert "eval/kl" not in caught.value.what


@pytest.mark.parametrize("comparison", gates.OPERATORS)
def test_a_metric_that_is_missing_or_not_a_number_never_passes(comparison: str) -> None:
    gate = gates.parse(f"eval/loss{comparison}1")
    assert "not measured" in (gate.objection({}) or "")
    assert gate.objection({"eval/loss": float("nan")}) is not None


def test_every_documented_metric_can_be_required() -> None:
    page = METRICS_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+/[^`<]+)` \|.*\| ([^|]+) \|$", page, flags=re.MULTILINE)
    preferences = dict.fromkeys(("dpo", "odpo", "kto", "orpo", "simpo"), "preferences")
    online = dict.fromkeys(("ppo", "grpo", "rloo", "reinforce", "online_dpo"), "online")
    assert rows
    for stage, word in COMMANDS.items():
        meant = {"all", word, (preferences | online).get(stage)}
        documented = {name for name, whose in rows if meant & {*whose.split(", ")}}
        assert set(gates.names(stage)) == documented


@pytest.mark.parametrize(
    ("text", "stage", "do"),
    [
        ("eval/los<=1", "sft", "write eval/loss"),
        ("eval/acuracy>=0.7", "reward_model", "write eval/accuracy"),
        ("loss/sftt<=1", None, "write loss/sft"),
        ("eval/accuracy_kx>=0.7", "reward_model", "write eval/accuracy"),
    ],
)
def test_an_unknown_metric_is_refused_with_a_suggestion(
    text: str, stage: str | None, do: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        gates.parse(text, stage=stage)
    assert caught.value.exit_code == 2
    assert caught.value.do == do


@pytest.mark.parametrize(
    ("text", "stage"), [("eval/kl<=1", "sft"), ("eval/accuracy_k4>=0.5", "ppo")]
)
def test_a_metric_of_another_stage_is_refused(text: str, stage: str) -> None:
    with pytest.raises(ConfigError, match="metric"):
        gates.parse(text, stage=stage)


def test_a_figure_of_an_evaluation_is_read_like_a_metric() -> None:
    known = ("accuracy", "log_loss")
    assert gates.parse_figure(" log_loss <= 0.6", known) == gates.Gate("log_loss", "<=", 0.6)
    for text, do in (
        ("acuracy>=0.7", "write accuracy"),
        ("zzz>=0.7", "name one of accuracy, log_loss"),
        ("accuracy", "write it like 'accuracy>=0.7'"),
        ("accuracy>=nan", "give a number as the bound"),
    ):
        with pytest.raises(ConfigError) as caught:
            gates.parse_figure(text, known)
        assert caught.value.do == do


def test_the_accuracy_by_number_of_answers_can_be_required() -> None:
    assert gates.parse("eval/accuracy_k4>=0.5", stage="reward_model").metric == "eval/accuracy_k4"
