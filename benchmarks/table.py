"""The tables of a run, and their places in ``docs/performance.md``.

``python -m benchmarks.table`` writes them there again from the stored results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rounds import Round, counted, spread

HERE = Path(__file__).parent
RESULTS, GROWTH = HERE / "results.json", HERE / "growth.json"
PAGE = HERE.parent / "docs" / "performance.md"
HEAD = (
    "work",
    "peer, s",
    "rlhf, s",
    "faster",
    "peer, MiB",
    "rlhf, MiB",
    "memory",
    "tokens/s",
    "of peak",
    "rounds",
)
NOT_MEASURED = "Not measured yet."
GROWTH_HEAD = ("", "value", "tokens", "s", "tokens/s", "MiB")
Row = dict[str, Any]


def row_of(work: str, precision: str, rounds: Sequence[Round], wanted: int) -> Row:
    """A row of ``results.json``: medians over the rounds that count, and their ranges."""
    used = counted(rounds, wanted)
    peer = spread([r.peer.seconds for r in used])
    ours = spread([r.ours.seconds for r in used])
    peer_mib = spread([r.peer.mib for r in used]).median
    mib = spread([r.ours.mib for r in used]).median
    last = used[-1].ours
    peaks = [r.ours.peak for r in rounds if r.ours.peak]
    return {
        "work": work,
        "precision": precision,
        "peer_seconds": round(peer.median, 3),
        "seconds": round(ours.median, 3),
        "ratio": round(peer.median / ours.median, 2),
        "peer_mib": round(peer_mib),
        "mib": round(mib),
        "memory_ratio": round(mib / peer_mib, 3) if peer_mib else None,
        "tokens_per_second": round(last.tokens / ours.median) if last.tokens else None,
        "share_of_peak": round(last.flops / ours.median / max(peaks), 3) if last.flops else None,
        "rounds": len(used),
        "disturbed": sum(not r.clean for r in used),
        "repeated": len(rounds) - len(used),
        "peer_range": [round(peer.low, 3), round(peer.high, 3)],
        "range": [round(ours.low, 3), round(ours.high, 3)],
        "peer_import_mib": round(used[-1].peer.import_mib),
        "import_mib": round(last.import_mib),
        "peak_gflops": round(max(peaks) / 1e9, 1) if peaks else None,
        "peer_learned": used[-1].peer.learned,
        "learned": last.learned,
    }


def render(results: Mapping[str, Any]) -> str:
    """The markdown of a run of ``make bench``."""
    parts = ["\n".join(_about(results))]
    parts.append(markdown(HEAD, [_cells(row) for row in results["rows"]]))
    if start := results.get("start"):
        parts.append(
            f"The imports alone (`import torch, transformers` and the model's class) take "
            f"{_seconds(start['imports'], start['imports_range'])} s; the first step of `rlhf sft` "
            f"is done {start['beyond']:.1f} s later, the peer's {start['peer_beyond']:.1f} s later."
        )
    if learning := results.get("learning"):
        parts.append("What both sides learned from the same records, judged by the same code:")
        rows = [_learning_cells(row) for row in learning]
        parts.append(markdown(("", "before", "peer", "rlhf"), rows))
    if failed := results.get("failed"):
        parts.append(f"Failed, and therefore not shown: {', '.join(failed)}.")
    return "\n\n".join(parts)


def _about(results: Mapping[str, Any]) -> Iterator[str]:
    """Date, machine, versions and settings, as lines of prose."""
    machine, versions = results["machine"], results["versions"]
    yield (
        f"{results['date']}, {machine['cpu']}, {machine['cores']} cores "
        f"({machine['vector_units']}), {machine['memory_gib']} GiB, {machine['system']}."
    )
    for side, packages in versions.items():
        yield f"{side}: " + ", ".join(f"{name} {v}" for name, v in packages.items()) + "."
    settings = ", ".join(f"`{name}={value}`" for name, value in results["settings"].items())
    yield f"Both sides: {settings}."
    if "minutes" in results:
        took, before = results["minutes"], results["set_up_minutes"]
        yield f"The run took {took} minutes, and {before} minutes before it to set up."
    if not machine["fast_bf16"]:
        yield "This machine has no fast bf16, so all rows are fp32."


def _cells(row: Row) -> list[str]:
    disturbed = f", {row['disturbed']} disturbed" if row["disturbed"] else ""
    share, speed = row["share_of_peak"], row["tokens_per_second"]
    return [
        f"{row['work']} ({row['precision']})",
        _seconds(row["peer_seconds"], row["peer_range"]),
        _seconds(row["seconds"], row["range"]),
        f"{row['ratio']:.1f}×",
        f"{row['peer_mib']:,}" if row["peer_mib"] else "",
        f"{row['mib']:,}" if row["mib"] else "",
        f"{row['memory_ratio']:.2f}×" if row["memory_ratio"] else "",
        f"{speed:,}" if speed else "",
        f"{100 * share:.0f} %" if share else "",
        f"{row['rounds']}{disturbed}",
    ]


def _seconds(median: float, ends: Sequence[float]) -> str:
    """Median and range, such as ``36.9 (35.0–38.2)``."""
    digits = 1 if median >= 10 else 2
    low, high = (f"{value:.{digits}f}" for value in ends)
    return f"{median:.{digits}f} ({low}–{high})"


def _learning_cells(row: Row) -> list[str]:
    return [row["what"], *(_values(row[side]) for side in ("before", "peer", "rlhf"))]


def _values(values: Sequence[float]) -> str:
    """A value, or the mean and range of the seeds."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    mean = sum(values) / len(values)
    return f"{mean:.3f} ({min(values):.3f}–{max(values):.3f})"


def render_growth(growth: Mapping[str, Any]) -> str:
    """The markdown of a run of ``make bench-growth``."""
    machine = growth["machine"]
    about = (
        f"{growth['date']}, {machine['cpu']}, {machine['cores']} cores, {growth['precision']}, "
        "one reading each."
    )
    rows = [
        [
            point["axis"],
            f"{point['value']:,}",
            f"{point['tokens']:,}",
            f"{point['seconds']:.2f}",
            f"{point['tokens'] / point['seconds']:,.0f}",
            f"{point['mib']:,.0f}",
        ]
        for point in growth["points"]
    ]
    return f"{about}\n\n{markdown(GROWTH_HEAD, rows)}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def block(page: str, name: str) -> str:
    """What stands between the marks of a block."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end of {name} -->", page, re.DOTALL)
    assert found, f"the page has no block {name}"
    return found[1]


def with_block(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of a block."""
    old = f"<!-- {name} -->\n{block(page, name)}\n"
    return page.replace(old, f"<!-- {name} -->\n{text}\n")


def blocks() -> dict[str, str]:
    """What the stored results put on the page."""
    renderers = {"results": (RESULTS, render), "growth": (GROWTH, render_growth)}
    return {
        name: write(json.loads(path.read_text(encoding="utf-8")))
        for name, (path, write) in renderers.items()
        if path.is_file()
    }


def update_page() -> None:
    """Put the stored results on the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in blocks().items():
        page = with_block(page, name, text)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    update_page()
