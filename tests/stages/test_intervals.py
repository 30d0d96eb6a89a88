"""When a run logs, saves, evaluates and shows answers: intervals and their units."""

from __future__ import annotations

from typing import Any

import pytest

import stages.reward_model
import stages.sft
from stages import ppo, reward_model, sft
from stages.runtime.reporter import SilentReporter
from tests.stages.project import DEFAULTS, Listener, Project
from tests.stages.results import assert_equal, checkpoints, rows, samples, weights

QUIET = SilentReporter()
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}
LOSSES = {"sft": "loss/sft", "reward_model": "loss/ranking"}


def held_out(stage: str) -> dict[str, Any]:
    """The training file once more, as held-out records."""
    return {"data.eval": DEFAULTS[stage]["data.train"]}


def count_micro_batches(stage: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many times a stage computes the loss of a micro-batch."""
    task = {"sft": stages.sft.Supervised, "reward_model": stages.reward_model.Ranked}[stage]
    real, count = task.loss, [0]

    def loss(self: Any, *arguments: Any) -> Any:
        count[0] += 1
        return real(self, *arguments)

    monkeypatch.setattr(task, "loss", loss)
    return count


@pytest.mark.parametrize("stage", LOSSES)
def test_logging_saving_and_schedule_count_optimiser_steps_whatever_the_micro_batches(
    project: Project, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = count_micro_batches(stage, monkeypatch)
    changes = {"train.max_steps": 5, "train.warmup_steps": 2, "checkpoint.keep": 9}
    changes |= dict.fromkeys(("checkpoint.every", "evaluate.every"), 2) | held_out(stage)
    counts = {}
    for name, budget, every in (("whole", 100_000, 2), ("cut", 1, 2), ("each", 100_000, 1)):
        intervals = {"log.every": every, "train.tokens_per_micro_batch": budget}
        RUNS[stage](project.config(stage, output=name, **changes, **intervals), QUIET)
        counts[name], count[0] = count[0], 0
        steps = [path.name for path in checkpoints(name)]
        assert steps == ["step-000002", "step-000004", "step-000005"]
        assert [row["step"] for row in rows(name, "eval")] == [0, 2, 4, 5]
    assert counts["whole"] == 5 < counts["cut"]
    assert [row["step"] for row in rows("cut", "train")] == [2, 4, 5]
    assert_equal(rows("cut"), rows("whole"), rtol=1e-10)
    each = rows("each", "train")
    # Two steps of warm-up from a tenth of 0.01; then a cosine over the other three, to a tenth.
    rates = [0.001, 0.01, 0.01, 0.00775, 0.00325]
    assert [row["optim/lr"] for row in each] == pytest.approx(rates, rel=1e-12)
    for name in (LOSSES[stage], "optim/lr"):
        expected = [each[0][name] + each[1][name], each[2][name] + each[3][name]]
        found = [2 * row[name] for row in rows("cut", "train")[:2]]
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("stage", RUNS)
def test_the_last_step_is_saved_logged_and_published_whatever_the_intervals(
    project: Project, stage: str
) -> None:
    far = dict.fromkeys(("log.every", "checkpoint.every", "evaluate.every"), 1000)
    result = RUNS[stage](project.config(stage, **far), QUIET)
    output = f"runs/{stage}"
    (last,) = checkpoints(output)
    assert last.name == f"step-{result.step:06d}"
    assert_equal(weights(f"{output}/model"), weights(last))
    assert rows(output, "train")[-1]["step"] == result.step


def test_a_few_answers_with_their_scores_are_shown_at_intervals(project: Project) -> None:
    listener = Listener()
    changes = {"train.total_episodes": 24, "evaluate.every": 2, "log.samples": 2}
    ppo.run(project.config("ppo", **changes), listener)
    titles = [title for title, _, _ in listener.tables]
    assert titles == [f"answers of iteration {n}" for n in (1, 2, 4)]
    shown = [tuple(cells[:3]) for _, _, table in listener.tables for cells in table]
    written = [(s["prompt"], s["response"], f"{s['score']:.3f}") for s in samples("runs/ppo")]
    assert shown == written
    assert len(shown) == 6
