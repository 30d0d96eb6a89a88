"""Means between logged rows, and rows that a continuation takes back."""

from __future__ import annotations

import json
import math

import pytest

from stages.runtime.metrics import Window, append, cut_back


def test_a_window_gives_means_and_starts_anew():
    window = Window()
    window.add({"loss/sft": 1.0, "optim/lr": 0.5})
    window.add({"loss/sft": 3.0})
    assert window.take() == {"loss/sft": 2.0, "optim/lr": 0.5}
    assert window.take() == {}


@pytest.mark.parametrize("undefined", [math.nan, math.inf, -math.inf])
def test_undefined_values_are_left_out_of_a_mean(undefined):
    window = Window()
    window.add({"reward_model/accuracy": undefined, "loss/ranking": 1.0})
    window.add({"reward_model/accuracy": 0.5, "loss/ranking": undefined})
    assert window.take() == {"reward_model/accuracy": 0.5, "loss/ranking": 1.0}
    window.add({"eval/kl": undefined})
    assert window.take() == {}


def rows(path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_one_json_object_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, {"step": 1, "text": "a\nb \u2028 ü"})
    append(path, {"step": 2})
    assert path.read_bytes().count(b"\n") == 2
    assert [row["step"] for row in map(json.loads, path.open(encoding="utf-8"))] == [1, 2]
    with pytest.raises(ValueError, match="JSON"):
        append(path, {"loss": math.nan})


def test_rows_beyond_the_checkpoint_and_a_torn_last_line_are_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (0, 5, 10, 10, 15):
        append(path, {"step": step, "text": "x\u2028\x85\x0b"})
    with path.open("a") as file:
        file.write('{"step": 10, "loss"')
    cut_back(path, 10, 0)
    assert [row["step"] for row in map(json.loads, path.open(encoding="utf-8", newline="\n"))] == [
        0, 5, 10, 10,
    ]  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_a_torn_line_that_happens_to_be_json_goes_as_well(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    cut_back(path, 9, 0)
    assert rows(path) == [{"step": 1}]


@pytest.mark.parametrize(
    "damaged",
    [b'{"step": 2, "loss/sft": 0.\xff}\n', b"\0\0\0\n", b'{"loss/sft": 1.0}\n', b"3\n",
     b'{"step": 2, "lo\n', b'{"step": "x"}\n', b"[" * 9999 + b"\n", b'{"st\rep": 2}\n'],
)  # fmt: skip
def test_a_damaged_row_is_named_by_its_line_and_set_aside(damaged, tmp_path):
    """A bit that flipped on the disk must not make a row vanish without a word."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + b'{"step": 3}\n' + damaged + b'{"step": 9}\n{"st')
    assert cut_back(path, 5, 0) == [2, 4]
    assert rows(path) == [{"step": 1}, {"step": 3}]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged * 2
    assert cut_back(path, 5, 0) == []
    path.write_bytes(path.read_bytes() + damaged)
    assert cut_back(path, 5, 0) == [3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged * 3


def test_rows_of_a_later_iteration_at_the_same_step_are_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step, iteration in ((4, 1), (8, 2), (8, 3)):
        append(path, {"step": step, "iteration": iteration})
    cut_back(path, 8, 2)
    assert [row["iteration"] for row in rows(path)] == [1, 2]


def test_a_file_that_is_not_there_stays_away(tmp_path):
    cut_back(tmp_path / "samples.jsonl", 3, 0)
    assert list(tmp_path.iterdir()) == []
