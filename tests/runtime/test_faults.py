"""Every file operation of every writing fails once and is killed once; what was there stays."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stages.errors import ResourceError
from stages.models import manifest
from stages.runtime import checkpoint, run_dir
from stages.runtime.checkpoint import MARK
from stages.runtime.metrics import append, cut_back
from tests.runtime.faults import (
    Disk,
    failing,
    failing_in_rust,
    in_a_child,
    killed,
    operations,
    watch,
)
from tests.runtime.test_checkpoint import assert_equal, saved, silent

Place = Callable[[Path], Any]


def save_next(folder: Path) -> None:
    checkpoint.save(folder / "checkpoints", 2, saved(2.0))


def save_the_same_step(folder: Path) -> None:
    checkpoint.save(folder / "checkpoints", 1, saved(1.0, minibatch=4))


def rotate(folder: Path) -> None:
    checkpoint.rotate(folder / "checkpoints", keep=1, protect=[])


def model(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file({"weight": torch.arange(99.0)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(text))

    return write


def publish(folder: Path) -> None:
    run_dir.publish(folder, "model", model("second"))


def mend(folder: Path) -> None:
    run_dir.mend(folder)


def overwrite(folder: Path) -> None:
    """The order of ``opening.begin``."""
    run_dir.retire(folder)
    run_dir.write_run(folder, {"status": "running", "new": True})
    run_dir.clear(folder)


def drop(folder: Path) -> None:
    run_dir.drop(folder, "last")


def write_run(folder: Path) -> None:
    run_dir.write_run(folder, {"status": "done"})


def log(folder: Path) -> None:
    append(folder / "metrics.jsonl", {"step": 3, "text": "ü"})


def cut(folder: Path) -> None:
    cut_back(folder / "metrics.jsonl", 1, 0)


def run_folder(folder: Path) -> None:
    """A run with checkpoints, models, rows, and something of the user's in each place."""
    folder.mkdir(parents=True)
    for step in (0, 1):
        checkpoint.save(folder / "checkpoints", step, saved(float(step)))
    run_dir.publish(folder, "model", model("first"))
    run_dir.publish(folder, "last", model("first"))
    run_dir.write_run(folder, {"status": "running"})
    for step in (1, 2):
        append(folder / "metrics.jsonl", {"step": step})
    (folder / "notes.txt").write_text("mine")


def interrupted(folder: Path) -> None:
    """The same, with everything that a kill may leave half done."""
    run_folder(folder)
    (folder / "model").rename(folder / ".old-model")
    old = folder / "checkpoints" / ".old-step-000001"
    (folder / "checkpoints" / "step-000001").rename(old)
    (folder / "checkpoints" / "step-000001").mkdir()
    for name in (".tmp-model", ".tmp-last", ".old-last", ".old-checkpoints"):
        (folder / name).mkdir()
        (folder / name / "half").write_text("")
    (folder / ".tmp-run.json").write_text("{")


WORKS: dict[str, tuple[Place, Place]] = {
    "save": (run_folder, save_next),
    "save the same step": (run_folder, save_the_same_step),
    "rotate": (run_folder, rotate),
    "publish": (run_folder, publish),
    "mend": (interrupted, mend),
    "overwrite": (run_folder, overwrite),
    "drop": (run_folder, drop),
    "run.json": (run_folder, write_run),
    "append": (run_folder, log),
    "cut back": (run_folder, cut),
}
FAULTS: dict[str, dict[str, Any]] = {
    "full": {"act": failing(errno.ENOSPC), "after": True},
    "full in rust": {"act": failing_in_rust(errno.ENOSPC), "after": True},
    "broken": {"act": failing(errno.EIO)},
    "killed before": {"act": killed},
    "killed after": {"act": killed, "after": True},
}

NO_SPACE_KEPT = ("unlink", "rmdir", "mkdir")


