"""Experiment trackers through accelerate: tensorboard, wandb and the others it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.config import StageConfig
from stages.errors import ConfigError
from stages.runtime.processes import World


def require(config: StageConfig) -> None:
    """Every tracker that the config names can be started.

    Raises:
        ConfigError: a name is unknown, or its package is missing.
    """
    if not config.log.trackers:
        return
    from accelerate.tracking import get_available_trackers

    known = _known()
    available = {str(name) for name in get_available_trackers()}
    for name in config.log.trackers:
        if name not in known:
            raise ConfigError(
                f"there is no tracker {name!r}",
                where="log.trackers",
                do=f"name one of {', '.join(sorted(known))}",
            )
        if name not in available:
            raise ConfigError(
                f"the package of tracker {name!r} is not installed",
                where="log.trackers",
                do=f"install it (pip install {name}), or take it out of log.trackers",
            )


def start(config: StageConfig, folder: Path, world: World) -> list[Any]:
    """Start the trackers that the config names, in the main process."""
    if not config.log.trackers or not world.main:
        return []
    from accelerate import PartialState

    PartialState(cpu=config.device == "cpu")
    known = _known()
    return [_tracker(known[name], folder) for name in config.log.trackers]


def _known() -> dict[str, Any]:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return {str(name): kind for name, kind in LOGGER_TYPE_TO_CLASS.items()}


def finish(trackers: list[Any]) -> None:
    """Close the trackers."""
    for tracker in trackers:
        tracker.finish()


def _tracker(kind: Any, folder: Path) -> Any:
    options = {"logging_dir": str(folder / "trackers")} if kind.requires_logging_directory else {}
    tracker = kind(folder.name, **options)
    if hasattr(tracker, "start"):
        tracker.start()
    return tracker
