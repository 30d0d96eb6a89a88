"""Throughput of the three stages on one device, with random weights and random text.

    python -m benchmarks.gpu --size 135m --stages sft reward ppo --output build/gpu.json

Measured is the step that a stage takes: its own loss, micro-batches, optimiser and rollout code.
Loading, tokenising and saving are left out. For each stage, a warm-up and then ``--repeat`` steps:
the median time, tokens a second, peak memory, and the share of the device's own matrix peak (model
FLOPs utilisation, Chowdhery et al. 2022, App. B; the arithmetic is in ``benchmarks.cost``).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_works import SIZES, STAGES
from stages.models.precision import Arithmetic, choose


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of several square matrix products."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    seconds = [timed(device, lambda: a @ b) for _ in range(12)]
    return 2.0 * n**3 / min(seconds)


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds until the device has done the work."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Return when the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(device: torch.device) -> float:
    """Largest memory in use since the last reset: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measured(
    stage: str, name: str, arithmetic: Arithmetic, peak: float, args: Any
) -> dict[str, Any]:
    """One row of the table; an error is told in it, so that the other rows are still measured."""
    size, device = SIZES[name], arithmetic.device
    gc.collect()  # the models of the row before
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    row: dict[str, Any] = {"stage": stage, "size": name}
    try:
        step, tokens = STAGES[stage](size, arithmetic, args.budget)
        needed = step()
        seconds = [timed(device, step) for _ in range(args.repeat)]
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # out of memory too
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    median = statistics.median(seconds)
    return row | {
        "seconds": median,
        "fastest": min(seconds),
        "slowest": max(seconds),
        "tokens_per_second": tokens / median,
        "share_of_peak": needed / median / peak,
        "peak_mib": peak_mib(device),
    }


def surroundings(arithmetic: Arithmetic, peak: float) -> dict[str, Any]:
    """What the numbers depend on."""
    device = arithmetic.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "cpu",
        "capability": torch.cuda.get_device_capability(device) if cuda else None,
        "precision": str(arithmetic.compute or arithmetic.weights).removeprefix("torch."),
        "matmul_peak": peak,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'size':6} {'stage':8} {'s/step':>9} {'tokens/s':>10} {'MFU':>7} {'peak MiB':>9}"]
    for row in rows:
        head = f"{row['size']:6} {row['stage']:8}"
        if "error" in row:
            lines.append(f"{head} {row['error']}")
            continue
        lines.append(
            f"{head} {row['seconds']:9.3f} {row['tokens_per_second']:10.0f} "
            f"{row['share_of_peak']:7.1%} {row['peak_mib']:9.0f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure what is asked for; the JSON is written after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--size", nargs="+", default=["135m"], choices=SIZES)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--budget", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--repeat", type=int, default=3, help="steps after the warm-up")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    arithmetic = choose(args.device, args.precision)
    peak = matmul_peak(arithmetic.device, arithmetic.compute or arithmetic.weights)
    found = {**surroundings(arithmetic, peak), "rows": []}
    for name in args.size:
        for stage in args.stages:
            found["rows"].append(measured(stage, name, arithmetic, peak, args))
            if args.output:
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{found['device']}, matrix peak {peak / 1e12:.1f} TFLOP/s in {found['precision']}")
    print(table(found["rows"]))
    return int(any("error" in row for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
