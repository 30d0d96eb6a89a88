"""The tiny project of the stage tests, for the stages on a GPU."""

from __future__ import annotations

from tests.stages.conftest import empty_project, project

__all__ = ["empty_project", "project"]
