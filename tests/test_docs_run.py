"""The pages tell the truth about a run: README's lines and the snippets are executed."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import gates
from rlhf_cli.app import main
from tests.families import save_tiny
from tests.test_docs import PAGES, ROOT, documented, first_cells, part, rlhf_lines

WORDS = ("red", "blue", "green", "one", "two", "tea")
SMALL = ["train.precision=fp32", "train.max_steps=2", "log.every=1", "checkpoint.every=1"]
OVERRIDES = {
    "sft": ["train.batch_size=8", "train.ema_decay=0.9", "data.eval=0.2"],
    "train-rm": ["train.batch_size=8", "data.eval=0.2"],
    "ppo": [
        "train.batch_size=4",
        "train.ema_decay=0.9",
        "rollout.batch_size=4",
        "rollout.max_new_tokens=8",
        "ptx={data: texts.jsonl, coef: 1.0, ratio: 1}",
        "data.eval=0.2",
        "evaluate.every=1",
    ],
}
"""What makes the README's lines small, and what makes them write every file."""


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rank_answers(folder: Path) -> None:
    """What a person does between sample and train-rm: a rank for each answer, and a new name."""
    records = rows(folder / "answers.jsonl")
    for record in records:
        for rank, answer in enumerate(record["responses"], start=1):
            answer["rank"] = rank
    write(folder / "rankings.jsonl", records)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the README's stage lines were run, and which is the current one."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "configs", folder / "configs")
    save_tiny(folder / "MODEL", "llama")
    prompts = [f"Name {a} and {b}." for a in WORDS for b in WORDS]
    write(folder / "demonstrations.jsonl", [{"prompt": p, "response": f" {p}"} for p in prompts])
    write(folder / "prompts.jsonl", [{"prompt": p} for p in prompts[::3]])
    write(folder / "texts.jsonl", [{"text": p} for p in prompts])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RLHF_CACHE", str(folder / "cache"))
        for words in rlhf_lines("README.md"):
            runs = words[0] in (*OVERRIDES, "sample", "evaluate")
            if runs and not {"--resume", "--json"} & {*words}:
                _run(words)
                if words[0] == "sample":
                    rank_answers(folder)
        yield folder


def _run(words: list[str]) -> None:
    if "--num-processes" in words:  # processes are tested where the launcher is
        return
    assert main([*words, *_extra(words)]) == 0, words


def _extra(words: list[str]) -> list[str]:
    """What makes a line small; a reward model that is evaluated answers nothing."""
    if words[0] in OVERRIDES:
        return [*SMALL, *OVERRIDES[words[0]]]
    judges = words[0] == "evaluate" and "--reward" not in words
    return [] if judges else ["--max-new-tokens", "8"]


def test_the_lines_that_evaluate_a_reward_model_and_policies_run(project: Path) -> None:
    shutil.copy("rankings.jsonl", "held_out.jsonl")
    lines = [words for words in rlhf_lines("docs/pipeline.md") if words[0] == "evaluate"]
    assert len(lines) == 3
    for words in lines:
        bound = words.index("--require") if "--require" in words else len(words)
        _run(words[:bound])  # what the data of this test teach is nothing


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_a_run_writes_documented_metrics_only(project: Path, stage: str) -> None:
    known = documented()
    for row in rows(project / "runs" / stage / "metrics.jsonl"):
        for name in (name for name in row if "/" in name):
            # A figure of ranked answers ends in their number, one of a reward in a term's name.
            shown = re.sub(r"(?<=accuracy_k)\d+|(?<=score[/_])model", "<K>", name)
            assert {name, shown} & known
        head = {name for name in row if "/" not in name}
        assert head <= set(first_cells((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))


def test_three_runs_write_every_documented_metric_but_those_of_rare_events(project: Path) -> None:
    for stage in ("sft", "reward_model", "ppo"):
        found = {name for row in rows(project / "runs" / stage / "metrics.jsonl") for name in row}
        assert set(gates.names(stage)) - found <= {"policy/stopped_early"}


def test_a_conversation_answers_with_the_documented_keys(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    [words] = [words for words in rlhf_lines("README.md") if words[0] == "chat"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Name red and tea.\n")))
    assert main([*words, "--json", "--max-new-tokens", "4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer["score"], float)
    table = part("docs/commands.md", "## `rlhf chat`").partition("| key | value |")[2]
    assert set(answer) == set(first_cells(table))


def test_samples_have_the_documented_keys(project: Path) -> None:
    keys = set(first_cells(part("docs/metrics.md", "## Sampled answers")))
    several = {"scores"}  # of several terms, where the project has one
    assert several < keys
    found = rows(project / "runs/ppo/samples.jsonl")
    assert all(set(sample) == keys - several for sample in found)


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_run_json_has_the_documented_keys(project: Path, stage: str) -> None:
    found = json.loads((project / "runs" / stage / "run.json").read_text(encoding="utf-8"))
    listed = set(first_cells(part("docs/checkpoints.md", "## `run.json`")))
    assert set(found) == listed - ({"calibration"} if stage != "reward_model" else set())


@pytest.mark.parametrize("folder", ["sft/model", "reward_model/model", "ppo/model", "ppo/critic"])
def test_rlhf_json_has_the_documented_keys(project: Path, folder: str) -> None:
    found = json.loads((project / "runs" / folder / "rlhf.json").read_text(encoding="utf-8"))
    listed = first_cells(part("docs/checkpoints.md", "## Model folders"))
    assert list(found) == listed


def test_a_checkpoint_holds_the_documented_files(project: Path) -> None:
    listed = set(first_cells(part("docs/checkpoints.md", "## Checkpoints")))
    newest = max((project / "runs/ppo/checkpoints").iterdir())
    assert {path.name for path in newest.iterdir()} == listed - {"rollout.safetensors"}


def snippets() -> list[tuple[str, str]]:
    """The Python blocks that are marked to be run, with the page they stand on."""
    pattern = r"<!-- run -->\n```python\n(.*?)^```"
    return [
        (page.name, code)
        for page in PAGES
        for code in re.findall(pattern, page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    ]


@pytest.mark.parametrize(("page", "code"), snippets(), ids=lambda value: value[:24])
def test_marked_snippets_run(project: Path, page: str, code: str) -> None:
    assert Path(os.getcwd()) == project
    exec(compile(code, page, "exec"), {})


def test_the_snippet_reads_the_score_that_ppo_wrote(project: Path) -> None:
    code = next(code for _, code in snippets() if "SequenceClassification" in code)
    names: dict[str, Any] = {}
    exec(compile(code, "checkpoints.md", "exec"), names)
    assert names["score"] == pytest.approx(names["sample"]["score"], abs=2e-5)
    assert names["model"].config.mean != 0
