"""``rlhf chat``: lines in, answers out, on a terminal and through a pipe."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

import stages.sample
from rlhf_cli import chat_input
from rlhf_cli.app import main
from rlhf_cli.chat_input import Entry, entries, from_pipe
from rlhf_cli.console import clean
from stages.data.chat_template import CHATML
from stages.data.incremental import IncrementalText
from stages.errors import DataError
from stages.runtime.reporter import SilentReporter
from stages.runtime.signals import Stopped
from stages.sample import SampleOptions
from tests.cli.test_console import Terminal
from tests.cli.test_security import HOSTILE
from tests.families import save_tiny
from tests.stages.project import Project, enter, letter_tokenizer, make_models

ROOT = Path(__file__).parents[2]
KEYS = ["policy", "prompt", "response", "response_ids", "ended", "score"]
Says = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Models that no test changes: in plain text, in turns, and of bytes; and a reward model."""
    with pytest.MonkeyPatch.context() as patch:
        found = enter(tmp_path_factory.mktemp("chat"), patch)
        make_models(found)
        turns = letter_tokenizer()
        turns.chat_template = CHATML
        save_tiny(found.folder / "turns", "llama", turns, dtype=torch.float64, seed=2)
        save_tiny(found.folder / "bytes", "llama")
        disable_progress_bar()  # as ``silence_libraries`` does before they are imported
        yield found
        enable_progress_bar()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Says:
    """Runs the command on lines of a pipe: exit code, stdout, stderr."""

    def run(text: str | bytes, *argv: str) -> tuple[int, str, str]:
        data = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main(["chat", *argv, "--max-new-tokens", "6", "--precision", "fp32"])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Says:
    """The same, typed at a terminal; an exception among the lines comes from the keyboard."""

    def run(lines: Iterable[str | type[BaseException]], *argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr("rlhf_cli.commands.chat.reader", lambda: (typed(lines), True))
        code = main(["chat", *argv, "--max-new-tokens", "6", "--precision", "fp32"])
        return (code, *capsys.readouterr())

    return run


def typed(lines: Iterable[str | type[BaseException]]) -> chat_input.ReadLine:
    """A reader of given lines."""
    left = iter(lines)

    def read(_: str) -> str | None:
        line = next(left, None)
        if isinstance(line, type):
            raise line
        return line

    return read


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# What is said.


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a", "", "  ", "b "], [("a", False), ("b ", False)]),
        (["a\\", "b\\", "c", "d"], [("a\nb\nc", False), ("d", False)]),
        (["a\\"], [("a", False)]),
        (['"""', "a", "", "b\\", '"""', "c"], [("a\n\nb\\", False), ("c", False)]),
        (['"""a', 'b"""'], [("a\nb", False)]),
        (['"""a"""', "b"], [("a", False), ("b", False)]),
        (['"""', "a", "b"], [("a\nb", False)]),
        (['""""""', '"""', '"""'], []),
        (["/reset", " /a", '"""/help"""'], [("/reset", True), (" /a", False), ("/help", False)]),
        (["/system a\\", "b"], [("/system a\nb", True)]),
    ],
)
def test_lines_become_turns(lines: list[str], expected: list[tuple[str, bool]]) -> None:
    assert list(entries(typed(lines))) == [Entry(*entry) for entry in expected]


def test_ctrl_c_within_a_text_of_several_lines_drops_it() -> None:
    lines = ["a\\", KeyboardInterrupt, '"""', "b", KeyboardInterrupt, "c"]
    assert list(entries(typed(lines))) == [Entry("c", False)]


def test_sigterm_within_a_text_of_several_lines_leaves() -> None:
    def read(mark: str) -> str:
        if mark == chat_input.MORE:
            raise Stopped(signal.SIGTERM)
        return "a\\"

    with pytest.raises(Stopped):
        list(entries(read))


def test_a_pipe_is_utf8_with_any_line_end_and_a_mark_at_its_beginning() -> None:
    read = from_pipe(io.BytesIO(b"\xef\xbb\xbfna\xc3\xafve\r\nb\nlast"))
    assert [read(""), read(""), read(""), read("")] == ["naïve", "b", "last", None]


def test_bytes_that_are_no_text_are_named_with_their_line() -> None:
    read = from_pipe(io.BytesIO(b"a\n\xff\n"))
    read("")
    with pytest.raises(DataError, match="stdin:2: is not UTF-8"):
        read("")


# Through a pipe.


def test_a_pipe_gets_an_answer_a_line_and_nothing_else(pipe: Says) -> None:
    code, out, err = pipe("ab:\nb:\n", "base", "--seed", "4")
    assert code == 0
    lines: list[str] = []
    options = SampleOptions(
        "base", "prompts.jsonl", k=1, max_new_tokens=6, seed=4, limit=2, precision="fp32"
    )
    stages.sample.run(options, SilentReporter(), write=lines.append)
    sampled = [json.loads(line)["responses"][0]["text"] for line in lines]
    assert out == "".join(text if text.endswith("\n") else f"{text}\n" for text in sampled)
    assert "asked in plain text" in err


