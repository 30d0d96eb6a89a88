"""The launcher, with small programs in the place of a stage: worlds, failures, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli import launch as launch_module
from rlhf_cli import world
from rlhf_cli.launch import launch, without_flag
from stages.errors import ResourceError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Writes a program for every process; ``rank`` and ``folder`` are there for it."""

    def write(body: str) -> list[str]:
        file = tmp_path / "program.py"
        preamble = (
            "import os, signal, sys, time, pathlib\n"
            "rank = int(os.environ['RANK'])\n"
            f"folder = pathlib.Path({str(tmp_path)!r})\n"
        )
        file.write_text(preamble + textwrap.dedent(body))
        return [sys.executable, str(file)]

    return write


def test_every_process_learns_its_place_in_the_world(program: Any, tmp_path: Path) -> None:
    command = program(
        """
        import json
        (folder / f"{rank}.json").write_text(json.dumps([dict(os.environ), sys.argv[1:]]))
        """
    )
    argv = ["sft", "c.yaml", "--num-processes", "3", "--resume"]
    assert launch(argv, 3, command=command) == 0
    worlds = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, (environment, arguments) in enumerate(worlds):
        assert arguments == ["sft", "c.yaml", "--resume"]
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert len({environment["MASTER_PORT"] for environment, _ in worlds}) == 1


@pytest.mark.parametrize(
    ("given", "cores", "expected"), [(None, 8, "4"), (None, 1, "1"), ("3", 8, "3")]
)
def test_threads_are_shared_among_the_processes_unless_set(
    given: str | None, cores: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(world, "_cores", lambda: cores)
    assert world._environment(2)["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize(
    "argv", [["--num-processes", "2", "sft", "c"], ["sft", "c", "--num-processes=2"]]
)
def test_the_flag_is_taken_out_in_both_spellings(argv: list[str]) -> None:
    assert without_flag(argv) == ["sft", "c"]


def test_only_the_main_process_is_heard(program: Any, capfd: Any) -> None:
    command = program("print('out', rank); print('err', rank, file=sys.stderr)")
    assert launch([], 3, command=command) == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


def test_first_failure_gives_message_and_exit_code_and_ends_the_others(
    program: Any, capfd: Any
) -> None:
    command = program(
        """
        if rank == 1:
            print("error: w", file=sys.stderr)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        time.sleep(60)
        """
    )
    begun = time.monotonic()
    assert launch([], 3, command=command) == 3
    assert time.monotonic() - begun < 30
    assert capfd.readouterr() == ("", "error: w\n")


@pytest.mark.parametrize(("code", "told"), [(6, 6), (1, 1)])
def test_a_process_that_lost_another_does_not_hide_why(
    code: int, told: int, program: Any, capfd: Any
) -> None:
    command = program(
        f"""
        if rank == 1:
            time.sleep(0.7)
            print("error: no room", file=sys.stderr)
            sys.exit({code})
        print("error: another process has ended", file=sys.stderr)
        sys.exit(1)
        """
    )
    assert launch([], 2, command=command) == told
    shown = "error: another process has ended\n" + "error: no room\n" * (code == 6)
    assert capfd.readouterr() == ("", shown)


def test_a_message_that_all_processes_have_is_shown_once(program: Any, capfd: Any) -> None:
    command = program(
        """
        time.sleep(0.5 * (rank == 0))
        print("error: w", file=sys.stderr)
        sys.exit(2)
        """
    )
    assert launch([], 2, command=command) == 2
    assert capfd.readouterr().err == "error: w\n"


def test_a_process_that_ignores_the_end_is_killed(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "PATIENCE", 0.2)
    monkeypatch.setattr(launch_module, "GRACE", 0.5)
    command = program(
        """
        if rank == 1:
            while not (folder / "deaf").exists():
                time.sleep(0.01)
            sys.exit(4)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "deaf").touch()
        time.sleep(60)
        """
    )
    begun = time.monotonic()
    assert launch([], 2, command=command) == 4
    assert time.monotonic() - begun < 30


def test_a_process_killed_by_the_kernel_is_out_of_memory(program: Any) -> None:
    command = program("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(0.5)")
    with pytest.raises(ResourceError) as caught:
        launch([], 2, command=command)
    assert "process 1 of 2 was killed (SIGKILL)" in caught.value.what


def test_a_process_that_this_launcher_killed_is_not_called_out_of_memory(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "GRACE", 0.2)
    command = program(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"deaf{rank}").touch()
        if rank == 0:
            while not (folder / "deaf1").exists():
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.1)
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        """
    )
    with pytest.raises(launch_module.ProcessDied) as caught:
        launch([], 2, command=command)
    assert "did not end in time" in caught.value.what
    assert caught.value.exit_code == 128 + signal.SIGKILL


def test_a_crash_keeps_the_code_of_its_signal(program: Any) -> None:
    command = program("os.kill(os.getpid(), signal.SIGSEGV) if rank == 0 else time.sleep(0.5)")
    with pytest.raises(launch_module.ProcessDied) as caught:
        launch([], 2, command=command)
    assert caught.value.exit_code == 128 + signal.SIGSEGV


def test_the_object_is_that_of_the_first_failure(program: Any, capfd: Any) -> None:
    command = program(
        """
        print('{"rank": %d}' % rank)
        sys.exit(5 if rank == 1 else 0)
        """
    )
    assert launch([], 2, as_json=True, command=command) == 5
    assert json.loads(capfd.readouterr().out) == {"rank": 1}


def test_the_object_is_that_of_the_main_process(program: Any, capfd: Any) -> None:
    command = program("print('{\"rank\": %d}' % rank)")
    assert launch([], 2, as_json=True, command=command) == 0
    assert json.loads(capfd.readouterr().out) == {"rank": 0}


SAVES_ON_SIGNAL = """
    seen = []
    def note(signum, frame):
        seen.append(signum)
    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    (folder / f"ready{rank}").touch()
    while not seen:
        time.sleep(0.01)
    time.sleep(1.0 * (rank == 0))  # the main process saves, the other one is done at once
    (folder / f"seen{rank}").write_text(str(seen))
    sys.exit(128 + seen[0])
