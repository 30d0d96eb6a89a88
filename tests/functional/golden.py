"""Reading golden case files, padding their rows further, and comparing numbers with them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHIPPED = Path(__file__).parents[1] / "golden"
FOLDER = Path(os.environ.get("RLHF_GOLDEN_DIR") or SHIPPED)
DTYPES = {"float64": torch.float64, "float32": torch.float32}

INTEGERS = {"labels", "input_ids", "ptx_ids", "segment_ids", "ranks", "end"}
INTEGERS |= {"len_chosen", "len_rejected"}
MASKS = {"mask", "loss_mask", "ptx_mask", "generate_mask", "has_eos"}
MASKS |= {"chosen_mask", "rejected_mask", "desirable"}
ROW_LISTS = {"microbatches", "minibatches", "shards", "observations", "steps"}

# The case files write a mean over nothing as null, or as 0. A loss over nothing is always 0.
MEANS = {
    *("mean", "mean_entropy", "ratio_mean", "clip_fraction", "explained_variance", "entropy"),
    *(f"approx_kl_{k}" for k in ("k1", "k2", "k3")),
    *(f"{k}_token_mean" for k in ("k1", "k2", "k3")),
    *("accuracy", "mean_margin", "confidence", "ece", "nll", "bias", "demo_mean_after"),
}

# How much further rows are padded: (left, right) of the response arrays, then of the ptx arrays.
PADDINGS = {"as_is": ((0, 0), (0, 0)), "left": ((3, 0), (2, 0)), "right": ((0, 2), (0, 4))}


class Case(NamedTuple):
    """One case and what its file says about tolerances."""

    id: str
    fn: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    tolerances: dict[str, dict[str, float]]
    diagnostics: dict[str, Any]


def read_suites(folder: Path = FOLDER) -> dict[str, list[Case]]:
    """All cases of a folder, by suite."""
    suites: dict[str, list[Case]] = {}
    for path in sorted(folder.glob("*.json")):
        suite = json.loads(path.read_text(encoding="utf-8"))
        assert suite["format"] == 1, f"{path}: format {suite['format']}"
        suites.setdefault(suite["suite"], []).extend(
            Case(
                case["id"],
                case["fn"],
                case["inputs"],
                case["expected"],
                case.get("tol") or suite["default_tol"],
                suite.get("diagnostics") or {"fields": [], "atol": 0.0},
            )
            for case in suite["cases"]
        )
    return suites


def paddings_of(case: Case) -> list[str]:
    """The paddings under which no number of the case may move."""
    if "mask" not in case.inputs and "loss_mask" not in case.inputs:
        return ["as_is"]
    if case.fn.startswith("seed_"):
        return ["as_is"]
    if case.fn == "after_last_advantages":  # room on the right makes the answer's state count
        return ["as_is", "left"]
    return ["as_is", "left", "right"]


def padded(case: Case, padding: str) -> Case:
    """The case with its rows padded further: garbage in the inputs, 0 in what is expected."""
    main, ptx = PADDINGS[padding]
    inputs = dict(case.inputs)
    if padding == "left":
        inputs = _without_first_targets(inputs)
    expected = dict(case.expected)
    for mask, amount in (("mask", main), ("loss_mask", main), ("ptx_mask", ptx)):
        if mask not in inputs or amount == (0, 0):
            continue
        shape = len(inputs[mask]), len(inputs[mask][0])
        ours = _is_ptx if mask == "ptx_mask" else lambda name: not _is_ptx(name)
        inputs = {
            name: _pad_input(name, value, shape, amount) if ours(name) else value
            for name, value in inputs.items()
        }
        expected = _pad_expected(expected, shape[1], amount, ours)
    return case._replace(inputs=inputs, expected=expected)


def tensors(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs of a case as tensors: floats in the dtype under test, null as NaN."""
    return {name: _tensor(name, value, dtype) for name, value in inputs.items()}


def mismatches(case: Case, got: dict[str, Any], precision: str) -> Iterator[str]:
    """What differs between the numbers of a case and those we got, one sentence each."""
    yield from _differences(case, got, case.expected, (), precision)


def run(
    case: Case, adapters: dict[str, Callable[..., dict[str, Any]]], precision: str
) -> list[str]:
    """All mismatches of a case in one precision."""
    if case.fn not in adapters:
        return [f"{case.id}: no adapter for {case.fn}"]
    got = adapters[case.fn](**tensors(case.inputs, DTYPES[precision]))
    return list(mismatches(case, got, precision))


