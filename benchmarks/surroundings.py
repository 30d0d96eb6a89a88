"""The machine and the versions of a run: ``python -m benchmarks.surroundings`` prints them."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures depend on; nothing of it names a person or a place."""
    import torch

    from stages.models.precision import fast_bf16

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "fast_bf16": fast_bf16(torch.device("cpu")),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


if __name__ == "__main__":
    print(json.dumps(machine()))
