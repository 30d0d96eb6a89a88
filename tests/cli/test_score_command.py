"""``rlhf score``: every line comes back with what the reward says of its answers."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.app import main
from stages import ppo
from stages.models.folder import read_identity
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project, ids_of, make_models
from tests.stages.results import classifier, raw_score, samples

LINES = [
    {"prompt": "ab:", "response": "cd", "note": {"by": "me"}},
    {"prompt": "b:", "responses": [{"text": "d", "rank": 1}, {"text": "", "flags": ["cut"]}]},
]
RULE = "reward: {type: rule, rule: length, target: 2}\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A folder with two answered lines and a rule."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    found = Project(tmp_path)
    found.write("lines.jsonl", LINES)
    (tmp_path / "rule.yaml").write_text(RULE)
    return found


def scored(capsys: Any, *argv: str) -> list[dict[str, Any]]:
    assert main(["score", *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys: Any, code: int, *argv: str) -> str:
    assert main(["score", *argv]) == code
    told = capsys.readouterr()
    assert (told.out == "") is ("--json" not in argv)
    assert "Traceback" not in told.err
    return str(told.err)


def test_lines_come_back_as_they_were_with_a_score_for_each_answer(capsys: Any) -> None:
    first, second = scored(capsys, "rule.yaml", "lines.jsonl")
    assert first == {**LINES[0], "score": 0.0}
    assert second["responses"] == [
        {"text": "d", "rank": 1, "score": -0.5},
        {"text": "", "flags": ["cut"], "score": -1.0},
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{type: rule, rule: length, target: 2}",
        "- {type: rule, rule: length, target: 2}",
        "stage: ppo\nmodel: nowhere\nreward:\n  - {type: rule, rule: length, target: 2}",
    ],
)
def test_a_term_a_list_of_terms_and_a_whole_config_name_a_reward(text: str, capsys: Any) -> None:
    Path("other.yml").write_text(text)
    assert scored(capsys, "other.yml", "lines.jsonl")[0]["score"] == 0.0


def test_several_terms_are_weighed_and_told_apart(capsys: Any) -> None:
    Path("two.yaml").write_text(
        "- {type: rule, rule: length, target: 2, weight: 2}\n"
        "- {type: rule, rule: exact_match, field: note, name: note}\n"
    )
    first, second = scored(capsys, "two.yaml", "lines.jsonl")
    assert first["scores"] == {"rule": 0.0, "note": 0.0}
    assert second["responses"][0]["scores"] == {"rule": -0.5, "note": None}
    assert second["responses"][0]["score"] == -1.0


def test_the_mean_of_scores_whose_sum_no_number_holds_is_their_mean(capsys: Any) -> None:
    Path("far.yaml").write_text(
        "reward: {type: rule, rule: length, target: 1, name: far, weight: 1.0e+308}"
    )
    lines = [{"prompt": "a", "response": "bc"}] * 3
    Path("far.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [told] = scored(capsys, "far.yaml", "far.jsonl", "--output", "o.jsonl", "--json")
    assert told["mean"] == pytest.approx(-1e308)


def test_an_answer_without_a_judgement_has_null(capsys: Any) -> None:
    Path("none.yaml").write_text("{type: rule, rule: exact_match, field: note}")
    assert main(["score", "none.yaml", "lines.jsonl", "--output", "out.jsonl", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [lines[0]["score"], *(r["score"] for r in lines[1]["responses"])] == [0.0, None, None]
    assert (told["lines"], told["answers"], told["missing"], told["mean"]) == (2, 3, 2, 0.0)
    assert told["terms"] == {"rule": {"mean": 0.0, "missing": 2}}


def test_standard_input_and_other_formats_are_read(capsys: Any, monkeypatch: Any) -> None:
    pair = {"prompt": "p", "chosen": "ab", "rejected": "a"}
    text = io.BytesIO((json.dumps(pair) + "\n").encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(text))
    (line,) = scored(capsys, "rule.yaml", "-")
    assert [r["score"] for r in line["responses"]] == [0.0, -0.5]
    Path("table.csv").write_text("prompt,response\np,abc\n")
    assert scored(capsys, "rule.yaml", "table.csv") == [
        {"prompt": "p", "response": "abc", "score": -0.5}
    ]


def test_a_file_that_is_there_is_replaced_only_when_that_is_asked(capsys: Any) -> None:
    Path("out.jsonl").write_text("precious")
    argv = ("rule.yaml", "lines.jsonl", "--output", "out.jsonl")
    assert "is there already" in refused(capsys, 2, *argv)
    assert Path("out.jsonl").read_text() == "precious"
    assert main(["score", *argv, "--force"]) == 0
    assert "2 lines, 3 answers, mean score -0.5" in capsys.readouterr().out
    assert len(Path("out.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("reward", "output", "words"),
    [
        ("rule.yaml", "lines.jsonl", "is a file that is read"),
        ("rule.yaml", "rule.yaml", "is a file that is read"),
        ("python.yaml", "mine.py", "is a file that is read"),
        ("judge", "judge/config.json", "lies in judge, which is read"),
        ("judge", "link.jsonl", "lies in judge, which is read"),
        ("model.yaml", "judge/new.jsonl", "lies in judge, which is read"),
    ],
)
def test_what_is_read_is_never_replaced(reward: str, output: str, words: str, capsys: Any) -> None:
    Path("judge").mkdir()
    texts = {
        "python.yaml": "{type: python, path: mine.py}",
        "model.yaml": "[{type: model, path: judge}]",
        "mine.py": "def score(p, a, r):\n    return [1] * len(p)\n",
        "judge/config.json": "{}",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("link.jsonl").symlink_to("judge/config.json")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert words in refused(capsys, 2, reward, "lines.jsonl", "--output", output, "--force")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["~/lines.jsonl", "line?.jsonl", "-"])
def test_the_file_that_another_name_leads_to_is_not_replaced(
    name: str, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = Path("lines.jsonl").read_bytes()
    kept = os.dup(0)
    with open("lines.jsonl") as stdin:
        os.dup2(stdin.fileno(), 0)
        monkeypatch.setattr(sys, "stdin", stdin)
        told = refused(capfd, 2, "rule.yaml", name, "--output", "lines.jsonl", "--force")
    os.dup2(kept, 0)
    os.close(kept)
    assert "is a file that is read" in told
    assert Path("lines.jsonl").read_bytes() == before


@pytest.mark.parametrize("output", ["elsewhere/config.json", "elsewhere/new.jsonl", "blob"])
def test_a_link_in_a_model_folder_is_read_too(output: str, capsys: Any) -> None:
    for folder in ("judge", "elsewhere"):
        Path(folder).mkdir()
    Path("judge/model").symlink_to("../elsewhere")
    Path("elsewhere/config.json").write_text("{}")
    Path("blob").write_text("weights")
    Path("elsewhere/model.safetensors").symlink_to("../blob")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    told = refused(capsys, 2, "judge", "lines.jsonl", "--output", output, "--force")
    assert "which is read" in told
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_a_full_disk_is_told_with_the_file(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert "out.jsonl: the disk is full" in refused(
        capsys, 6, "rule.yaml", "lines.jsonl", "--output", "out.jsonl"
    )
    assert not list(Path().glob(".tmp-*"))


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["nowhere", "lines.jsonl"], 4, "no such folder"),
        (["nowhere.yaml", "lines.jsonl"], 2, "no such file"),
        (["bad.yaml", "lines.jsonl"], 2, "bad.yaml:1:20: reward.rule: expected length"),
        (["empty.yaml", "lines.jsonl"], 2, "expected a section"),
        (["sft.yaml", "lines.jsonl"], 2, "sft.yaml: a config of sft without a reward"),
        (["rule.yaml", "gone.jsonl"], 3, "does not exist"),
        (["rule.yaml", "prompts.jsonl"], 3, "there is no answer to score"),
        (["rule.yaml", "lines.jsonl", "--json"], 2, "needs the lines in a file"),
        (["rule.yaml", "lines.jsonl", "--device", "tpu"], 2, "--device"),
        (["python.yaml", "lines.jsonl"], 5, "ValueError: no for the prompt at lines.jsonl:1"),
    ],
)
def test_a_mistake_is_named(argv: list[str], code: int, words: str, capsys: Any) -> None:
    Path("bad.yaml").write_text("{type: rule, rule: lenght, target: 2}")
    Path("empty.yaml").write_text("")
    Path("sft.yaml").write_text("{stage: sft, model: base}")
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    Path("python.yaml").write_text("{type: python, path: mine.py}")
    Path("mine.py").write_text("def score(p, a, r):\n    raise ValueError('no')\n")
    assert words in refused(capsys, code, *argv)


def test_a_reward_model_scores_texts_and_ids_as_transformers_does(
    project: Project, capsys: Any
) -> None:
    make_models(project)
    judge, vocabulary = classifier("reward"), read_identity(project.folder / "reward")
    assert vocabulary is None, "a model of another tool is known by its tokenizer"
    ids = ids_of("cdd")
    lines = [
        {"prompt": "ab:", "response": "cd"},
        {"prompt": "ab:", "response": "cd", "flags": ["cut"]},
        {"prompt": "ab:", "response": "cdd", "response_ids": ids, "ended": False},
        {"prompt": "ab:", "response": "cd", "response_ids": [1, 2, 3]},
    ]
    project.write("texts.jsonl", lines)
    found = [line["score"] for line in scored(capsys, "reward", "texts.jsonl")]
    asked = ids_of("ab:")
    expected = [
        raw_score(judge, asked + ids_of("cd", end=True)),
        raw_score(judge, asked + ids_of("cd")),
        raw_score(judge, asked + ids),
        raw_score(judge, asked + ids_of("cd", end=True)),  # ids of some other vocabulary
    ]
    assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_samples_of_a_run_get_the_scores_that_the_run_gave_them(
    project: Project, capsys: Any
) -> None:
    make_models(project)
    project.write("prompts.jsonl", [{"prompt": text} for text in ("ab:", "b:", "cab:")])
    config = project.config("ppo", **{"train.precision": "fp32", "train.total_episodes": 6})
    ppo.run(config, SilentReporter())
    found = scored(capsys, "reward", "runs/ppo/samples.jsonl")
    told = samples("runs/ppo")
    assert len(found) == len(told) > 0
    for line, sample in zip(found, told, strict=True):
        assert line["score"] == pytest.approx(sample["score"], rel=1e-5, abs=1e-6)
        assert line["response_ids"] == sample["response_ids"]
