"""``rlhf data``: what it prints, what it refuses, and that it needs no libraries for its help."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.app import main
from tests.families import save_tiny

KEYS = [
    "format",
    "records",
    "dropped",
    "k",
    "tie_rate",
    "duplicates",
    "prompt_tokens",
    "response_tokens",
    "overlap",
]
PAIRS = '{"prompt": "hi", "chosen": "a", "rejected": "b"}\n'
ROOT = Path(__file__).parents[2]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    file = tmp_path / "pairs.jsonl"
    file.write_text(PAIRS, encoding="utf-8")
    return str(file)


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_inspect_gives_one_object_for_one_file(pairs: str, capsys: Any) -> None:
    assert main(["data", "inspect", pairs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == KEYS
    assert found == {
        "format": "pairs",
        "records": 1,
        "dropped": {},
        "k": {"2": 1},
        "tie_rate": 0.0,
        "duplicates": 0,
        "prompt_tokens": None,
        "response_tokens": None,
        "overlap": 0,
    }


def test_inspect_gives_a_list_for_several_files(pairs: str, tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "hi"}\n{"prompt": "ho"}\n', encoding="utf-8")
    assert main(["data", "inspect", pairs, str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["files", "overlap"]
    assert found["overlap"] == 1
    assert [entry["file"] for entry in found["files"]] == [pairs, str(other)]
    assert all([*entry] == ["file", *KEYS] for entry in found["files"])


def test_inspect_says_it_to_people(pairs: str, capsys: Any) -> None:
    assert main(["data", "inspect", pairs]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert ["file", pairs] in lines
    assert ["format", "pairs"] in lines
    assert ["records", "1"] in lines
    assert ["dropped", "none"] in lines
    assert "not counted" in out
    assert err == f"reading {pairs}\n"


def test_inspect_counts_tokens_with_a_model(pairs: str, tmp_path: Path, capsys: Any) -> None:
    save_tiny(tmp_path / "model", "llama")
    assert main(["data", "inspect", pairs, "--json", "--model", str(tmp_path / "model")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"]["max"] >= 1
    assert found["response_tokens"]["max"] == 2  # a letter and the end token


def test_inspect_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stdin(monkeypatch, PAIRS)
    assert main(["data", "inspect", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "pairs"
    stdin(monkeypatch, '[{"prompt": "hi", "response": "a"}]')
    assert main(["data", "inspect", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "canonical"
    stdin(monkeypatch, '{"prompt": "hi"}\n{broken\n')
    assert main(["data", "inspect", "-"]) == 3
    assert "standard input:2: " in capsys.readouterr().err


def test_convert_writes_a_file_and_says_so(pairs: str, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out.jsonl"
    argv = ["data", "convert", pairs, "--to", "canonical", "--output", str(output)]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": pairs,
        "to": "canonical",
        "output": str(output),
        "format": "pairs",
        "records": 1,
        "lines": 1,
        "dropped": {},
    }
    answers = [{"text": "a", "rank": 1}, {"text": "b", "rank": 2}]
    assert json.loads(output.read_text()) == {"prompt": "hi", "responses": answers}
    assert main(argv) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*argv, "--force"]) == 0
    assert capsys.readouterr().out == f"{output}: 1 lines of 1 pairs records\n"


def test_convert_is_a_filter(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stdin(monkeypatch, '{"prompt": "hi", "response": "a"}\n')
    assert main(["data", "convert", "-", "--to", "trl", "--output", "-"]) == 0
    out, err = capsys.readouterr()
    assert out == '{"prompt": "hi", "completion": "a"}\n'
    assert "1 lines of 1 canonical records" in err


def test_convert_to_standard_output_under_another_name_is_a_filter_too(
    pairs: str, tmp_path: Path
) -> None:
    said = tmp_path / "so.txt"
    argv = ["data", "convert", pairs, "--to", "trl", "--output", "/dev/stdout", "--force"]
    with said.open("w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "rlhf_cli", *argv],
            check=True,
            cwd=ROOT,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert said.read_text() == '{"prompt": "hi", "chosen": "a", "rejected": "b"}\n'
    assert "1 lines of 1 pairs records" in done.stderr


def test_a_convert_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_cli", "data", "convert", "-", "--to", "trl"]
    with subprocess.Popen(
        [*command, "--output", str(tmp_path / "out.jsonl"), "--json"], cwd=ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        while process.poll() is None and not list(tmp_path.iterdir()):
            time.sleep(0.01)
        assert [entry.name[:5] for entry in tmp_path.iterdir()] == [".tmp-"]
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate()
    assert process.returncode == 143
    assert json.loads(told)["error"]["kind"] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_foreign_columns_are_renamed(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"question": "hi", "answer": "a"}\n', encoding="utf-8")
    names = ["--column", "question=prompt", "--column", "answer=response"]
    assert main(["data", "inspect", str(file), "--json", *names]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "canonical"
    assert main(["data", "convert", str(file), "--to", "trl", "--output", "-", *names]) == 0
    assert capsys.readouterr().out == '{"prompt": "hi", "completion": "a"}\n'


@pytest.mark.parametrize(
    ("argv", "code", "what"),
    [
        (["inspect", "FILE", "--column", "prompt"], 2, "renames nothing"),
        (["inspect", "FILE", "--column", "question=prompt"], 3, "no column 'question'"),
        (["inspect"], 2, "missing argument"),
        (["inspect", "no.jsonl"], 3, "does not exist"),
        (["inspect", "FILE", "--chat-template", "chatml"], 2, "needs a tokenizer"),
        (["inspect", "FILE", "--model", "no-such-folder/x"], 4, "no-such-folder"),
        (["convert", "FILE"], 2, "missing option"),
        (["convert", "FILE", "--to", "xml", "--output", "-"], 2, "no form is called 'xml'"),
        (["convert", "FILE", "--to", "trl", "--output", "-", "--json"], 2, "in a file"),
        (["convert", "FILE", "--to", "trl", "--output", "FILE", "--force"], 2, "that is read"),
        (["convert", "FILE", "--to", "trl", "--output", "no/x.jsonl"], 2, "cannot be written"),
        (["convert", "*.jsonl", "--to", "trl", "--output", "-"], 2, "names 2 files"),
    ],
)
def test_mistakes_have_their_exit_code_and_one_sentence(
    argv: list[str],
    code: int,
    what: str,
    pairs: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Any,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "second.jsonl").write_text(PAIRS, encoding="utf-8")
    assert main(["data", *[pairs if word == "FILE" else word for word in argv]]) == code
    assert what in capsys.readouterr().err


def test_text_of_a_file_cannot_steer_the_terminal(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text('{"\\u001b[31mred": 1}\n', encoding="utf-8")
    assert main(["data", "inspect", str(file)]) == 3
    assert "\x1b" not in capsys.readouterr().err


def test_help_imports_no_library() -> None:
    code = (
        "import sys; from rlhf_cli.app import main\n"
        "for words in (['data'], ['data', 'inspect'], ['data', 'convert']):\n"
        "    assert main([*words, '--help']) == 0\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.PIPE)
