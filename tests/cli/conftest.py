"""A whole project, a config, and stages that do nothing but what a test asks of them."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.bad_input import make_project


@dataclass(frozen=True)
class FakeResult:
    """The fields of a stage's result."""

    stage: str = "sft"
    status: str = "done"
    output: str = "runs/x"
    model: str = "runs/x/model"
    step: int = 40
    selected: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 83.2
    next: str = "rlhf train-rm configs/reward_model.yaml"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process outside of any world, with the libraries' variables restored."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RLHF_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "TQDM_DISABLE",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_DATASETS_DISABLE_PROGRESS_BARS",
        "HF_HUB_DISABLE_TELEMETRY",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS",
        "TRANSFORMERS_VERBOSITY",
        "TOKENIZERS_PARALLELISM",
    ):
        monkeypatch.setenv(name, "")  # so that its end restores what was there, or was not
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with models, data and configs, made once and never changed."""
    folder = tmp_path_factory.mktemp("template")
    make_project(folder)
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project as the current folder; its caches lie outside of it."""
    copy = tmp_path / "project"
    shutil.copytree(template, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return copy


@pytest.fixture
def result() -> type[FakeResult]:
    """Makes results with other fields than the default ones."""
    return FakeResult


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A valid sft config; nothing that it names exists."""
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"stage: sft\nmodel: base\noutput: {tmp_path / 'runs' / 'sft'}\n"
        "data: {train: demonstrations.jsonl}\n"
    )
    return str(file)


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Puts a module of the given names in the place of a stage's."""

    def install(name: str, **names: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, attribute = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(package), attribute, module, raising=False)
        return module

    return install


@pytest.fixture
def fake_sft(fake_module: Callable[..., ModuleType]) -> Callable[..., list[dict[str, Any]]]:
    """An sft stage that returns a result or raises an error, and keeps what it was called with."""

    def install(outcome: Any = None) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run(config: Any, reporter: Any, **options: Any) -> Any:
            calls.append({"config": config, "reporter": reporter, **options})
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome or FakeResult()

        fake_module("stages.sft", run=run)
        return calls

    return install
