"""The table and the picture of ``docs/methods.md``, from the rows of ``make compare``.

``python -m benchmarks.methods_page`` makes them again from the stored results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.table import markdown, with_block

RESULTS = Path(__file__).parent / "compare.json"
PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
PICTURE = PAGE.with_suffix(".svg")
BLOCK = "comparison"
HEAD = (
    "method",
    "true score",
    "gain over sft",
    "reward model's score",
    "KL",
    "wins against sft",
    "tokens",
    "s",
    "MiB",
)
Row = Mapping[str, Any]


def line(row: Row) -> str:
    """A row as one line for a person who waits."""
    return (
        f"{row['method']:<12} seed {row['seed']}  true score {row['true_score']:.3f}  "
        f"score {row['score']:.2f}  KL {row['kl']:.2f}  {row['seconds']:.0f} s"
    )


def render(results: Mapping[str, Any]) -> str:
    """The markdown of a comparison."""
    rows, where = results["rows"], results["machine"]
    seeds = sorted({row["seed"] for row in rows})
    about = (
        f"{results['date']}, {where['cpu']}, {where['cores']} cores; means over the seeds "
        f"{', '.join(map(str, seeds))}, in brackets their range; {results['minutes']} minutes."
    )
    start = {row["seed"]: row["true_score"] for row in rows if row["method"] == "sft"}
    cells = [_cells(method, own, start) for method, own in by_method(rows)]
    chosen = [_best_of_cells(n, points, start) for n, points in _by_n(results["best_of"]) if n > 1]
    return f"{about}\n\n{markdown(HEAD, [*cells, *chosen])}"


def by_method(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The methods in the order of the rows, each with a row for each seed."""
    for method in dict.fromkeys(row["method"] for row in rows):
        yield method, [row for row in rows if row["method"] == method]


def _by_n(points: Sequence[Row]) -> Iterator[tuple[int, list[Row]]]:
    for n in sorted({point["n"] for point in points}):
        yield n, [point for point in points if point["n"] == n]


def _cells(method: str, rows: Sequence[Row], start: Mapping[int, float]) -> list[str]:
    trained = method != "sft"
    gains = [row["true_score"] - start[row["seed"]] for row in rows]
    return [
        f"`{method}`",
        _spread([row["true_score"] for row in rows], 3),
        f"{mean(gains):+.3f}" if trained else "",
        _spread([row["score"] for row in rows], 2),
        _spread([row["kl"] for row in rows], 2) if trained else "",
        f"{100 * mean(row['win_rate'] for row in rows):.0f} %" if trained else "",
        f"{mean(row['length'] for row in rows):.1f}",
        f"{mean(row['seconds'] for row in rows):.0f}" if trained else "",
        f"{max(row['mib'] for row in rows):,}" if trained else "",
    ]


def _best_of_cells(n: int, points: Sequence[Row], start: Mapping[int, float]) -> list[str]:
    gains = [point["true_score"] - start[point["seed"]] for point in points]
    return [
        f"sft, best of {n}",
        _spread([point["true_score"] for point in points], 3),
        f"{mean(gains):+.3f}",
        "",
        f"{points[0]['kl']:.2f}",
        *[""] * (len(HEAD) - 5),
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean and range, such as ``0.91 (0.90–0.93)``; a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    low, high = min(values), max(values)
    to = " to " if low < 0 else "–"
    return f"{mean(values):.{digits}f} ({low:.{digits}f}{to}{high:.{digits}f})"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """True score over KL: a point for each method and seed, and the curve of best-of-n."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "rlhf"  # the same figures give the same file
    figure, place = pyplot.subplots(figsize=(8, 5))
    points = [(p[0]["kl"], mean(x["true_score"] for x in p)) for _, p in _by_n(results["best_of"])]
    place.plot(*zip(*points, strict=True), color="#888888", linestyle="--", label="best of n")
    colours = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
    trained = [(m, rows) for m, rows in by_method(results["rows"]) if m != "sft"]
    for n, (method, rows) in enumerate(trained):
        place.plot(
            [row["kl"] for row in rows],
            [row["true_score"] for row in rows],
            marker="osD^v"[n % 5],
            linestyle="",
            color=colours[n % len(colours)],
            label=method,
        )
    place.set_xlabel("KL from the SFT model, nats per answer")
    place.set_ylabel("true score")
    place.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def update() -> None:
    """Put the stored results on the page, and draw them."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_block(page, BLOCK, render(results)), encoding="utf-8")
    draw(results, PICTURE)


if __name__ == "__main__":
    update()
