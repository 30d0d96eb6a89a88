"""A checkpoint is complete or not there, and a kill at any moment leaves the one before it."""

from __future__ import annotations

import json
import os

import pytest
import torch

from stages.errors import CheckpointError
from stages.runtime import checkpoint
from stages.runtime.checkpoint import MARK, Saved, load, newest, rotate, save, step_of


def saved(number: float = 1.0, **state) -> Saved:
    generator = torch.Generator().manual_seed(int(number))
    tensors = {
        "model": {
            "a.weight": torch.randn(5, 3, generator=generator),
            "a.turned": torch.randn(3, 5, generator=generator).T,
            "half": torch.randn(4, generator=generator).bfloat16(),
        },
        "optimizer_model": {"a.weight.step": torch.tensor(number)},
        "rollout": {"ids": torch.arange(7), "mask": torch.tensor([True, False])},
    }
    return Saved(tensors, {"step": int(number), "seconds": 0.5, "text": "ü", **state})


def assert_equal(got: Saved, expected: Saved) -> None:
    assert got.state == expected.state
    assert got.tensors.keys() == expected.tensors.keys()
    for name, group in expected.tensors.items():
        assert got.tensors[name].keys() == group.keys()
        for key, value in group.items():
            assert got.tensors[name][key].dtype == value.dtype
            assert torch.equal(got.tensors[name][key], value)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def silent(_: str) -> None:
    """Nobody listens."""


def test_what_is_saved_comes_back_bit_by_bit(folder):
    path = save(folder, 500, saved(3.0))
    assert path == folder / "step-000500"
    assert_equal(load(path), saved(3.0))
    files = {p.name for p in path.iterdir()}
    assert files == {
        "model.safetensors", "optimizer_model.safetensors", "rollout.safetensors",
        "state.json", "manifest.json", "COMPLETE",
    }  # fmt: skip
    assert not list(folder.glob(".tmp*"))


def test_an_empty_group_of_tensors_comes_back_empty(folder):
    path = save(folder, 0, Saved({"optimizer_model": {}}, {}))
    assert load(path).tensors == {"optimizer_model": {}}


def test_the_newest_complete_checkpoint_is_taken_by_number(folder):
    for step in (900_000, 1_000_000, 20_000):  # the first two are not in order as texts
        save(folder, step, saved(step))
    found = newest(folder, silent)
    assert found is not None
    assert step_of(found) == 1_000_000
    rotate(folder, keep=2, protect=[])
    assert steps(folder) == [900_000, 1_000_000]
    rotate(folder, keep=1, protect=[])
    assert steps(folder) == [1_000_000]


def test_an_incomplete_checkpoint_is_passed_over_with_a_notice(folder):
    for step in (1, 2, 3):
        save(folder, step, saved(step))
    (folder / "step-000003" / MARK).unlink()
    told: list[str] = []
    found = newest(folder, told.append)
    assert found is not None
    assert found.name == "step-000002"
    assert len(told) == 1
    assert "step-000003" in told[0]


def test_no_checkpoint_is_none(folder):
    assert newest(folder, silent) is None
    folder.mkdir()
    assert newest(folder, silent) is None


def test_an_incomplete_checkpoint_of_the_same_step_is_written_anew(folder):
    path = save(folder, 7, saved(1.0))
    (path / MARK).unlink()
    (path / "model.safetensors").write_bytes(b"torn")
    assert_equal(load(save(folder, 7, saved(2.0))), saved(2.0))


def test_a_complete_checkpoint_of_the_same_step_is_kept(folder):
    path = save(folder, 7, saved(1.0))
    before = {p.name: p.stat().st_mtime_ns for p in path.iterdir()}
    assert save(folder, 7, saved(1.0)) == path
    assert {p.name: p.stat().st_mtime_ns for p in path.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "rollout.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "longer"])
def test_a_damaged_file_is_named(folder, name, damage):
    file = save(folder, 1, saved()) / name
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = bytearray(data)
        changed[-1] ^= 1
        file.write_bytes(
            {"cut": data[:-1], "changed": bytes(changed), "longer": data + b" "}[damage]
        )
    with pytest.raises(CheckpointError) as caught:
        load(file.parent)
    assert caught.value.where == str(file)
    assert caught.value.exit_code == 4
    whole = "is not what was written" if damage == "changed" else "is missing or truncated"
    assert whole in caught.value.what


@pytest.mark.parametrize("text", ["", "{", None])
def test_a_damaged_manifest_is_named(folder, text):
    manifest = save(folder, 1, saved()) / "manifest.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load(manifest.parent)
    assert caught.value.where == str(manifest)


def steps(folder) -> list[int]:
    return sorted(step_of(p) for p in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("keep", "protect", "left"),
    [(2, [], [4, 10]), (1, [], [10]), (0, [], [10]), (2, [2], [2, 4, 10]), (99, [], [1, 2, 4, 10]),
     (1, [-1], [10])],
)  # fmt: skip
def test_the_oldest_go_and_neither_the_newest_nor_the_best(folder, keep, protect, left):
    for step in (10, 1, 4, 2):
        save(folder, step, saved(step))
    rotate(folder, keep=keep, protect=protect)
    assert steps(folder) == left


def test_rotation_clears_half_written_ones_but_no_stranger(folder):
    save(folder, 1, saved())
    (folder / ".tmp-step-000002").mkdir()
    (folder / ".tmp-step-000002" / "model.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    rotate(folder, keep=1, protect=[])
    assert {p.name for p in folder.iterdir()} == {"step-000001", "notes.txt"}


class Killed(BaseException):
    """Nothing after it runs."""


CALLS = ("save_file", "digest", "flush", "shutil.rmtree", "os.replace")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_kill_at_any_moment_leaves_the_checkpoint_before_it(folder, monkeypatch, call, nth):
    save(folder, 1, saved(1.0))
    module, _, name = call.rpartition(".")
    owner = getattr(checkpoint, module) if module else checkpoint
    count = iter(range(100))

    def deadly(real):
        def run(*args, **options):
            if next(count) == nth:
                raise Killed
            return real(*args, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, deadly(getattr(owner, name)))
        try:
            save(folder, 2, saved(2.0))
            finished = True
        except Killed:
            finished = (folder / "step-000002" / MARK).exists()
    found = newest(folder, silent)
    assert found is not None
    assert_equal(load(found), saved(2.0) if finished else saved(1.0))
    assert_equal(load(save(folder, 2, saved(2.0))), saved(2.0))
    rotate(folder, keep=1, protect=[])
    assert steps(folder) == [2]


def test_a_kill_while_rotating_leaves_no_checkpoint_that_only_looks_complete(folder, monkeypatch):
    for step in (1, 2):
        save(folder, step, saved(step))

    def deadly(path, **_):
        os.unlink(path / "model.safetensors")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", deadly)
        with pytest.raises(Killed):
            rotate(folder, keep=1, protect=[])
    assert not (folder / "step-000001" / MARK).exists()
    found = newest(folder, silent)
    assert found is not None
    assert_equal(load(found), saved(2))


def test_the_state_holds_no_number_that_is_no_json(folder):
    with pytest.raises(ValueError, match="JSON"):
        save(folder, 1, saved(1.0, loss=float("nan")))
    assert newest(folder, silent) is None


def test_the_manifest_tells_size_and_hash_of_every_file(folder):
    path = save(folder, 1, saved())
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.keys() == {p.name for p in path.iterdir()} - {MARK, "manifest.json"}
    for name, facts in manifest.items():
        assert facts["bytes"] == (path / name).stat().st_size
        assert len(facts["xxh3_128"]) == 32
