"""``rlhf evaluate``: what is printed, what can be required, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.app import main
from tests.cli.bad_input import Project
from tests.families import save_tiny
from tests.stages.project import rankings

REWARD = ["evaluate", "reward", "rankings.jsonl"]
POLICY = ["evaluate", "base", "prompts.jsonl", "--k", "2", "--max-new-tokens", "4"]
OF_REWARD = {
    *("accuracy", "accuracy_by_k", "by_source", "by_labeler", "margin", "log_loss", "ece", "bins"),
    *("best_of_n_regret", "regret_unit", "length_accuracy", "rankings", "pairs"),
}
OF_POLICY = {
    *("score", "win_rate", "ties", "kl", "kl_reverse", "length", "distinct_n", "ended"),
    *("best_of_n", "prompts", "against"),
}


def printed(argv: list[str], capsys: Any) -> dict[str, Any]:
    """The one object on standard output, whatever becomes of the command."""
    code = main([*argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == found.get("exit", 0)
    return found


def test_a_reward_model_is_measured_on_rankings(folder: Path, capsys: Any) -> None:
    found = printed(REWARD, capsys)
    assert set(found) == OF_REWARD
    assert found["rankings"] == 4
    assert found["pairs"] == 11
    assert 0 <= found["accuracy"] <= 1
    assert (found["by_source"], found["by_labeler"]) == ({}, {})


def test_a_policy_is_measured_on_prompts(folder: Path, capsys: Any) -> None:
    found = printed([*POLICY, "--reward", "reward", "--against", "base"], capsys)
    assert set(found) == OF_POLICY
    assert set(found["score"]) == {"mean", "low", "high"}
    assert set(found["against"]) == {"score", "length", "distinct_n", "ended", "best_of_n"}
    assert (found["win_rate"], found["ties"], found["kl"]) == (0.5, 1.0, 0.0)
    assert [row["n"] for row in found["best_of_n"]] == [1, 2]
    assert printed([*POLICY, "--limit", "2"], capsys)["prompts"] == 2


def test_a_person_gets_a_line_for_each_figure(folder: Path, capsys: Any) -> None:
    lines = rankings()
    lines[0].update(source="web\x1b[31m", labeler="ann")
    Project(folder).write("told.jsonl", lines)
    assert main(["evaluate", "reward", "told.jsonl"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("reward on told.jsonl\n")
    assert re.search(r"^  accuracy +[01]\.?\d*$", out, re.MULTILINE)
    assert re.search(r"^  best-of-n regret +\S+ of the rank, 0 to 1$", out, re.MULTILINE)
    assert r"source=web\x1b[31m  accuracy=" in out
    assert "\x1b" not in out
    assert main([*POLICY, "--reward", "reward", "--against", "base"]) == 0
    out = capsys.readouterr().out
    names, score, length = out.splitlines()[1:4]
    assert names.split() == ["base", "base"]
    assert re.fullmatch(r"  score +(\S+ \(95 %: \S+ to \S+\)) +\1", score)
    column = names.index("base")
    assert length.startswith("  length, tokens ")
    assert length[column - 1] == " "
    assert length[column] != " "
    assert re.search(r"^  best of 2 +(\S+ at KL 0\.193) +\1$", out, re.MULTILINE)
    assert re.search(r"^  win rate +0\.5$", out, re.MULTILINE)
    assert main(POLICY) == 0
    assert "score" not in capsys.readouterr().out


def test_the_terms_of_a_file_score_the_answers(folder: Path, capsys: Any) -> None:
    (folder / "rules.yaml").write_text(
        "reward: {type: rule, rule: regex, pattern: '.', weight: 3}\n"
    )
    found = printed([*POLICY, "--reward", "rules.yaml", "--against", "base"], capsys)
    assert 0 <= found["score"]["mean"] <= 3
    assert found["ties"] == 1.0
    (folder / "wrong.yaml").write_text("reward: {type: rule, rule: regexp}\n")
    failed = printed([*POLICY, "--reward", "wrong.yaml"], capsys)
    assert failed["exit"] == 2
    assert failed["error"]["where"].startswith("wrong.yaml:1:")


def test_more_names_than_a_person_reads_are_counted(folder: Path, capsys: Any) -> None:
    one = rankings()[0]
    Project(folder).write("many.jsonl", [{**one, "labeler": f"person {n}"} for n in range(23)])
    assert main(["evaluate", "reward", "many.jsonl"]) == 0
    out = capsys.readouterr().out
    assert out.count("labeler=person") == 20
    assert "and 3 more, with --json" in out
    assert len(printed(["evaluate", "reward", "many.jsonl"], capsys)["by_labeler"]) == 23


def test_a_bound_that_is_kept_passes_and_one_that_is_not_exits_with_7(
    folder: Path, capsys: Any
) -> None:
    bound = ["--require", "accuracy>=0", "--require", "log_loss<100"]
    assert printed([*REWARD, *bound], capsys)["pairs"] == 11
    failed = printed([*REWARD, "--require", "accuracy>1"], capsys)
    assert failed["exit"] == 7
    assert failed["error"]["where"] == "--require"
    assert "saved" not in failed["error"]["do"]
    scored = [*POLICY, "--reward", "reward", "--require", "score>=1e9"]
    assert "score is " in printed(scored, capsys)["error"]["what"]
    assert main([*POLICY, "--require", "ended<=1", "--require", "length>0"]) == 0


@pytest.mark.parametrize(
    ("argv", "exit_", "where", "what"),
    [
        ("evaluate reward prompts.jsonl", 3, "prompts.jsonl:1", "a prompt without an answer"),
        ("evaluate reward demonstrations.jsonl", 3, "demonstrations.jsonl:1", "a demonstration"),
        ("evaluate reward labelled.jsonl", 3, "labelled.jsonl:1", "rankings are needed"),
        ("evaluate reward tied.jsonl", 3, "tied.jsonl", "all answers tied"),
        ("evaluate reward nowhere.jsonl", 3, "nowhere.jsonl", ""),
        ("evaluate base empty.jsonl", 3, "empty.jsonl", ""),
        ("evaluate nowhere prompts.jsonl", 4, "nowhere", "no such folder"),
        ("evaluate base prompts.jsonl --against reward", 4, "reward", "is a reward model"),
        ("evaluate base prompts.jsonl --reward base", 4, "base", "has no reward head"),
        ("evaluate base prompts.jsonl --against foreign", 4, "foreign", "its vocabulary is not"),
        ("evaluate reward rankings.jsonl --against base", 2, "--against", "is a reward model"),
        ("evaluate reward rankings.jsonl --reward reward", 2, "--reward", "is a reward model"),
        ("evaluate reward rankings.jsonl --k 4", 2, "--k", "is a reward model"),
        ("evaluate reward rankings.jsonl --best-of 2", 2, "--best-of", "is a reward model"),
        ("evaluate base prompts.jsonl --reward nowhere.yaml", 2, "nowhere.yaml", "no such file"),
        ("evaluate base prompts.jsonl --reward nowhere", 4, "nowhere", "no such folder"),
        ("evaluate base prompts.jsonl --best-of 2", 2, "--best-of", "nothing scores them"),
        ("evaluate base prompts.jsonl --reward reward --best-of 8", 2, "--best-of", "of 8 cannot"),
        ("evaluate base prompts.jsonl --best-of 2,x", 2, "--best-of", "no list of numbers"),
        ("evaluate base prompts.jsonl --best-of 0", 2, "--best-of", "no list of numbers"),
        ("evaluate base prompts.jsonl --k 0", 2, "--k", "out of range"),
        ("evaluate base prompts.jsonl --temperature 0", 2, "--temperature", "out of range"),
        ("evaluate base prompts.jsonl --device tpu", 2, "--device", "there is no tpu"),
        ("evaluate base prompts.jsonl --precision int8", 2, "--precision", "there is no int8"),
        ("evaluate base prompts.jsonl --max-new-tokens 999", 2, "--max-new-tokens", "no room"),
        ("evaluate base prompts.jsonl --require score>=1", 2, "--require", "needs --reward"),
        ("evaluate base prompts.jsonl --require kl<=1", 2, "--require", "needs --against"),
        ("evaluate base prompts.jsonl --require accuracy>=1", 2, "--require", "of a policy"),
        ("evaluate reward rankings.jsonl --require kl<=1", 2, "--require", "of a reward model"),
        ("evaluate reward rankings.jsonl --require acuracy>=1", 2, "--require", "not a figure"),
        ("evaluate reward rankings.jsonl --require accuracy", 2, "--require", "not of the form"),
        ("evaluate reward", 2, "command line", "missing argument"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_sentence(
    argv: str, exit_: int, where: str, what: str, folder: Path, capsys: Any
) -> None:
    project = Project(folder)
    project.write("tied.jsonl", rankings([{"prompt": "d:", "responses": [("a", 1), ("b", 1)]}]))
    project.write("labelled.jsonl", [{"prompt": "d:", "response": "a", "label": True}])
    project.write("empty.jsonl", [])
    if "foreign" in argv:
        save_tiny(folder / "foreign", "llama")
    before = {path: path.stat().st_size for path in folder.rglob("*")}
    found = printed(argv.split(), capsys)
    assert found["exit"] == exit_
    assert where in found["error"]["where"]
    assert what in found["error"]["what"]
    assert found["error"]["do"]
    assert {path: path.stat().st_size for path in folder.rglob("*")} == before
