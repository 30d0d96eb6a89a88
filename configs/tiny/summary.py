"""What three finished stages achieved: ``summary.json``, and one table for a person.

    python summary.py --seconds 180 [--true-scores BEFORE.json AFTER.json]

Only the standard library is needed. Figures come from the run folders under ``runs/``: those before
training from the evaluation at step 0, those after it from the model that the stage kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Row = tuple[str, "float | None", "float | None"]
STAGES = ("sft", "reward_model", "ppo")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluation rows of a run, oldest first."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "eval"]


def before(run: Path, name: str) -> float | None:
    """A figure of the model that the stage started from."""
    return next((row.get(name) for row in evaluations(run) if row["step"] == 0), None)


def after(run: Path, name: str) -> float | None:
    """A figure of the model that the stage kept: the selected one, else the last."""
    selected = read_object(run / "run.json").get("selected") or {}
    rows = evaluations(run)
    chosen = [row for row in rows if row["step"] == selected.get("step")] or rows
    return chosen[-1].get(name) if chosen else None


def summarise(runs: Path, true_scores: list[float | None], seconds: float) -> dict[str, Any]:
    """The figures of all stages; those that were not measured are null."""
    sft, reward_model, ppo = (runs / stage for stage in STAGES)
    return {
        "sft": {
            "eval_loss_before": before(sft, "eval/loss"),
            "eval_loss_after": after(sft, "eval/loss"),
            "true_score": true_scores[0],
        },
        "reward_model": {
            "accuracy_before": before(reward_model, "eval/accuracy"),
            "accuracy_after": after(reward_model, "eval/accuracy"),
        },
        "ppo": {
            "true_score_before": true_scores[0],
            "true_score_after": true_scores[1],
            "score_before": before(ppo, "eval/score"),
            "score_after": after(ppo, "eval/score"),
            "kl": after(ppo, "eval/kl"),
        },
        "seconds": max(seconds, sum(stage_seconds(runs / stage) for stage in STAGES)),
    }


def stage_seconds(run: Path) -> float:
    """How long a stage took in all, over its interruptions."""
    return round(read_object(run / "run.json")["seconds"]["total"], 1)


def table(summary: dict[str, Any]) -> str:
    """The figures before and after, one line each; what was not measured is left out."""
    sft, reward_model, ppo = (summary[stage] for stage in STAGES)
    rows: list[Row] = [
        ("sft: held-out loss", sft["eval_loss_before"], sft["eval_loss_after"]),
        (
            "reward model: held-out pair accuracy",
            reward_model["accuracy_before"],
            reward_model["accuracy_after"],
        ),
        ("ppo: score of the reward model", ppo["score_before"], ppo["score_after"]),
        ("ppo: true score", ppo.get("true_score_before"), ppo.get("true_score_after")),
        ("ppo: KL from the sft policy, nats per answer", None, ppo["kl"]),
    ]
    lines = [f"{'':<46}{'before':>9}{'after':>9}"]
    lines += [f"{name:<46}{cell(old)}{cell(new)}" for name, old, new in rows if new is not None]
    return "\n".join(lines)


def cell(value: float | None) -> str:
    """A number with three decimals, nine wide."""
    return f"{'-' if value is None else format(value, '.3f'):>9}"


def without_true_scores(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary of a task that has no rule to tell the truth."""
    return {
        stage: {name: value for name, value in figures.items() if "true_score" not in name}
        if isinstance(figures, dict)
        else figures
        for stage, figures in summary.items()
    }


def main() -> None:
    """Write ``summary.json`` and print the table."""
    parser = argparse.ArgumentParser(description="Summarise the three stages of this folder.")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--output", type=Path, default=Path("summary.json"))
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--true-scores", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    files = options.true_scores or []
    scores = [read_object(file)["true_score"] for file in files] or [None, None]
    summary = summarise(options.runs, scores, options.seconds)
    if not files:
        summary = without_true_scores(summary)
    options.output.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(table(summary))
    for stage in STAGES:
        print(f"{stage:<14}{options.runs / stage / 'model'}")


if __name__ == "__main__":
    main()
