"""A folder that may only be read and a disk that is full, through every command that writes."""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_cli.app import main
from tests.cli.test_resources import NEWNS, NEWUSER, limited

READ_ONLY = 1  # MS_RDONLY of <sys/mount.h>
PRIVATE = 0x44000  # MS_REC | MS_PRIVATE: nothing is seen outside of this process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts as Linux keeps them")


def mounted(place: Path, *, pages: int, flags: int = 0) -> Callable[[], None]:
    """A file system that this process alone sees, full or not to be written; else exit 98."""

    def mount() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEWNS) and libc.unshare(NEWUSER | NEWNS):
            os._exit(98)
        libc.mount(b"none", b"/", None, PRIVATE, None)
        options = f"size={pages * 4096}".encode()
        if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", flags, options):
            os._exit(98)
        if not flags:
            (place / "full").write_bytes(bytes(pages * 4096))

    return mount


def refused(mount: Callable[[], None], argv: str, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and error of a command on that file system."""
    ended = limited(mount, *shlex.split(argv), out=tmp_path)
    if ended.code == 98:
        pytest.skip("this process may not mount a file system")
    assert "Traceback" not in ended.text
    assert ended.told["exit"] == ended.code
    return ended.code, ended.told["error"]


@pytest.fixture
def folder(folder: Path) -> Path:
    """The project, with a folder ``disk`` for another file system."""
    (folder / "disk").mkdir()
    return folder


WRITES = {
    "sft": "sft sft.yaml output=disk/run",
    "train-rm": "train-rm rm.yaml output=disk/run",
    "ppo": "ppo ppo.yaml output=disk/run",
    "check": "check sft.yaml output=disk/run",
    "dump": "check sft.yaml --dump disk/dump.jsonl",
    "sample": "sample base prompts.jsonl --output disk/answers.jsonl --max-new-tokens 2",
    "convert": "data convert demonstrations.jsonl --to trl --output disk/out.jsonl",
    "init": "init disk/project",
}


@pytest.mark.parametrize("name", WRITES)
def test_a_folder_that_may_only_be_read_is_a_mistake_in_the_config(
    name: str, folder: Path, tmp_path: Path
) -> None:
    mount = mounted(folder / "disk", pages=64, flags=READ_ONLY)
    code, error = refused(mount, WRITES[name], tmp_path)
    assert code == 2, error
    assert error["kind"] == "config"
    assert "cannot be written" in error["what"]
    assert "disk/" in error["where"]
    assert error["do"]


@pytest.mark.parametrize("name", [name for name in WRITES if name != "init"])
def test_a_full_disk_is_want_of_a_resource(name: str, folder: Path, tmp_path: Path) -> None:
    code, error = refused(mounted(folder / "disk", pages=1), WRITES[name], tmp_path)
    assert code == 6, error
    assert error["kind"] == "resource"
    assert "MiB are needed" in error["what"] or "the disk is full" in error["what"]
    assert "free some space" in error["do"]


def test_the_same_commands_pass_where_there_is_room(folder: Path) -> None:
    for n, argv in enumerate(WRITES.values()):
        (folder / str(n)).mkdir()
        argv = argv.replace("disk/", f"{n}/")
        assert main([*shlex.split(argv), "--quiet"]) == 0, argv
