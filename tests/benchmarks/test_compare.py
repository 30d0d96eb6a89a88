"""The comparison of the methods: its arithmetic, its table, its page."""

from __future__ import annotations

import json

from benchmarks import compare, methods_page, table
from stages.config import STAGES

STORED = methods_page.RESULTS.is_file()


def row(method: str, seed: int, true_score: float) -> dict:
    return {
        "method": method,
        "seed": seed,
        "true_score": true_score,
        "score": 1.0,
        "kl": 0.5,
        "win_rate": 0.75,
        "length": 8.0,
        "ended": 1.0,
        "seconds": 12.0,
        "mib": 400,
    }


RESULTS = {
    "date": "2026-01-02",
    "machine": {"cpu": "a CPU", "cores": 2},
    "minutes": 3.0,
    "rows": [row("sft", 1, 0.7), row("sft", 2, 0.6), row("dpo", 1, 0.8), row("dpo", 2, 0.9)],
    "best_of": [
        {"seed": seed, "n": n, "kl": kl, "true_score": 0.7 + kl}
        for seed in (1, 2)
        for n, kl in ((1, 0.0), (2, 0.19))
    ],
}


def test_every_method_is_compared() -> None:
    assert {"sft", "reward_model", *compare.METHODS} == set(STAGES)


def test_the_tuned_seed_is_not_compared() -> None:
    assert len(compare.SEEDS) == 3
    assert 0 not in compare.SEEDS


def test_a_row_holds_means_ranges_and_the_gain_of_each_seed() -> None:
    lines = methods_page.render(RESULTS).splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines[2:]}
    assert cells["`dpo`"][1:4] == ["0.850 (0.800–0.900)", "+0.200", "1.00 (1.00–1.00)"]
    assert cells["`sft`"][2] == ""
    assert cells["sft, best of 2"][1:5] == ["0.890 (0.890–0.890)", "+0.240", "", "0.19"]


def test_the_page_shows_the_stored_results_and_nothing_else() -> None:
    shown = table.NOT_MEASURED
    if STORED:
        shown = methods_page.render(json.loads(methods_page.RESULTS.read_text(encoding="utf-8")))
    page = methods_page.PAGE.read_text(encoding="utf-8")
    assert table.block(page, methods_page.BLOCK) == shown
