"""The run folder: one run at a time, nothing of others touched, models never half replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from stages.errors import CheckpointError, ConfigError
from stages.runtime import run_dir
from stages.runtime.run_dir import (
    clear,
    hash_of,
    locked,
    mend,
    occupied,
    publish,
    read_run,
    weights_hash,
    write_run,
    write_text,
)


def files(folder) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_two_runs_cannot_write_into_one_folder(tmp_path):
    folder = tmp_path / "runs" / "sft"
    with locked(folder):
        with pytest.raises(ConfigError, match="another run") as caught, locked(folder):
            pass
        assert str(folder) in caught.value.where
    with locked(folder):
        pass


def test_a_lock_holds_against_another_process_and_dies_with_it(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from stages.runtime.run_dir import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.readline()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd(),
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another run"), locked(tmp_path):
            pass
    finally:
        child.kill()
        child.communicate()
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), locked(tmp_path / "file" / "run"):
        pass


def test_a_lock_alone_does_not_occupy_a_folder(tmp_path):
    assert not occupied(tmp_path / "not there")
    with locked(tmp_path):
        assert not occupied(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert occupied(tmp_path)


def test_clearing_deletes_what_the_tool_writes_and_nothing_else(tmp_path):
    ours = ("config.yaml", "metrics.jsonl", "samples.jsonl", "model/config.json",
            "last/a", "model_ema/a", "critic/a", "checkpoints/step-000001/COMPLETE",
            ".tmp-model/a", ".old-model/a", ".tmp-run.json", "cache/a")  # fmt: skip
    theirs = (".lock", "run.json", "notes.txt", "plots/loss.png", "models/config.json", ".tmp",
              "run.json.bak")  # fmt: skip
    for name in (*ours, *theirs):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    clear(tmp_path)
    assert files(tmp_path) == set(theirs)


def test_clearing_removes_a_link_and_leaves_what_it_leads_to(tmp_path):
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model").symlink_to(elsewhere)
    clear(folder)
    assert not (folder / "model").is_symlink()
    assert (elsewhere / "file").exists()


def writer(text: str):
    def write(folder):
        assert list(folder.iterdir()) == []
        (folder / "config.json").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(text)

    return write


def content(folder, name="model") -> str:
    return (folder / name / "config.json").read_text()


def test_a_published_model_takes_the_place_of_the_one_before(tmp_path):
    for text in ("one", "two", "three"):
        assert publish(tmp_path, "model", writer(text)) == tmp_path / "model"
        assert content(tmp_path) == text
        assert {p.name for p in tmp_path.iterdir()} == {"model"}


class Killed(BaseException):
    """Nothing after it runs."""


def test_a_kill_while_a_model_is_written_leaves_the_one_before(tmp_path):
    publish(tmp_path, "model", writer("one"))

    def write(folder):
        (folder / "config.json").write_text("half")
        raise Killed

    with pytest.raises(Killed):
        publish(tmp_path, "model", write)
    assert content(tmp_path) == "one"
    mend(tmp_path)
    assert files(tmp_path) == {"model/config.json", "model/sub/file"}


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_a_kill_between_the_renames_is_mended(tmp_path, monkeypatch, nth):
    """The renames and flushes of a replacement, each once the last that happens."""
    publish(tmp_path, "model", writer("one"))
    moments = iter(range(100))

    def deadly(real):
        def run(*args, **options):
            if next(moments) == nth:
                raise Killed
            return real(*args, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(run_dir.Path, "rename", deadly(run_dir.Path.rename))
        patch.setattr(run_dir, "flush", deadly(run_dir.flush))
        with pytest.raises(Killed):
            publish(tmp_path, "model", writer("two"))
    mend(tmp_path)
    assert content(tmp_path) == ("one" if nth < 3 else "two")
    assert {p.name for p in tmp_path.iterdir()} == {"model"}
    publish(tmp_path, "model", writer("three"))
    assert content(tmp_path) == "three"


def test_an_old_model_that_could_not_be_deleted_does_not_stop_the_next(tmp_path):
    publish(tmp_path, "model", writer("one"))
    (tmp_path / ".old-model").mkdir()
    (tmp_path / ".old-model" / "config.json").write_text("zero")
    publish(tmp_path, "model", writer("two"))
    assert content(tmp_path) == "two"
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_mending_touches_no_model_that_is_whole(tmp_path):
    for name in ("model", "last", "critic", "model_ema"):
        publish(tmp_path, name, writer(name))
    before = files(tmp_path)
    mend(tmp_path)
    assert files(tmp_path) == before


def test_run_json_comes_back_and_a_broken_one_is_refused(tmp_path):
    assert read_run(tmp_path) is None
    write_run(tmp_path, {"status": "done", "text": "ü"})
    assert read_run(tmp_path) == {"status": "done", "text": "ü"}
    assert files(tmp_path) == {"run.json"}
    with pytest.raises(ValueError, match="JSON"):
        write_run(tmp_path, {"loss": float("nan")})
    assert read_run(tmp_path) == {"status": "done", "text": "ü"}
    for text in ("{", "[]", "{}"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read") as caught:
            read_run(tmp_path)
        assert caught.value.where.endswith("run.json")
        assert "--overwrite" in caught.value.do


def test_a_text_is_replaced_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_text(path, "one")

    def deadly(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_dir.os, "replace", deadly)
        with pytest.raises(Killed):
            write_text(path, "two")
    assert path.read_text() == "one"
    write_text(path, "two")
    assert path.read_text() == "two"


def test_hashes_depend_on_content_and_not_on_the_order_of_keys(tmp_path):
    assert hash_of({"a": 1, "b": [2]}) == hash_of(json.loads('{"b": [2], "a": 1}'))
    assert hash_of({"a": 1}) != hash_of({"a": 2})
    assert weights_hash(tmp_path) == ""
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = weights_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert weights_hash(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert weights_hash(tmp_path) != first


def test_surroundings_name_versions_and_folder():
    told = run_dir.surroundings()
    assert {"python", "torch", "transformers", "rlhf-cli"} <= told["versions"].keys()
    assert told["cwd"] == os.getcwd()
