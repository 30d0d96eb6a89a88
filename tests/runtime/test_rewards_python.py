"""Rewards of type python: the user's function is called, and whatever it does wrong is told."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.errors import ConfigError, TrainingError
from stages.runtime.rewards import python
from stages.runtime.rewards.texts import Absent
from stages.runtime.signals import StopRequest, ended_by_sigterm
from tests.runtime.asked import answer, term

ANSWERS = [
    answer("one", "q1", right="one"),
    answer("two", [{"role": "user", "content": "q2"}], right="2"),
]

ANSWERS_SEEN = [answer("one", seen=[])]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scored(code: str, answers: Any = ANSWERS, **keys: Any) -> Any:
    Path("r.py").write_text(code)
    placed = term(type="python", path="r.py", **keys)
    return python.scorer(placed, python.load(placed))(answers)


def failure(code: str, kind: type[Exception] = TrainingError, **keys: Any) -> Any:
    with pytest.raises(kind) as caught:
        scored(code, **keys)
    return caught.value


def body(line: str) -> str:
    return f"def score(prompts, answers, records):\n    {line}\n"


def test_the_function_gets_prompts_answers_and_whole_lines_and_gives_numbers(folder: Path) -> None:
    code = body(
        "import json; open('seen.json', 'w').write(json.dumps([prompts, answers, records]))"
    )
    found = scored(code + "    return [1, None]\n")
    assert found[0] == 1.0
    assert isinstance(found[1], Absent)
    prompts, answers, records = json.loads((folder / "seen.json").read_text())
    assert prompts == ["q1", [{"role": "user", "content": "q2"}]]
    assert answers == ["one", "two"]
    assert records == [
        {"prompt": "q1", "right": "one"},
        {"prompt": [{"role": "user", "content": "q2"}], "right": "2"},
    ]


@pytest.mark.parametrize(
    "values",
    ["[0.5, -2]", "(True, False)", "numpy.float32([0.5, 2])", "torch.tensor([0.5, 2.0])"],
)
def test_lists_arrays_and_tensors_of_numbers_are_scores(values: str, folder: Path) -> None:
    found = scored(f"import numpy, torch\n{body(f'return {values}')}")
    assert [type(score) for score in found] == [float, float]


def test_another_function_and_modules_beside_the_file_may_be_used(folder: Path) -> None:
    (folder / "beside_it.py").write_text("def length(text):\n    return len(text)\n")
    code = "import beside_it\ndef judge(p, a, r):\n    return [beside_it.length(x) for x in a]\n"
    assert scored(code, function="judge") == [3.0, 3.0]
    assert sorted(path.name for path in folder.iterdir()) == ["beside_it.py", "r.py"]


def test_what_it_prints_does_not_reach_standard_output(folder: Path, capfd: Any) -> None:
    printing = "print('loaded')\nimport os, sys\n" + body(
        "print('called'); os.system('echo shell')"
    )
    print("before")
    assert scored(printing + "    return [1, 2]\n") == [1.0, 2.0]
    print("after")
    out, err = capfd.readouterr()
    assert out.split() == ["before", "after"]
    assert {"loaded", "called", "shell"} <= set(err.split())


def test_there_is_nothing_for_it_to_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a turn of a chat\n"))
    assert "raised EOFError" in failure(body("return [float(input())]")).what
    assert sys.stdin.read() == "a turn of a chat\n"


def test_an_error_names_file_line_and_the_prompt_that_causes_it(folder: Path) -> None:
    error = failure(body("return [1 / (a != 'two') for a in answers]"))
    assert error.where == "r.py:2"
    assert "the reward python raised ZeroDivisionError" in error.what
    assert 'the prompt at p.jsonl:1 ("q2")' in error.what
    assert "--resume" in error.do


@pytest.mark.parametrize("way", ["raise SystemExit(0)", "import os; os._exit(0)"])
def test_leaving_the_program_is_an_error_too(way: str, folder: Path) -> None:
    assert "raised SystemExit: 0" in failure(body(way)).what


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (body("raise GeneratorExit"), "raised GeneratorExit"),
        (body("return (1 / 0 for a in answers)"), "raised ZeroDivisionError"),
        ("class E(Exception):\n    __str__ = None\n" + body("raise E"), "raised E: <E>"),
        ("class V:\n    __repr__ = None\n" + body("return [V(), V()]"), "returned <V>"),
        (body("raise ValueError('a\\n\\n b' * 90)"), "raised ValueError: a ba ba b"),
        (body("import itertools; return itertools.repeat(1)"), "returned more than 2 scores"),
    ],
)
def test_whatever_comes_of_a_call_is_told_in_one_line(code: str, words: str, folder: Path) -> None:
    error = failure(code)
    assert words in error.what
    assert "\n" not in error.what
    assert len(error.what) < 350


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("import os; os.chdir('/')", os.getcwd),
        ("import torch; torch.set_grad_enabled(False)", torch.is_grad_enabled),
        ("import torch; torch.set_default_dtype(torch.float16)", torch.get_default_dtype),
        ("import torch; torch.set_num_threads(5)", torch.get_num_threads),
        (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
            lambda: signal.getsignal(signal.SIGTERM),
        ),
        ("import sys; sys.stdout.close()", lambda: sys.stdout.closed),
        ("import sys; sys.stdin.close()", lambda: sys.stdin.closed),
        ("import sys; sys.stderr.close()", lambda: sys.stderr.closed),
        ("records[0]['seen'].append(1)", lambda: str(ANSWERS_SEEN[0].record)),
    ],
)
@pytest.mark.parametrize("loading", [False, True])
def test_what_it_changes_of_the_process_does_not_outlast_it(
    line: str, state: Any, loading: bool, folder: Path
) -> None:
    before = state()
    loaded = f"{line}\n" if loading and "records" not in line else ""
    scored(loaded + body(f"{line}; return [1.0]"), ANSWERS_SEEN)
    assert state() == before


def test_a_reward_may_end_its_workers_by_a_signal_while_ours_is_held(folder: Path) -> None:
    code = (
        "import os, signal, time\n"
        "def score(prompts, answers, records):\n"
        "    worker = os.fork()\n"
        "    if not worker:\n"
        "        time.sleep(20)\n"
        "        os._exit(0)\n"
        "    os.kill(worker, signal.SIGTERM)\n"
        "    return [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])] * len(answers)\n"
    )
    with ended_by_sigterm(), StopRequest():
        assert scored(code) == [-signal.SIGTERM] * 2
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)


def test_a_process_that_it_forks_and_lets_return_ends_there(folder: Path) -> None:
    fork = "child = os.fork(); child and open('child', 'w').write(str(child))"
    scored("import os\n" + body(f"{fork}; return [1] * len(answers)"))
    with open("ends", "a") as file:
        file.write("once ")
    os.waitpid(int(Path("child").read_text()), 0)
    assert Path("ends").read_text() == "once "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("return [1.0]", ["returned 1 scores for 2 answers"]),
        ("return [1, 2, 3]", ["returned more than 2 scores for 2 answers"]),
        ("return None", ["returned None for 2 answers"]),
        ("return 'ab'", ["returned 'ab' for 2 answers"]),
        ("return [1, float('nan')]", ["returned nan", '("q2")']),
        ("return [float('inf'), 1]", ["returned inf", '("q1")']),
        ("return [1, -1e39]", ["returned -1e+39", '("q2")']),
        ("return [1, '2']", ["returned '2'", '("q2")']),
        ("return [1, [2]]", ["returned [2]", '("q2")']),
    ],
)
def test_a_wrong_result_is_named_with_the_prompt(line: str, words: list[str], folder: Path) -> None:
    error = failure(body(line))
    assert error.where == "r.py:1"
    for word in words:
        assert word in error.what


@pytest.mark.parametrize(
    ("code", "keys", "where", "words"),
    [
        (body("return ["), {}, "r.py:2", "is no Python"),
        ("x = 1\nboom()\n", {}, "r.py:2", "raised NameError"),
        ("def scores(p, a, r): ...", {}, "reward.function: score", "did you mean scores?"),
        ("def score(prompt): ...", {}, "reward.function: score", "three lists"),
        ("score = 3", {}, "reward.function: score", "no such function"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_when_it_is_loaded(
    code: str, keys: dict[str, Any], where: str, words: str, folder: Path
) -> None:
    error = failure(code, ConfigError, **keys)
    assert error.where == where
    assert words in error.what


def test_a_missing_file_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        python.load(term(type="python", path="nowhere.py"))
    assert caught.value.where == "reward.path: nowhere.py"
