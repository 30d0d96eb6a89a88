"""The shipped configs and data samples, in an installed wheel and in a source tree."""

from __future__ import annotations

from pathlib import Path

from stages.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent
PLACES = (PACKAGE / "_assets", PACKAGE.parent)
"""Where the folders lie: beside the code in a wheel, at the root of a source tree."""


def asset(relative: str) -> Path:
    """The path of a shipped file or folder, such as ``configs/tiny``.

    Raises:
        ConfigError: the installation lacks it.
    """
    for place in PLACES:
        if (place / relative).exists():
            return place / relative
    raise ConfigError(
        f"{relative} is missing from this installation",
        do="install rlhf-cli again",
        where=str(PACKAGE),
    )
