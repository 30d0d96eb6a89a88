"""The growth curves as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

PICTURE = Path(__file__).parents[1] / "docs" / "performance.svg"
COLUMNS = 4
TIME, MEMORY = "#1f6f8b", "#c8553d"


def draw(growth: Mapping[str, Any], path: Path) -> None:
    """A small picture for each axis: seconds on the left, memory on the right, from 0 up."""
    axes: dict[str, list[dict[str, Any]]] = {}
    for point in growth["points"]:
        axes.setdefault(point["axis"], []).append(point)
    rows = -(-len(axes) // COLUMNS)
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "rlhf"
    figure, places = pyplot.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 3 * rows), squeeze=False)
    for place in places.flat[len(axes) :]:
        place.set_visible(False)
    for place, (name, points) in zip(places.flat, axes.items(), strict=False):
        values = [point["value"] for point in points]
        _line(place, values, [point["seconds"] for point in points], "s", TIME)
        _line(place.twinx(), values, [point["mib"] for point in points], "MiB", MEMORY)
        place.set_title(name, fontsize=10)
        if values[-1] > 16 * values[0]:
            place.set_xscale("log")
        place.set_xticks(values, [_short(value) for value in values], fontsize=8)
        place.minorticks_off()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _line(place: Any, values: list[int], heights: list[float], unit: str, colour: str) -> None:
    place.plot(values, heights, marker="o", color=colour)
    place.set_ylim(bottom=0)
    place.set_ylabel(unit, color=colour)
    place.tick_params(axis="y", colors=colour, labelsize=8)


def _short(value: int) -> str:
    """Such as 8k or 135M."""
    for unit, name in ((1_000_000, "M"), (1024, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return str(value)