"""


def interrupt(command: list[str], folder: Path, signum: int) -> int:
    """Start a launcher, signal its whole group as a terminal does, and return its exit code."""
    script = (
        "import sys; from rlhf_cli import launch\n"
        "launch.PATIENCE = 0.2\n"
        f"sys.exit(launch.launch([], 2, command={command!r}))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 60
    while not all((folder / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(launcher.pid, signum)
    return launcher.wait(timeout=60)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_process_once_and_the_save_is_waited_for(
    signum: int, code: int, program: Any, tmp_path: Path
) -> None:
    assert interrupt(program(SAVES_ON_SIGNAL), tmp_path, signum) == code
    for rank in range(2):
        assert (tmp_path / f"seen{rank}").read_text() == str([int(signum)])


def test_losing_the_terminal_ends_the_processes(program: Any, tmp_path: Path) -> None:
    assert interrupt(program(SAVES_ON_SIGNAL), tmp_path, signal.SIGHUP) == 143
    assert (tmp_path / "seen0").read_text() == str([int(signal.SIGTERM)])


def test_a_world_of_real_command_lines_reports_a_bad_config_once(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rlhf_cli", "sft", "missing.yaml", "--num-processes", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 2
    assert ended.stderr.count("error:") == 1


def test_a_failed_process_of_a_world_ends_at_once_whatever_still_runs_in_it() -> None:
    script = (
        "import threading, time; from rlhf_cli import __main__ as program\n"
        "threading.Thread(target=time.sleep, args=(120,)).start()\n"
        "program.main = lambda argv: 3\n"
        "program.run()"
    )
    environment = {**os.environ, world.LAUNCHED: "1"}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    try:
        assert process.wait(timeout=60) == 3
    finally:
        process.kill()


def test_the_processes_end_when_the_launcher_is_killed(program: Any, tmp_path: Path) -> None:
    command = program(
        f"""
        sys.path.insert(0, {str(ROOT)!r})
        from rlhf_cli.world import follow_launcher
        follow_launcher()
        (folder / f"{{rank}}.tmp").write_text(str(os.getpid()))
        (folder / f"{{rank}}.tmp").rename(folder / f"{{rank}}.pid")
        time.sleep(60)
        """
    )
    starts = f"from rlhf_cli.launch import launch; launch([], 2, command={command!r})"
    launcher = subprocess.Popen([sys.executable, "-c", starts], cwd=ROOT)
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    _until(lambda: all(file.exists() for file in files))
    members = [int(file.read_text()) for file in files]
    launcher.kill()
    launcher.wait()
    try:
        _until(lambda: not any(map(_works, members)))
    finally:
        for member in filter(_works, members):
            os.kill(member, signal.SIGKILL)


def _until(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _works(process: int) -> bool:
    """Whether it runs; one that has ended may wait for whoever collects orphans."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
