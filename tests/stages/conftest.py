"""A tiny project in a folder of its own, which is the current one while a test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.project import Project, enter, make_models


@pytest.fixture
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with data and no models."""
    return enter(tmp_path, monkeypatch)


@pytest.fixture
def project(empty_project: Project) -> Project:
    """A project with a Llama as base model and a random reward model of the same vocabulary."""
    make_models(empty_project)
    return empty_project
