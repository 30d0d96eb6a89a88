"""Many processes and one give the same records, counts, errors and order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stages.data import build, workers
from stages.data.store import load
from stages.errors import DataError, ResourceError
from tests.data.conftest import write_lines
from tests.data.doubling import double
from tests.data.test_store import spec

ROOT = Path(__file__).parents[2]


@pytest.fixture
def many(monkeypatch):
    """Start other processes after the first record, with three records in a chunk."""
    monkeypatch.setattr(build, "_ALONE", 1)
    monkeypatch.setattr(build, "_CHUNK", 3)


def run(chunks, count=2):
    return list(workers.in_order(double, (2,), chunks, count))


def content(splits):
    return [(list(item.ids), list(item.targets)) for item in splits.train]


def test_what_is_stored_does_not_depend_on_the_number_of_processes(tmp_path, plain, many):
    records = [{"prompt": f"p{n}", "response": "a" * (n % 7)} for n in range(40)]
    path = write_lines(tmp_path / "d.jsonl", records)
    found = []
    for count in (1, 2):
        os.environ["RLHF_CACHE"] = str(tmp_path / f"cache{count}")  # restored by the fixture
        found.append(load(spec(path, workers=count), plain))
    assert content(found[0]) == content(found[1])
    assert found[0].report == found[1].report
    assert found[0].report.roles[0].dropped == {"empty answer": 6}
    assert found[0].report.roles[0].first["empty answer"] == f"{path}:1"
    origins = [found[1].train.origin(n) for n in range(len(found[1].train))]
    assert origins == [found[0].train.origin(n) for n in range(len(found[0].train))]


def test_prompts_come_once_whichever_chunk_they_stand_in(tmp_path, plain, many):
    path = write_lines(tmp_path / "d.jsonl", [{"prompt": f"p{n % 5}"} for n in range(40)])
    splits = load(spec(path, "prompts", workers=1), plain)
    assert [item.prompt for item in splits.train] == [f"p{n}" for n in range(5)]
    assert splits.report.roles[0].dropped == {"duplicate prompt": 35}


def test_rankings_with_margins_come_back_whole(tmp_path, plain, many):
    answers = [{"text": t, "score": s} for t, s in (("a", 1), ("b", 3), ("c", 2))]
    records = [{"prompt": f"p{n}", "responses": answers} for n in range(20)]
    path = write_lines(tmp_path / "d.jsonl", records)
    splits = load(spec(path, "rankings", workers=1, margin="data"), plain)
    assert len(splits.train) == 20
    assert splits.train[19].ranks == (3, 1, 2)
    np.testing.assert_allclose(splits.train[19].margins, [[0, 0, 0], [2, 0, 1], [1, 0, 0]])


def test_results_come_in_the_order_of_the_chunks():
    assert run(range(50)) == [2 * n for n in range(50)]


@pytest.mark.parametrize("count", [1, 2])
def test_no_chunk_gives_no_result(count):
    assert run([], count) == []


@pytest.mark.parametrize("count", [1, 2])
def test_the_first_refusal_in_order_is_the_one_that_is_raised(count):
    def chunks():
        yield from (1, "refuse")
        raise DataError("a later line is broken", do="repair it")

    with pytest.raises(DataError, match="refused") as caught:
        run(chunks(), count)
    assert (caught.value.where, caught.value.do) == ("here", "nothing")


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_the_reader_comes_after_the_results_before_it(count):
    def chunks():
        yield from (1, 2)
        raise DataError("line 3 is broken", do="repair it")

    results = workers.in_order(double, (2,), chunks(), count)
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(DataError, match="line 3"):
        next(results)


def test_a_process_that_is_ended_from_outside_is_out_of_memory_most_often():
    with pytest.raises(ResourceError, match=r"was ended \(exit 9\)") as caught:
        run([1, 2, "leave", 3])
    assert caught.value.exit_code == 6


def test_a_bug_in_a_process_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"):
        run([1, "bug"])


def test_what_cannot_be_sent_is_computed_here():
    found = list(workers.in_order(lambda number, chunk: number * chunk, (2,), [1, 2], 2))
    assert found == [2, 4]


def test_no_process_is_left_behind_when_the_reader_stops_early():
    results = workers.in_order(double, (2,), iter(range(10_000)), 2)
    assert next(results) == 0
    results.close()
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if children.exists():
        assert children.read_text() == ""


def test_a_script_without_a_guard_and_modules_beside_it_do_no_harm(tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong module')", encoding="utf-8")
    (tmp_path / "script").mkdir()
    script = tmp_path / "script" / "script.py"
    script.write_text(
        "from operator import mul\n"
        "from stages.data.workers import in_order\n"
        "print(list(in_order(mul, (2,), range(4), 2)))\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[0, 2, 4, 6]\n", done.stderr
    assert done.stderr == ""


def test_the_reading_tells_how_far_it_is(tmp_path, plain, many, monkeypatch):
    told = []

    class Reporter:
        def begin(self, what, *, total, unit, done=0):
            told.append((what, unit))

        def advance(self, done, metrics=None):
            told.append((done, metrics is not None))

        def end(self):
            told.append("end")

    monkeypatch.setattr(build, "_SECONDS", 0.0)
    path = write_lines(
        tmp_path / "d.jsonl", [{"prompt": f"p{n}", "response": "a"} for n in range(7)]
    )
    load(spec(path, workers=1), plain, reporter=Reporter())
    assert told == [("reading data", "records"), (3, True), (6, True), (7, True), "end"]
