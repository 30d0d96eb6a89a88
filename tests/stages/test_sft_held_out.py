"""Stage 1 on held-out records: the best model, the last, and the average of the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stages import sft
from stages.runtime.reporter import SilentReporter
from tests.stages.project import DEMONSTRATIONS, Project
from tests.stages.results import (
    assert_equal,
    checkpoints,
    losses_by_hand,
    rows,
    weights,
)

QUIET = SilentReporter()


def test_the_averaged_model_follows_the_weights_of_every_step(project: Project) -> None:
    config = project.config(
        "sft", train__ema_decay=0.75, checkpoint__every=1, checkpoint__keep=9, train__max_steps=3
    )
    sft.run(config, QUIET)
    average = weights("base")
    for path in checkpoints("runs/sft"):
        now = weights(path)
        average = {name: 0.75 * average[name] + 0.25 * now[name] for name in average}
    assert len(checkpoints("runs/sft")) == 3
    assert_equal(weights("runs/sft/model_ema"), average, rtol=1e-12)


def test_decay_0_makes_the_average_the_weights_themselves(project: Project) -> None:
    sft.run(project.config("sft", train__ema_decay=0.0), QUIET)
    assert_equal(weights("runs/sft/model_ema"), weights("runs/sft/model"))


def spoilt(project: Project, **changes: Any) -> Any:
    """A run whose held-out answers are none that training shows, so that it soon overfits."""
    project.write("held_out.jsonl", [{"prompt": "ab:", "response": "zyx"}])
    values = {"data.eval": "held_out.jsonl", "evaluate.every": 1, "train.schedule": "constant"}
    return project.config("sft", **{"train.max_steps": 6, "train.batch_size": 8} | values | changes)


def test_the_best_model_by_held_out_loss_is_kept_beside_the_last(project: Project) -> None:
    result = sft.run(spoilt(project), QUIET)
    evaluations = rows("runs/sft", "eval")
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3, 4, 5, 6]
    best = min(evaluations[1:], key=lambda row: row["eval/loss"])
    assert best["step"] < 6, "the example does not overfit"
    assert result.selected == {
        "step": best["step"],
        "by": "eval/loss",
        "value": best["eval/loss"],
    }
    for folder, row in (("model", best), ("last", evaluations[-1])):
        (held_out,) = losses_by_hand(f"runs/sft/{folder}", [{"prompt": "ab:", "response": "zyx"}])
        assert float(held_out.mean()) == pytest.approx(row["eval/loss"], rel=1e-9)
        assert math.exp(row["eval/loss"]) == pytest.approx(row["eval/perplexity"])


def test_there_is_no_last_model_where_the_last_is_the_best(project: Project) -> None:
    project.write("held_out.jsonl", DEMONSTRATIONS[:1])
    result = sft.run(spoilt(project, **{"train.learning_rate": 1e-3}), QUIET)
    assert result.selected is not None
    assert result.selected["step"] == 6
    assert not (project.folder / "runs/sft/last").exists()


def test_the_row_at_step_0_is_the_base_model_on_the_held_out_records(project: Project) -> None:
    sft.run(spoilt(project), QUIET)
    (held_out,) = losses_by_hand("base", [{"prompt": "ab:", "response": "zyx"}])
    first = rows("runs/sft")[0]
    assert (first["kind"], first["step"]) == ("eval", 0)
    assert first["eval/loss"] == pytest.approx(float(held_out.mean()), rel=1e-9)


def test_evaluating_every_step_is_without_dropout_and_changes_no_weight(project: Project) -> None:
    """Dropout draws from the global generator, which an evaluation must not move."""
    project.model("gpt2", "gpt2", dropout=0.3)
    often = spoilt(project, model="gpt2", output="runs/often")
    never = spoilt(project, model="gpt2", output="runs/never", **{"data.eval": None})
    sft.run(often, QUIET)
    sft.run(never, QUIET)
    assert_equal(weights(checkpoints("runs/often")[-1]), weights(checkpoints("runs/never")[-1]))
    assert rows("runs/often", "train") == rows("runs/never", "train")
    (held_out,) = losses_by_hand("runs/never/model", [{"prompt": "ab:", "response": "zyx"}])
    last = rows("runs/often", "eval")[-1]["eval/loss"]
    assert last == pytest.approx(float(held_out.mean()), rel=1e-9)