def test_quiet_says_nothing_but_answers(pipe: Says) -> None:
    assert pipe("ab:\n/reset\n", "base", "--quiet")[2] == ""


def test_json_gives_an_object_for_each_answer(pipe: Says) -> None:
    said = "ab:\n/regenerate\n/system be kind.\nb:\n/compare turns\nd:\n/compare off\n/reset\nc:\n"
    code, out, _ = pipe(said, "turns", "--reward", "reward", "--json")
    assert code == 0
    found = objects(out)
    assert [list(line) for line in found] == [KEYS] * 6
    roles = [[turn["role"] for turn in line["prompt"]] for line in found]
    u, a, s = "user", "assistant", "system"
    assert roles == [[u], [u], [s, u, a, u], [s, u, a, u, a, u], [s, u, a, u, a, u], [s, u]]
    assert found[2]["prompt"][2]["content"] == found[1]["response"], "the other answer counts"
    assert found[0]["response_ids"] != found[1]["response_ids"]
    assert found[3] == found[4], "the same policy under the same noise"
    assert all(isinstance(line["score"], float) for line in found)


def test_a_score_stands_below_its_answer(pipe: Says) -> None:
    _, out, _ = pipe("ab:\n", "base", "--reward", "reward")
    [line] = objects(pipe("ab:\n", "base", "--reward", "reward", "--json")[1])
    assert out == f"{line['response']}\n[score {line['score']:.4f}]\n"


