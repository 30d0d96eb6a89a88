"""Rows from rounds, markdown from rows, and the page that shows them."""

from __future__ import annotations

import pytest

from benchmarks import table
from benchmarks.rounds import Reading, Round

COLUMNS = {
    "work",
    "peer_seconds",
    "seconds",
    "ratio",
    "peer_mib",
    "mib",
    "memory_ratio",
    "tokens_per_second",
    "share_of_peak",
    "rounds",
}


def reading(seconds: float, mib: float, disturbed: float = 0.0) -> Reading:
    return Reading(seconds, mib, 100.0, disturbed, {"loss": 1.0}, tokens=1000, flops=4e9, peak=8e9)


ROUNDS = [
    Round(reading(10.0, 900.0), reading(2.0, 300.0)),
    Round(reading(90.0, 900.0, disturbed=0.5), reading(50.0, 300.0)),
    Round(reading(12.0, 1000.0), reading(4.0, 330.0)),
    Round(reading(11.0, 1000.0), reading(2.5, 360.0)),
]


def test_a_row_holds_medians_of_the_clean_rounds() -> None:
    row = table.row_of("SFT", "fp32", ROUNDS, wanted=3)
    assert row.keys() >= COLUMNS
    assert (row["peer_seconds"], row["seconds"], row["ratio"]) == (11.0, 2.5, 4.4)
    assert (row["peer_mib"], row["mib"], row["memory_ratio"]) == (1000, 330, 0.33)
    assert (row["tokens_per_second"], row["share_of_peak"]) == (400, 0.2)
    assert (row["rounds"], row["disturbed"], row["repeated"]) == (3, 0, 1)
    assert (row["peer_range"], row["range"]) == ([10.0, 12.0], [2.0, 4.0])


def test_a_disturbed_round_that_is_used_is_marked() -> None:
    row = table.row_of("SFT", "fp32", ROUNDS[:2], wanted=2)
    assert row["disturbed"] == 1
    assert "2, 1 disturbed" in table._cells(row)


def test_a_work_without_memory_and_tokens_leaves_them_out() -> None:
    row = table.row_of("start", "fp32", [Round(Reading(9.0), Reading(3.0))], wanted=1)
    assert row["ratio"] == 3.0
    assert (row["memory_ratio"], row["tokens_per_second"], row["share_of_peak"]) == (None,) * 3
    assert table._cells(row)[4:9] == [""] * 5


def test_the_table_shows_every_row_and_says_why_bf16_is_missing() -> None:
    row = table.row_of("SFT", "fp32", ROUNDS, wanted=3)
    machine = {
        "cpu": "a CPU",
        "cores": 2,
        "memory_gib": 8,
        "system": "Linux",
        "vector_units": "AVX2",
        "fast_bf16": False,
    }
    results = {
        "date": "2026-01-02",
        "machine": machine,
        "versions": {"rlhf": {"torch": "1"}},
        "settings": {"OMP_NUM_THREADS": "2"},
        "rows": [row],
        "learning": [{"what": "score", "before": [0.0], "peer": [1.0, 2.0], "rlhf": [1.5, 2.5]}],
    }
    text = table.render(results)
    assert "| SFT (fp32) | 11.0 (10.0–12.0) | 2.50 (2.00–4.00) | 4.4× | 1,000 | 330 |" in text
    assert "no fast bf16" in text
    assert "| score | 0.000 | 1.500 (1.000–2.000) | 2.000 (1.500–2.500) |" in text
    assert "no fast bf16" not in table.render(results | {"machine": machine | {"fast_bf16": True}})


def test_a_block_is_replaced_and_the_rest_of_the_page_stays() -> None:
    page = "a\n<!-- results -->\nold\n<!-- end of results -->\nb\n"
    new = table.with_block(page, "results", "x\ny")
    assert new == "a\n<!-- results -->\nx\ny\n<!-- end of results -->\nb\n"
    assert table.with_block(new, "results", "old") == page


@pytest.mark.parametrize("name", ["results", "growth"])
def test_the_page_shows_the_stored_results(name: str) -> None:
    shown = table.block(table.PAGE.read_text(encoding="utf-8"), name)
    assert shown == table.blocks().get(name, table.NOT_MEASURED)
