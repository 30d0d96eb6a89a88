"""The table of estimated and measured memory: its rows, its bounds, its page."""

from __future__ import annotations

import json

import pytest

from benchmarks import memory, table
from stages.config import resolve

STORED = memory.RESULTS.is_file()
RESULTS = json.loads(memory.RESULTS.read_text(encoding="utf-8")) if STORED else {"rows": []}
ROWS = RESULTS["rows"]


def test_the_page_shows_the_stored_rows_and_nothing_else() -> None:
    page = memory.PAGE.read_text(encoding="utf-8")
    shown = memory.render(RESULTS) if STORED else table.NOT_MEASURED
    assert table.block(page, memory.BLOCK) == shown


def test_every_stage_of_a_measured_model_is_there_with_and_without_adapters() -> None:
    found = [(row["model"], row["stage"], row["adapters"]) for row in ROWS]
    models = list(dict.fromkeys(row["model"] for row in ROWS))
    assert found == [(t.model, t.stage, t.adapters) for t in memory.trials(models)]


def test_the_trials_are_every_stage_of_two_models_with_and_without_adapters() -> None:
    found = list(memory.trials(list(memory.MODELS)))
    assert len(set(found)) == len(found) == 2 * len(memory.WORKS) * 2


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['model']} {r['stage']} {r['adapters']}")
def test_the_estimate_is_within_30_percent_or_200_mib_for_a_tiny_model(row: dict) -> None:
    difference = abs(row["estimate"] - row["measured"])
    assert difference <= (200 if row["model"] == "demo" else 0.3 * row["measured"])


def test_adapters_take_less_than_all_weights() -> None:
    measured = {(r["model"], r["stage"], r["adapters"]): r["measured"] for r in ROWS}
    for model, stage, adapters in measured:
        if adapters and model != "demo":
            assert measured[model, stage, True] < measured[model, stage, False]


def test_every_trial_is_a_config() -> None:
    for trial in memory.trials(list(memory.MODELS)):
        config = resolve(memory.values_of(trial))
        assert config.train.max_steps == 2
        assert (config.lora is not None) is trial.adapters


def test_a_row_shows_the_difference_in_mib_and_percent() -> None:
    row = {"model": "demo", "stage": "ppo", "adapters": True, "estimate": 1100, "measured": 1000}
    assert memory._cells(row)[-2:] == ["1,000", "+100 (+10 %)"]
