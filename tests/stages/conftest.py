"""A tiny project in a folder of its own, which is the current one while a test runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.stages.project import (
    DEMONSTRATIONS,
    DOCUMENTS,
    PROMPTS,
    Project,
    rankings,
)


@pytest.fixture
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with data and no models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RLHF_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    made = Project(tmp_path)
    made.write("demonstrations.jsonl", DEMONSTRATIONS)
    made.write("rankings.jsonl", rankings())
    made.write("prompts.jsonl", PROMPTS)
    made.write("documents.jsonl", DOCUMENTS)
    return made


@pytest.fixture
def project(empty_project: Project) -> Project:
    """A project with a Llama as base model and a random reward model of the same vocabulary."""
    empty_project.model("base", dtype=torch.float64)
    empty_project.model("reward", kind="reward", dtype=torch.float64, seed=1)
    return empty_project
