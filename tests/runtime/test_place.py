"""Where a run may write: never over what its config reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.config import PpoConfig, RewardModelConfig, SftConfig, StageConfig
from stages.errors import ConfigError
from stages.runtime import place


def sft(**changes: Any) -> StageConfig:
    values = {"model": "base", "output": "run", "data": {"train": "d.jsonl"}}
    return SftConfig.model_validate(values | changes)


def reward(**changes: Any) -> StageConfig:
    values = {"model": "base", "output": "run", "data": {"train": "d.jsonl"}}
    return RewardModelConfig.model_validate(values | changes)


def ppo(**changes: Any) -> StageConfig:
    values = {
        "model": "base",
        "reward": {"path": "rm"},
        "output": "run",
        "data": {"train": "d.jsonl"},
    }
    return PpoConfig.model_validate(values | changes)


READERS = {
    "data.train": lambda path: sft(data={"train": ["d.jsonl", path]}),
    "data.eval": lambda path: sft(data={"train": "d.jsonl", "eval": path}),
    "data.chat_template": lambda path: sft(data={"train": "d.jsonl", "chat_template": path}),
    "sft.pretrain.data": lambda path: sft(sft={"pretrain": {"data": path}}),
    "normalise.demonstrations": lambda path: reward(normalise={"demonstrations": path}),
    "ptx.data": lambda path: ppo(ptx={"coef": 1.0, "data": path}),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("last/mine.jsonl", "samples.jsonl", "notes/mine.jsonl", "run.json"):
        file = Path("run", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}\n")


@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize("path", ["run/last/mine.jsonl", "run/samples.jsonl"])
def test_a_file_that_is_read_and_that_a_run_would_replace_is_refused(key: str, path: str) -> None:
    with pytest.raises(ConfigError, match="which the run reads") as caught:
        place.require(READERS[key](path))
    assert f"{key} ({path})" in caught.value.what
    assert caught.value.where == "output: run"


@pytest.mark.parametrize("named", ["run/la*/*.jsonl", "link.jsonl", "run/../run/last/mine.jsonl"])
def test_a_pattern_or_a_link_does_not_hide_the_file(named: str) -> None:
    Path("link.jsonl").symlink_to("run/last/mine.jsonl")
    with pytest.raises(ConfigError, match="which the run reads"):
        place.require(sft(data={"train": named}))


@pytest.mark.parametrize("path", ["run/notes/mine.jsonl", "d.jsonl", "hub:org/name", "run2/last/a"])
def test_a_file_that_no_run_touches_may_be_read(path: str) -> None:
    place.require(sft(data={"train": path}))


@pytest.mark.parametrize("output", ["runs/" + 300 * "x", "runs/" + "/".join(900 * ["abcd"])])
def test_a_name_that_no_file_system_takes_is_refused(output: str) -> None:
    with pytest.raises(ConfigError, match="too long"):
        place.require(sft(output=output))


def test_a_run_json_that_is_a_folder_is_named() -> None:
    Path("other/run.json").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.json in it is a folder"):
        place.require_free(sft(output="other"), resume=False, overwrite=True)