def mismatching(
    cases: Iterable[Case], adapters: dict[str, Callable[..., dict[str, Any]]]
) -> Iterator[str]:
    """The mismatches of many cases in float64, as they are and padded further."""
    for case in cases:
        for padding in paddings_of(case):
            yield from run(padded(case, padding), adapters, "float64")


def _tensor(name: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, list) or name in ROW_LISTS:
        return value
    if name in MASKS:
        return torch.tensor(value, dtype=torch.bool)
    if name in INTEGERS:
        return torch.tensor(_filled(value, 0), dtype=torch.long)
    return torch.tensor(_filled(value, math.nan), dtype=dtype)


def _filled(value: Any, filler: float) -> Any:
    if isinstance(value, list):
        return [_filled(item, filler) for item in value]
    return filler if value is None else value


def _differences(
    case: Case, got: Any, expected: Any, path: tuple[str, ...], precision: str
) -> Iterator[str]:
    where = f"{case.id}: {'.'.join(path)}"
    if isinstance(got, Tensor):
        got = got.detach().tolist()
    if isinstance(expected, dict):
        missing = set(expected) - set(got)
        extra = set(got) - set(expected) if path and path[-1].endswith("_by_k") else set()
        if missing or extra:
            yield f"{where}: fields missing {sorted(missing)}, too many {sorted(extra)}"
        for name in sorted(set(expected) & set(got)):
            yield from _differences(case, got[name], expected[name], (*path, name), precision)
    elif isinstance(expected, list):
        if not isinstance(got, list) or len(got) != len(expected):
            yield f"{where}: shape differs"
            return
        for n, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            yield from _differences(case, ours, theirs, (*path, str(n)), precision)
    elif isinstance(got, (dict, list)) or not _agrees(case, got, expected, path, precision):
        yield f"{where}: got {got}, expected {expected}"


def _agrees(case: Case, got: Any, expected: Any, path: tuple[str, ...], precision: str) -> bool:
    names = [name for name in path if not name.isdigit()]
    got = float(got)
    if math.isnan(got):
        return expected is None or (expected == 0 and names[-1] in MEANS)
    if expected is None:
        return False
    if names[-1] in case.diagnostics["fields"]:
        return abs(got - expected) <= case.diagnostics["atol"]
    tol = case.tolerances[precision]
    return abs(got - expected) <= tol["atol"] + tol["rtol"] * abs(expected)


def _is_ptx(name: str) -> bool:
    return name.startswith(("ptx_", "grad_ptx_"))


def _is_table(value: Any, columns: int) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, list) and len(row) == columns for row in value)
    )


def _pad_input(name: str, value: Any, shape: tuple[int, int], amount: tuple[int, int]) -> Any:
    rows, columns = shape
    if name in ROW_LISTS or not _is_table(value, columns) or len(value) != rows:
        return value
    fillers: list[Any] = [999.0, None, -999.0]
    if name in MASKS:
        fillers = [0]
    elif name in INTEGERS:
        fillers = [-1] if name == "segment_ids" else [1]  # a padded answer claims the best rank
    value = _pad_rows(value, amount, fillers)
    if name == "margin":
        value = [_pad_rows(table, amount, fillers) for table in value]
    return value


def _pad_expected(
    expected: dict[str, Any], columns: int, amount: tuple[int, int], ours: Callable[[str], bool]
) -> dict[str, Any]:
    result = dict(expected)
    for name, value in expected.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            result[name] = [_pad_expected(item, columns, amount, ours) for item in value]
        elif ours(name) and _is_table(value, columns):
            result[name] = _pad_rows(value, amount, [0.0])
    return result


def _pad_rows(rows: list[Any], amount: tuple[int, int], fillers: list[Any]) -> list[Any]:
    left, right = ([fillers[n % len(fillers)] for n in range(count)] for count in amount)
    return [
        [_like(row[0], f) for f in left] + row + [_like(row[0], f) for f in right] for row in rows
    ]


def _like(item: Any, filler: Any) -> Any:
    return [_like(part, filler) for part in item] if isinstance(item, list) else filler


def _without_first_targets(inputs: dict[str, Any]) -> dict[str, Any]:
    """A token with none before it is no target; padding on the left must not make it one."""
    result = dict(inputs)
    for mask in {"loss_mask", "ptx_mask"} & set(inputs):
        segments = inputs.get("segment_ids") if mask == "loss_mask" else None
        result[mask] = [
            [
                int(
                    bool(on)
                    and t > 0
                    and (segments is None or segments[b][t] == segments[b][t - 1])
                )
                for t, on in enumerate(row)
            ]
            for b, row in enumerate(inputs[mask])
        ]
    return result
