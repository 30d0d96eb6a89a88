"""Want of memory and disk through the command line: exit 6, what was being done, what to lower."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rlhf_cli.app import main
from stages.config import resolve
from stages.errors import CheckpointError, DataError
from stages.runtime import checkpoint, memory, room
from tests.stages.project import Project

MEBIBYTE = 1 << 20
NEWUSER, NEWNS = 0x10000000, 0x00020000  # of <sched.h>

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux keeps them")


class Ended(NamedTuple):
    """A finished command in a forked process: exit code, its JSON object, its stderr."""

    code: int
    told: dict[str, Any]
    text: str


@pytest.fixture(scope="module", autouse=True)
def _everything_is_imported(template: Path) -> None:
    """What is loaded late would count against the limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(template)
        assert main(["check", "sft.yaml", "--quiet"]) == 0


def limited(limit: Callable[[], None], *argv: str, out: Path) -> Ended:
    """Run a command line in a forked process under a limit."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.dont_write_bytecode = True  # under a limit half of it would be written and stay
            limit()
            code = main([*argv, "--json"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = (out / "err").read_text()
    printed = (out / "out").read_text()
    return Ended(code, json.loads(printed or "{}"), text)


def of_files(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def of_memory(more: int) -> Callable[[], None]:
    """As much address space as the process has, and so many bytes more."""

    def limit() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    return limit


def of_a_small_disk(place: Path, size: int) -> Callable[[], None]:
    """A file system of its own that this process alone sees; exit 98 where that is forbidden."""

    def limit() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEWNS) and libc.unshare(NEWUSER | NEWNS):
            os._exit(98)
        libc.mount(b"none", b"/", None, 0x44000, None)  # private: nothing is seen outside
        options = f"size={size}".encode()
        if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, options):
            os._exit(98)

    return limit


def resources(ended: Ended) -> dict[str, str]:
    """The error of a command that ran out of something."""
    assert ended.code == 6, ended.text
    assert "Traceback" not in ended.text
    assert ended.told["error"]["kind"] == "resource"
    assert "--resume" in ended.told["error"]["do"]
    return ended.told["error"]


def test_a_limit_on_the_size_of_files_ends_with_6_and_the_run_goes_on_without_it(
    folder: Path, tmp_path: Path
) -> None:
    size = (folder / "base" / "model.safetensors").stat().st_size
    ended = limited(of_files(size // 2), "sft", "sft.yaml", out=tmp_path)
    error = resources(ended)
    assert "step-000003" in error["where"]
    assert "size of a file" in error["what"]
    run = json.loads((folder / "runs/sft/run.json").read_text())
    assert (run["status"], run["error"]["kind"]) == ("failed", "resource")
    assert not list((folder / "runs/sft/checkpoints").glob("*")), "the space is freed"
    assert main(["sft", "sft.yaml", "--resume"]) == 0


def test_a_full_disk_ends_with_6_and_the_checkpoint_before_loads(
    folder: Path, tmp_path: Path
) -> None:
    place, kept = folder / "runs", tmp_path / "kept"
    place.mkdir()
    size = (folder / "base" / "model.safetensors").stat().st_size

    def limit() -> None:
        room.free_disk = lambda folder: 1 << 40  # type: ignore[assignment]  # others fill it
        of_a_small_disk(place, 14 * size)()
        # What is on this disk goes with its last process.
        real = os._exit
        os._exit = lambda code: (shutil.copytree(place, kept), real(code))  # type: ignore

    settings = ["train.max_steps=40", "checkpoint.every=2", "checkpoint.keep=40"]
    ended = limited(limit, "sft", "sft.yaml", *settings, out=tmp_path)
    if ended.code == 98:
        pytest.skip("this process may not mount a file system")
    error = resources(ended)
    assert "the disk is full" in error["what"]
    assert "free some space" in error["do"]
    found = checkpoint.newest(kept / "sft" / "checkpoints", print)
    assert found is not None
    assert checkpoint.load(found).state["step"] >= 2
    assert f"step-{checkpoint.load(found).state['step'] + 2:06d}" in error["where"]


@pytest.fixture
def large(folder: Path) -> str:
    """A policy of 77 MB, most of it rows of the embedding that no token has."""
    return Project(folder).model("large", spare_rows=600_000)


@pytest.mark.parametrize(
    ("stage", "limits", "doing"),
    [
        ("sft sft.yaml", (24,), ("loading a model",)),
        ("train-rm rm.yaml", (24,), ("loading a model",)),
        ("ppo ppo.yaml", (24,), ("loading a model",)),
        ("sft sft.yaml", range(160, 480, 40), ("a forward or backward pass", "an optimiser step")),
    ],
)
def test_a_limit_on_memory_ends_with_6_and_names_budget_and_key(
    stage: str,
    limits: Sequence[int],
    doing: tuple[str, ...],
    large: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    # How much is free for a step depends on what the process has reserved before.
    settings = ["train.tokens_per_micro_batch=4096", f"model={large}", "--overwrite"]
    told = []
    for more in limits:
        ended = limited(of_memory(more * MEBIBYTE), *stage.split(), *settings, out=tmp_path)
        if ended.code == 0:
            continue
        error = resources(ended)
        assert "micro-batches of 4096 tokens" in error["what"]
        assert "lower train.tokens_per_micro_batch (now 4096" in error["do"]
        assert ("rollout.batch_size (now 4)" in error["do"]) is stage.startswith("ppo")
        told.append(error["what"])
    assert any(f"out of memory in {words}" in what for what in told for words in doing), told


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_full_disk_behind_stdout_ends_with_6(flags: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "rlhf_cli", "config", "schema", "sft", *flags],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
    assert ended.returncode == 6, ended.stderr
    assert ended.stderr.startswith("error: the disk is full")
    assert "Traceback" not in ended.stderr
    assert "--resume" not in ended.stderr  # which this command does not have


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("argv", "code"), [(["schema", "sft"], 6), (["schema", "sftt"], 2)])
def test_the_exit_code_needs_no_room_for_the_message(
    argv: list[str], code: int, unbuffered: str
) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "rlhf_cli", "config", *argv],
            stdout=full,
            stderr=full,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            cwd=Path(__file__).parents[2],
        )
    assert ended.returncode == code


def ppo_config() -> Any:
    values = {"model": "base", "data": {"train": "x"}, "output": "runs/ppo"}
    return resolve({"stage": "ppo", "reward": {"path": "reward"}, **values})


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes do not match"), False),
        (OSError(28, "No space left on device"), False),
        (DataError("line 3 says out of memory", do="mend it"), False),
    ],
)
def test_a_failed_allocation_is_known_by_its_many_names(error: Exception, short: bool) -> None:
    assert memory.is_short(error) is short
    wrapped = CheckpointError("cannot be loaded", do="copy it")
    wrapped.__cause__ = error
    assert memory.is_short(wrapped) is short


def test_what_was_being_done_is_told_from_the_part_at_work() -> None:
    def fail(where: dict[str, Any]) -> Exception:
        exec("def work():\n    raise MemoryError('9 bytes')", where)
        try:
            where["work"]()
        except MemoryError as error:
            return error
        raise AssertionError

    told = memory.explain(fail({"__name__": "stages.rollout"}), ppo_config(), 7)
    assert told.exit_code == 6
    assert "sampling and scoring answers" in told.what
    assert told.where == "ppo, after step 7"
    assert "9 bytes" in told.what
    for part in ("load", "source", "configured"):
        told = memory.explain(fail({"__name__": f"stages.models.{part}"}), ppo_config(), 0)
        assert "loading a model" in told.what


@pytest.mark.parametrize("part", memory.PARTS)
def test_what_a_part_does_is_said_of_a_module_that_exists(part: str) -> None:
    assert importlib.util.find_spec(part) is not None
