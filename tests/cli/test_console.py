"""What a person sees of a stage's progress: plain lines, a live bar on a terminal, or nothing."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rlhf_cli import console
from rlhf_cli.app import main
from rlhf_cli.console import PlainReporter, QuietReporter, clean, duration
from rlhf_cli.live import TerminalReporter

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b[2J[red]x[/red]\x07 \u202etxt\r\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def exercise(reporter: console.ConsoleReporter) -> None:
    """A short stage with text that tries to steer the terminal."""
    with reporter:
        reporter.note(HOSTILE)
        reporter.warn(HOSTILE)
        reporter.begin("sft", total=20, unit="steps")
        reporter.advance(5)
        reporter.advance(10, {"loss/sft": 2.3456789, "optim/lr": 1e-5, console.SPEED: 420.4})
        reporter.table("samples " + HOSTILE, ["prompt", "score"], [[HOSTILE, "1.5"]])
        reporter.end()


def test_plain_lines_hold_no_control_characters() -> None:
    stream = io.StringIO()
    exercise(PlainReporter(stream))
    assert clean(stream.getvalue(), keep="\n") == stream.getvalue()


def test_plain_reporter_writes_one_line_per_logged_row() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.begin("ppo", total=4, unit="iterations")
    for done in (1, 2, 3):
        reporter.advance(done, {"objective/kl": done / 2} if done != 2 else None)
    reporter.advance(4, {"objective/score": 1.25, "objective/kl": 2.0, "policy/ratio": 1.0})
    reporter.end()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ppo: 4 iterations"
    assert lines[1].startswith("ppo: 1/4 iterations  objective/kl 0.5  eta ")
    assert lines[3] == "ppo: 4/4 iterations  objective/score 1.25  objective/kl 2"
    assert len(lines) == 4


def test_inner_phase_gives_way_to_the_outer_one() -> None:
    stream = io.StringIO()
    reporter = PlainReporter(stream)
    reporter.begin("sft", total=2, unit="steps")
    reporter.begin("evaluate", total=1, unit="batch")
    reporter.end()
    reporter.advance(2, {"loss/sft": 1.0})
    assert stream.getvalue().splitlines()[-1] == "sft: 2/2 steps  loss/sft 1"


def test_warnings_of_the_libraries_are_for_debug_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for debug in (False, True):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            monkeypatch.setattr(sys, "warnoptions", [])
            console.silence_libraries(debug=debug)
            warnings.warn("old", FutureWarning, stacklevel=1)
        assert len(told) == debug


def test_quiet_reporter_says_warnings_only() -> None:
    stream = io.StringIO()
    exercise(QuietReporter(stream))
    assert stream.getvalue().startswith("warning: \\x1b[2J[red]x[/red]\\x07 \\u202etxt\\r\\n\n")
    assert len(stream.getvalue().splitlines()) == 1


def test_terminal_shows_the_figures_and_restores_the_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    exercise(TerminalReporter(stream))
    shown = stream.getvalue()
    assert "loss 2.346 · tokens/s 420" in shown
    assert "10/20" in shown
    assert "[red]x[/red]" in shown
    assert "\x1b[2J" not in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")


@pytest.mark.parametrize(
    "width", ["1", "2", "7", "0", "-3", "abc", "", " 40 ", "1e3", "²", "٣", "9" * 9, "9" * 5000]
)
@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_whatever_the_environment_says_of_the_size_lines_can_be_read(
    name: str, width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, width)
    stream = Terminal()
    exercise(TerminalReporter(stream))
    shown = stream.getvalue()
    assert len(shown) < 20_000
    assert "1.5" in shown
    assert "warning:" in shown


@pytest.mark.parametrize("width", ["1", "0", "-3", "abc", "²", "9" * 5000])
def test_whatever_the_environment_says_of_the_size_help_can_be_read(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["sft", "--help"]) == 0
    assert "--num-processes" in capsys.readouterr().out


def test_a_finished_phase_is_not_drawn_again_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with TerminalReporter(stream) as reporter:
        reporter.begin("reading", total=1, unit="files")
        reporter.end()
        first = len(stream.getvalue())
        reporter.begin("training", total=1, unit="steps")
        reporter.end()
    assert "reading" in stream.getvalue()[:first]
    assert "training" in stream.getvalue()[first:]
    assert "reading" not in stream.getvalue()[first:]


def test_figures_stay_on_the_bar_until_newer_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with TerminalReporter(stream) as reporter:
        reporter.begin("sft", total=20, unit="steps")
        reporter.advance(10, {"loss/sft": 2.5})
        reporter.advance(11)
        reporter.advance(12, {"eval/loss": 2.25})
        reporter.end()
    assert "loss 2.5 · eval/loss 2.25" in stream.getvalue()


def test_terminal_is_restored_when_a_stage_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    reporter = TerminalReporter(stream)
    with contextlib.suppress(RuntimeError), reporter:
        reporter.begin("sft", total=2, unit="steps")
        raise RuntimeError
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")


@pytest.mark.parametrize(
    ("terminal", "environment", "kind"),
    [
        (True, {"TERM": "xterm"}, TerminalReporter),
        (True, {"TERM": "dumb"}, PlainReporter),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, PlainReporter),
        (False, {"TERM": "xterm", "FORCE_COLOR": "1", "GITHUB_ACTIONS": "1"}, PlainReporter),
        (True, {"TERM": "xterm", "RANK": "1"}, console.MuteReporter),
    ],
)
def test_the_reporter_fits_the_terminal(
    terminal: bool, environment: dict[str, str], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    assert type(console.make_reporter(as_json=False, quiet=False)) is kind


def test_libraries_draw_no_bars_once_silenced() -> None:
    script = (
        "from rlhf_cli.console import silence_libraries; silence_libraries(debug=False)\n"
        "from tqdm.auto import tqdm; list(tqdm(range(3)))\n"
        "from huggingface_hub.utils import tqdm as hub_tqdm; list(hub_tqdm(range(3)))\n"
        "from transformers.utils import logging; list(logging.tqdm(range(3)))\n"
        "logging.get_logger('transformers').warning('advert')\n"
        "import datasets; datasets.Dataset.from_dict({'a': [1, 2]}).map(lambda row: row)\n"
    )
    bars = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
    inherited = {k: v for k, v in os.environ.items() if k not in (*bars, "TRANSFORMERS_VERBOSITY")}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=inherited
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (185, "3m05s"), (7620, "2h07m")]
)
def test_durations_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_letters_of_all_scripts_stay_as_they_are() -> None:
    text = "naïve 日本語 می\u200cخواهم 👩\u200d🔬"
    assert clean(text) == text
