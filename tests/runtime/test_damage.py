"""A damaged file is named: of a checkpoint when it is resumed, of a model when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stages.data.chat_template import CHATML
from stages.errors import CheckpointError
from stages.models.load import load_tokenizer
from stages.models.source import require_weights
from stages.runtime import checkpoint
from stages.runtime.checkpoint import load, save
from stages.runtime.run_dir import publish
from tests.families import save_tiny
from tests.runtime.test_checkpoint import assert_equal, saved
from tests.stages.project import TOKENIZER

Spoil = Callable[[Path], object]


def flip(file: Path) -> None:
    """One bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def gone(file: Path) -> None:
    file.unlink()


def test_the_hash_is_that_of_the_values_in_memory_and_not_of_what_the_disk_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that changes a bit while a checkpoint is written: loading names the file."""
    real = checkpoint.save_file

    def changing(tensors: object, file: Path) -> None:
        real(tensors, file)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))

    monkeypatch.setattr(checkpoint, "save_file", changing)
    path = save(tmp_path / "checkpoints", 1, saved())
    with pytest.raises(CheckpointError, match="is not what was written") as caught:
        load(path)
    assert caught.value.where == str(path / "model.safetensors")


@pytest.mark.parametrize("values", [{}, {"none": torch.zeros(0, 3)}, {"one": torch.tensor(True)}])
def test_tensors_of_any_size_and_kind_have_the_hash_of_their_file(
    values: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.bool)
    values = values | {str(kind): torch.ones(3, 2).to(kind).T for kind in kinds}
    path = save(tmp_path / "checkpoints", 1, checkpoint.Saved({"model": values}, {}))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["model.safetensors"]["xxh3_128"] == checkpoint.digest(
        path / "model.safetensors"
    )
    assert_equal(load(path), checkpoint.Saved({"model": values}, {}))


def test_a_state_of_the_same_step_that_has_moved_on_is_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = save(folder, 3, saved(minibatch=4))
    before = (first / "manifest.json").stat().st_ino
    save(folder, 3, saved(minibatch=4, seconds=99.0))
    assert (first / "manifest.json").stat().st_ino == before, "only the clock had moved on"
    save(folder, 3, saved(minibatch=0))
    assert load(first).state["minibatch"] == 0
    assert [path.name for path in folder.iterdir()] == ["step-000003"]


def test_weights_that_are_no_part_of_a_checkpoint_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1, saved())
    save_file({"a": torch.zeros(1)}, path / "critic.safetensors")
    with pytest.raises(CheckpointError, match="no part of this checkpoint") as caught:
        load(path)
    assert caught.value.where == str(path / "critic.safetensors")


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "null", '{"state.json": 1}', '{"state.json": {"bytes": 1}}',
     '{"../state.json": {"bytes": 1, "xxh3_128": ""}}', "[" * 9999,
     '{"%s": {"bytes": 1, "xxh3_128": ""}}' % ("x" * 256)],
)  # fmt: skip
def test_a_manifest_that_says_nothing_is_named(text: str, tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1, saved())
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert caught.value.where == str(path / "manifest.json")
    assert "resume from the one before" in caught.value.do


def write_model(folder: Path) -> None:
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in parts.items():
        save_file({name: torch.arange(99.0)}, folder / file)
    index = {"metadata": {}, "weight_map": parts}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(("spoil", "told"), [(flip, "hash is another"), (cut, ""), (gone, "")])
def test_damaged_weights_of_a_finished_model_are_named(
    spoil: Spoil, told: str, tmp_path: Path
) -> None:
    publish(tmp_path, "model", write_model)
    require_weights(str(tmp_path))
    spoil(tmp_path / "model" / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError) as caught:
        require_weights(str(tmp_path))
    assert "model-00002-of-00002.safetensors" in str(caught.value)
    assert told in str(caught.value)


def write_whole_model(folder: Path) -> None:
    save_tiny(folder, "llama", TOKENIZER)
    (folder / "chat_template.jinja").write_text(CHATML)


@pytest.mark.parametrize("spoil", [flip, cut, gone])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_file_that_is_damaged_is_named(spoil: Spoil, name: str, tmp_path: Path) -> None:
    publish(tmp_path, "model", write_whole_model)
    load_tokenizer(str(tmp_path))
    spoil(tmp_path / "model" / name)
    for read in (load_tokenizer, require_weights):
        with pytest.raises(CheckpointError) as caught:
            read(str(tmp_path))
        assert caught.value.where == str(tmp_path / "model" / name)
        assert "delete manifest.json" in caught.value.do


def test_a_tokenizer_is_read_without_a_look_at_the_weights(tmp_path: Path) -> None:
    publish(tmp_path, "model", write_whole_model)
    flip(tmp_path / "model" / "model.safetensors")
    load_tokenizer(str(tmp_path))


def test_a_folder_of_another_tool_or_of_an_earlier_version_is_read_as_it_is(tmp_path: Path) -> None:
    write_whole_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("changed")
    load_tokenizer(str(tmp_path))
    weights = tmp_path / "model.safetensors"
    facts = {"bytes": weights.stat().st_size, "xxh3_128": checkpoint.digest(weights)}
    (tmp_path / "manifest.json").write_text(json.dumps({weights.name: facts}))
    load_tokenizer(str(tmp_path))
    require_weights(str(tmp_path))


def test_settings_of_a_model_may_be_edited_and_weights_after_a_word(tmp_path: Path) -> None:
    publish(tmp_path, "model", write_model)
    (tmp_path / "model" / "config.json").write_text('{"mean": 1}')
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    (tmp_path / "model" / "README.md").write_text("mine")
    require_weights(str(tmp_path))
    save_file({"b": torch.zeros(5)}, tmp_path / "model" / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="bytes") as caught:
        require_weights(str(tmp_path))
    assert "delete manifest.json" in caught.value.do
    (tmp_path / "model" / "manifest.json").unlink()
    require_weights(str(tmp_path))
