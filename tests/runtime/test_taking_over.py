"""Who may write into a run folder, and what a start finds after a kill at the worst moment."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from stages.errors import CheckpointError, ConfigError, ResourceError
from stages.runtime import opening, run_dir, session
from stages.runtime.opening import begin
from stages.runtime.run_dir import locked
from tests.runtime import test_session
from tests.runtime.faults import Disk, failing, watch
from tests.runtime.test_session import finish, read, run, trained

make = test_session.make


def test_a_lock_file_that_was_replaced_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before leaves with its lock, and a third one makes another, between two calls."""
    real = fcntl.flock

    def late(file: Any, how: int) -> None:
        real(file, how)
        (tmp_path / ".lock").unlink()
        (tmp_path / ".lock").write_text("")

    monkeypatch.setattr(run_dir.fcntl, "flock", late)
    with pytest.raises(ConfigError, match="another run"), locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_named_and_not_called_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir.fcntl, "flock", lambda *_: failing(37)())
    with pytest.raises(ConfigError, match="cannot be locked") as caught, locked(tmp_path):
        pass
    assert "another run" not in caught.value.what


def test_a_finished_run_without_checkpoints_is_not_started_over_by_resume(
    make: Any,
    tmp_path: Path,
) -> None:
    with run(make()) as opened:
        begin(opened)
        finish(opened)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    longer = make(train={"precision": "fp64", "epochs": 9})
    with pytest.raises(CheckpointError, match="no checkpoint") as caught, run(longer, resume=True):
        pass
    assert "--overwrite" in caught.value.do
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_start_over_after_a_kill_leaves_nothing_of_the_run_before(
    make: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Overwriting was killed after the new run.json was written: the old model is still there."""
    folder = tmp_path / "run"
    with run(make()) as opened:
        begin(opened)
        opened.publish("critic", lambda made: (made / "config.json").write_text("{}"))
        finish(opened)

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.run_dir, "clear", killed)
        with pytest.raises(KeyboardInterrupt), run(make(seed=1), overwrite=True) as opened:
            begin(opened)
    assert (folder / "critic").exists()
    with run(make(seed=1), resume=True) as opened:
        begin(opened)
    assert not (folder / "critic").exists()


def test_a_full_disk_at_the_very_start_is_told_in_run_json(
    make: Any,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"

    def start() -> None:
        with run(make()) as opened:
            real = opening.write_text

            def full(path: Path, text: str) -> None:
                with watch(Disk(folder, at=0, act=failing(28))):
                    real(path, text)

            opening.write_text = full
            try:
                begin(opened)
            finally:
                opening.write_text = real

    with pytest.raises(ResourceError, match="disk is full"):
        start()
    told = json.loads((folder / "run.json").read_text())
    assert (told["status"], told["error"]["kind"]) == ("failed", "resource")
    assert not list(folder.glob(".tmp*"))


def test_rows_reach_the_disk_before_the_checkpoint_that_counts_them(
    make: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    real = session.checkpoint.save
    monkeypatch.setattr(session, "flush", lambda paths: seen.extend(p.name for p in paths))

    def save(*arguments: Any) -> Path:
        assert seen == ["metrics.jsonl"]
        return real(*arguments)

    monkeypatch.setattr(session.checkpoint, "save", save)
    with run(make()) as opened:
        begin(opened)
        opened.restore(model=trained(make()))
        opened.log("train", {"loss/sft": 1.0})
        opened.save()
    assert read(tmp_path / "run")["status"] == "running"