def require_whole(folder: Path, work: str) -> None:
    """What the next start finds: one checkpoint that loads, one model, rows, the user's file."""
    assert (folder / "notes.txt").read_text() == "mine"
    run = run_dir.read_run(folder)
    assert run is not None
    for name in ("model", "last"):  # no half of a model is ever seen, not even before mending
        if (folder / name).exists():
            manifest.require(folder / name)
            assert json.loads((folder / name / "config.json").read_text()) in ("first", "second")
            assert (folder / name / "model.safetensors").is_file()
    run_dir.mend(folder)
    assert not [path.name for path in folder.glob(".tmp*")] + [*folder.glob(".old*")]
    found = checkpoint.newest(folder / "checkpoints", silent)
    if work == "overwrite":
        assert found is None or "new" not in run, "a new run beside checkpoints of an earlier one"
        return
    assert found is not None
    got = checkpoint.load(found)
    step = got.state["step"]
    same = work == "save the same step" and "minibatch" in got.state
    assert_equal(got, saved(float(step), minibatch=4) if same else saved(float(step)))
    assert step >= 1
    manifest.require(folder / "model")
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(row)["step"] for row in rows if row.endswith("\n")][:1] == [1]


def again(folder: Path, work: Place) -> None:
    """The same work on a disk that has come to its senses."""
    run_dir.mend(folder)
    if work is cut or work is log:
        cut_back(folder / "metrics.jsonl", 2, 0)
    work(folder)
    assert not [path for path in folder.rglob("*") if path.name.startswith((".tmp", ".old"))]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", WORKS)
def test_whatever_operation_goes_wrong_what_was_there_before_is_whole(
    name: str, fault: str, tmp_path: Path
) -> None:
    make, work = WORKS[name]
    make(tmp_path / "template")
    shutil.copytree(tmp_path / "template", tmp_path / "count")
    log = operations(tmp_path / "count", lambda: work(tmp_path / "count"))
    assert log, "nothing passed by the seam"
    for at, operation in enumerate(log):
        if "rust" in fault and operation != "save_file":
            continue
        folder = tmp_path / f"{at}"
        shutil.copytree(tmp_path / "template", folder)
        disk = Disk(folder, at=at, **FAULTS[fault])
        if "killed" in fault:
            assert in_a_child(disk, lambda folder=folder: work(folder)) == 9, operation
        else:
            with watch(disk):
                told = failure_of(lambda folder=folder: work(folder))
            if told is not None:
                assert told.exit_code == 6
                number = errno.EIO if fault == "broken" else errno.ENOSPC
                assert ("disk is full" if number == errno.ENOSPC else "Input/output") in told.what
                assert told.where.startswith(str(folder))
                assert "--resume" in told.do
                if name in ("save", "publish", "run.json", "cut back") and "open" in log:
                    left = list(folder.rglob(".tmp-*"))
                    assert not left or operation in ("unlink", "rmdir", "mkdir"), (
                        "the space is not freed"
                    )
        require_whole(folder, name)
        again(folder, work)


def failure_of(work: Callable[[], Any]) -> ResourceError | None:
    """The error of a piece of work; None where it got round the fault."""
    try:
        work()
    except ResourceError as error:
        return error
    return None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pathlib opens files past the seam")
def test_the_seam_sees_every_operation_of_a_save(tmp_path: Path) -> None:
    """Held against the list of what a save has to do."""
    run_folder(tmp_path / "run")
    log = operations(tmp_path / "run", lambda: save_next(tmp_path / "run"))
    files = len(saved().tensors) + 2  # state and manifest
    assert log.count("save_file") == len(saved().tensors)
    assert log.count("fsync") == files + 1 + 3  # the folder; mark, folder, its parent
    assert log.count("replace") == 1
    assert log.count("write") == log.count("close") == 2
    assert log.index("replace") > max(n for n, name in enumerate(log) if name == "write")


def test_a_checkpoint_without_its_mark_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    log = operations(tmp_path / "run", lambda: save_next(tmp_path / "run"))
    after = len(log) - log[::-1].index("replace")
    (tmp_path / "other").mkdir()
    run_folder(tmp_path / "other" / "run")
    disk = Disk(tmp_path / "other" / "run", at=after, act=killed)
    assert in_a_child(disk, lambda: save_next(tmp_path / "other" / "run")) == 9
    assert not (tmp_path / "other" / "run" / "checkpoints" / "step-000002" / MARK).exists()
    told: list[str] = []
    found = checkpoint.newest(tmp_path / "other" / "run" / "checkpoints", told.append)
    assert found is not None
    assert found.name == "step-000001"
    assert told == ["checkpoint step-000002 is incomplete and is passed over"]
