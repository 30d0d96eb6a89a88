"""Where errors become exit codes: every kind of failure, as people and programs see it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.app import main
from rlhf_cli.world import LAUNCHED
from stages import errors

COMMANDS = (
    "sft",
    "train-rm",
    "ppo",
    "sample",
    "chat",
    "check",
    "init",
    "config show",
    "config schema",
)
ROOT = Path(__file__).parents[2]


def rlhf(*argv: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "rlhf_cli", *argv],
        capture_output=True,
        text=True,
        env=environment,
        **settings,
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("w", do="d"), 2),
        (errors.DataError("w", do="d"), 3),
        (errors.CheckpointError("w", do="d"), 4),
        (errors.TrainingError("w", do="d"), 5),
        (errors.ResourceError("w", do="d"), 6),
        (errors.GateError("w", do="d"), 7),
        (errors.Interrupted(2, what="w", do="d"), 130),
        (errors.Interrupted(15, what="w", do="d"), 143),
    ],
)
def test_each_user_error_ends_with_its_exit_code_and_no_traceback(
    error: errors.RlhfError, code: int, fake_sft: Any, config: str, capsys: Any
) -> None:
    fake_sft(error)
    assert main(["sft", config]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-2:] == ["error: w", "what to do: d"]
    assert "Traceback" not in err


def test_an_error_names_its_place(fake_sft: Any, config: str, capsys: Any) -> None:
    fake_sft(errors.DataError("not JSON", do="correct it", where="data.jsonl:7: response"))
    assert main(["sft", config]) == 3
    assert "error: data.jsonl:7: response: not JSON\n" in capsys.readouterr().err


def test_json_failure_is_one_object_on_stdout(fake_sft: Any, config: str, capsys: Any) -> None:
    fake_sft(errors.DataError("empty", do="add lines", where="data.jsonl"))
    assert main(["sft", config, "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "status": "failed",
        "exit": 3,
        "error": {"kind": "data", "where": "data.jsonl", "what": "empty", "do": "add lines"},
    }
    assert "error: data.jsonl: empty" in err


def test_a_bug_keeps_its_traceback_and_exits_with_1(
    fake_sft: Any, config: str, capsys: Any
) -> None:
    fake_sft(ZeroDivisionError("division by zero"))
    assert main(["sft", config, "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["kind"] == "bug"
    assert err.startswith("Traceback")
    assert "ZeroDivisionError: division by zero" in err


def test_debug_shows_the_traceback_of_a_user_error(fake_sft: Any, config: str, capsys: Any) -> None:
    fake_sft(errors.DataError("empty", do="add lines"))
    assert main(["sft", config, "--debug"]) == 3
    assert capsys.readouterr().err.startswith("Traceback")


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 80 bytes"),
        OSError(errno.ENOSPC, "No space left on device", "runs/x/model.safetensors"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_out_of_memory_or_disk_exits_with_6(
    error: Exception, fake_sft: Any, config: str, capsys: Any
) -> None:
    fake_sft(error)
    assert main(["sft", config]) == 6
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_exits_with_130(fake_sft: Any, config: str, capsys: Any) -> None:
    fake_sft(KeyboardInterrupt())
    assert main(["sft", config]) == 130
    assert "error: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "what", "do"),
    [
        (["sft"], "missing argument 'CONFIG'", "see rlhf sft --help"),
        (["sfd"], "no such command 'sfd'. Did you mean 'sft'?", "see rlhf --help"),
        (["sft", "c.yaml", "--resum"], "no such option: --resum", "see rlhf sft --help"),
        (["sample", "p", "q", "--k", "many"], "invalid value for '--k'", "see rlhf sample --help"),
        ([], "missing command", "see rlhf --help"),
    ],
)
def test_usage_errors_have_the_same_two_lines_and_exit_2(
    argv: list[str], what: str, do: str, capsys: Any
) -> None:
    assert main(argv) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: command line: {what}")
    assert second == f"what to do: {do}"


def test_control_characters_and_markup_of_user_data_are_shown_not_obeyed(
    fake_sft: Any, config: str, capsys: Any
) -> None:
    fake_sft(errors.DataError("bad field \x1b[31m\x07[bold]x[/bold]\r", do="d", where="\x9bf"))
    assert main(["sft", config]) == 3
    err = capsys.readouterr().err
    assert "error: \\x9bf: bad field \\x1b[31m\\x07[bold]x[/bold]\\r\n" in err


def test_only_the_main_process_of_a_foreign_world_prints_the_object(
    fake_sft: Any, config: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sft(errors.DataError("empty", do="d"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["sft", config, "--json"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "[process 1] error: empty" in err
    monkeypatch.setenv(LAUNCHED, "1")
    assert main(["sft", config, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["exit"] == 3


def test_losing_a_process_of_the_world_is_one_line_without_traceback(
    fake_sft: Any, config: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "[gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:1234"
    fake_sft(RuntimeError(lost))
    assert main(["sft", config]) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["sft", config]) == 1
    err = capsys.readouterr().err
    assert "error: another process of this run has ended" in err
    assert "Traceback" not in err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    script = (
        "import sys; from rlhf_cli import app, failure\n"
        "app._invoke = lambda argv: print('line\\n' * 100000) or 0\n"
        "sys.exit(app.main([]))"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait() == 141


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_neither_torch_nor_transformers_and_draws_nothing(command: str) -> None:
    script = (
        "import sys; from rlhf_cli.app import main\n"
        "code = main(sys.argv[1:] + ['--help'])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'numpy', 'rich'}\n"
        "sys.exit(code or len(heavy & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *command.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "GITHUB_ACTIONS": "true"},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"Usage: rlhf {command}")
    assert "\x1b" not in ended.stdout


def test_config_errors_are_found_without_importing_torch(config: str) -> None:
    script = (
        "import sys; from rlhf_cli.app import main\n"
        "code = main(['sft', sys.argv[1], 'train.learnin_rate=1'])\n"
        "sys.exit(1 if 'torch' in sys.modules else code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, config], capture_output=True, text=True, cwd=ROOT
    )
    assert ended.returncode == 2, ended.stderr
    assert "learning_rate" in ended.stderr


def test_version_is_a_result() -> None:
    ended = rlhf("--version")
    assert ended.returncode == 0
    assert ended.stdout.startswith("rlhf ")


def test_completion_script_can_be_shown() -> None:
    ended = rlhf(
        "--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    )
    assert ended.returncode == 0
    assert "_RLHF_COMPLETE" in ended.stdout


def test_completion_of_a_command_name() -> None:
    ended = rlhf(
        env={"_RLHF_COMPLETE": "complete_bash", "COMP_WORDS": "rlhf tra", "COMP_CWORD": "1"}
    )
    assert ended.stdout.split() == ["train-rm"]


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["sft", "missing.yaml"], 2), (["sft"], 2), (["nonsense"], 2), (["--help"], 0)],
)
def test_the_process_ends_with_the_exit_code(argv: list[str], code: int, tmp_path: Path) -> None:
    ended = rlhf(*argv, cwd=tmp_path)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_output_is_utf8_whatever_the_locale(tmp_path: Path, config: str) -> None:
    Path(config).write_text("stage: sft\nnaïve: 1\n", encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = rlhf("sft", "sft.yaml", cwd=tmp_path, env=ascii_only, encoding="utf-8")
    assert "sft.yaml:2:1: naïve: unknown key" in ended.stderr