def test_two_policies_are_named_above_their_answers(pipe: Says) -> None:
    _, out, _ = pipe("/compare turns\nab:\n", "base")
    assert out.startswith("base:\n")
    assert "\nturns:\n" in out


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("/nothing\nab:\n", 2, "there is no command /nothing"),
        ("/compare\nab:\n", 2, "/compare: no policy is named"),
        ("/regenerate\nab:\n", 2, "/regenerate: there is no answer yet"),
        ("/compare reward\nab:\n", 4, "reward: is a reward model"),
        ("/system be kind.\nab:\n", 2, "/system: base has no chat template"),
        (f"{'a' * 300}\nab:\n", 2, "base: the text has 300 tokens, and 250 fit"),
        (b"\xff\nab:\n", 3, "stdin:1: is not UTF-8"),
    ],
)
def test_a_pipe_ends_with_its_first_error(
    said: str | bytes, code: int, words: str, pipe: Says
) -> None:
    ended, out, err = pipe(said, "base")
    assert (ended, out) == (code, "")
    assert f"error: {words}" in err
    assert "what to do: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["reward"], 4, "reward: is a reward model, and a policy is needed here"),
        (["nowhere"], 4, "nowhere: no such folder"),
        (["base", "--reward", "base"], 4, "base: has no reward head"),
        (["base", "--reward", "gone.yaml"], 2, "gone.yaml: no such file"),
        (["base", "--system", "a"], 2, "command line: --system: base has no chat template"),
        (["base", "--form", "messages"], 2, "command line: --form: base has no chat template"),
        (["base", "--form", "prose"], 2, "command line: --form: there is no prose"),
        (["base", "--device", "tpu"], 2, "command line: --device: there is no tpu"),
        (["base", "--temperature", "-1"], 2, "command line: --temperature: -1.0 is out of range"),
        (["base", "--temperature", "nan"], 2, "command line: --temperature: nan is out of range"),
        (["base", "--top-p", "0"], 2, "command line: --top-p: 0.0 is out of range"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(
    argv: list[str], code: int, words: str, pipe: Says
) -> None:
    ended, out, err = pipe("ab:\n", *argv)
    assert (ended, out) == (code, "")
    assert f"error: {words}" in err


def test_a_failure_with_json_is_an_object(pipe: Says) -> None:
    code, out, _ = pipe("ab:\n/nothing\n", "base", "--json")
    answer, failure = objects(out)
    assert code == failure["exit"] == 2
    assert list(answer) == KEYS


# At a terminal.


def test_a_person_is_told_of_an_error_and_goes_on(person: Says) -> None:
    code, out, err = person(["/nothing", "a" * 300, "/help", "ab:", "/quit", "b:"], "base")
    assert code == 0
    assert "error: there is no command /nothing" in err
    assert "error: base: the text has 300 tokens" in err
    assert "/regenerate" in err
    assert len(out.strip().splitlines()) <= 2, "one answer, and how it ended"


def test_a_person_is_told_how_an_answer_ended(person: Says) -> None:
    for seed in range(20):
        out = person(["ab:"], "base", "--seed", str(seed))[1]
        if "[cut at the limit]" in out:
            return
    raise AssertionError("no answer was cut")


def test_ctrl_c_at_the_prompt_leaves(person: Says) -> None:
    code, _, err = person(["ab:", KeyboardInterrupt, "b:"], "base")
    assert code == 130
    assert "Traceback" not in err
    assert "error" not in err


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends signals while given tokens come, counted over the session."""

    def install(signals: dict[int, signal.Signals]) -> None:
        real, count = IncrementalText.add, 0

        def add(self: IncrementalText, token: int) -> str:
            nonlocal count
            count += 1
            if count in signals:
                os.kill(os.getpid(), signals[count])
            return real(self, token)

        monkeypatch.setattr(IncrementalText, "add", add)

    return install


def lasting(pipe: Says) -> str:
    """A seed whose first two answers do not end by themselves."""
    for seed in map(str, range(99)):
        found = objects(pipe("ab:\nb:\n", "base", "--json", "--seed", seed)[1])
        if not any(line["ended"] for line in found):
            return seed
    raise AssertionError("every answer ends")


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(
    pipe: Says, person: Says, keyboard: Callable[..., None]
) -> None:
    seed = lasting(pipe)
    whole = objects(pipe("ab:\nb:\n", "base", "--json", "--seed", seed)[1])
    keyboard({2: signal.SIGINT})
    code, out, _ = person(["ab:", "b:"], "base", "--json", "--seed", seed)
    assert code == 0
    broken, following = objects(out)
    assert broken["response_ids"] == whole[0]["response_ids"][:2]
    assert following == whole[1]


@pytest.mark.parametrize(
    ("signals", "code"),
    [({2: signal.SIGINT, 3: signal.SIGINT}, 0), ({2: signal.SIGTERM}, 143)],
)
def test_a_second_ctrl_c_counts_for_the_next_answer_and_sigterm_leaves(
    signals: dict[int, signal.Signals],
    code: int,
    pipe: Says,
    person: Says,
    keyboard: Callable[..., None],
) -> None:
    seed = lasting(pipe)
    keyboard(signals)
    assert person(["ab:", "b:"], "base", "--seed", seed)[0] == code


def test_a_second_ctrl_c_within_an_answer_leaves(
    pipe: Says, person: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(self: IncrementalText, token: int) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    monkeypatch.setattr(IncrementalText, "add", add)
    assert person(["ab:", "b:"], "base")[0] == 130


def test_a_signal_ends_a_pipe(pipe: Says, keyboard: Callable[..., None]) -> None:
    seed = lasting(pipe)
    keyboard({2: signal.SIGINT})
    code, out, err = pipe("ab:\nb:\n", "base", "--json", "--seed", seed)
    assert code == 130
    assert "error: interrupted" in err
    assert len(objects(out)) == 2, "the broken answer and the failure"


# Text of a model is untrusted.


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that writes escape sequences and markup, token by token."""

    def generate(_: Any, __: Any, ___: Any, sampling: Any, *, hear: Any) -> None:
        from transformers import AutoTokenizer

        for token in AutoTokenizer.from_pretrained("bytes")(f"ok{HOSTILE}日")["input_ids"]:
            hear(token)
        hear(sampling.stop_ids[0])

    monkeypatch.setattr("stages.chat.generate", generate)


def test_the_text_of_a_model_steers_no_terminal(hostile: None, person: Says, pipe: Says) -> None:
    for code, out, err in (person(["a"], "bytes"), pipe("a\n", "bytes")):
        assert code == 0
        assert f"ok{clean(HOSTILE)}日\n" in out
        assert clean(out + err, keep="\n") == out + err


def test_json_keeps_the_text_and_steers_nothing(hostile: None, pipe: Says) -> None:
    _, out, _ = pipe("a\n", "bytes", "--json")
    assert objects(out)[0]["response"] == f"ok{HOSTILE}日"
    assert clean(out, keep="\n") == out
    assert out.isascii()


@pytest.mark.parametrize("width", [120, 60])
def test_two_answers_stand_side_by_side_where_there_is_room(
    width: int, hostile: None, person: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(width))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    code, _, _ = person(["/compare bytes", "a"], "bytes")
    assert code == 0
    shown = screen.getvalue()
    rows = [line for line in shown.splitlines() if line.count("\\x1b]0;x") == 2]
    assert bool(rows) == (width == 120)
    assert "[bold red]b[/]" in shown
    for sequence in ("\x1b]0;", "\x1b[2J", "\x07", "\u202e", "\x9b"):
        assert sequence not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h"), "the cursor comes back"


# A real terminal.


def test_a_conversation_at_a_real_terminal(project: Project) -> None:
    main_end, child_end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_cli", "chat", "bytes", "--max-new-tokens", "4"],
        stdin=child_end, stdout=child_end, stderr=child_end, env=environment, cwd=project.folder,
        start_new_session=True,
    )  # fmt: skip
    os.close(child_end)
    shown = until(main_end, "> ")
    assert "/help lists the commands" in shown
    os.write(main_end, b"a\\\n")
    until(main_end, ". ")
    os.write(main_end, b"b\n")
    until(main_end, "> ")
    os.write(main_end, b"/nothing\n")
    assert "there is no command" in until(main_end, "> ")
    os.write(main_end, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(main_end)


def until(descriptor: int, mark: str, *, seconds: float = 120.0) -> str:
    """What the terminal shows, up to a mark behind which it waits."""
    shown, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([descriptor], [], [], 0.5)[0]:
            shown += os.read(descriptor, 4096).decode(errors="replace")
        if shown.endswith(mark):
            return shown
    raise AssertionError(f"{mark!r} was not shown: {shown!r}")
