"""What this machine has free of memory and disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from stages.runtime.place import existing
from stages.runtime.run_dir import FOLDERS


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new process may still take on the device, or None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    known = [n for n in (_linux_available(), _control_group_free()) if n is not None]
    return min(known, default=None) or _physical()


def free_disk(folder: Path) -> int:
    """Bytes free where the folder is or will be."""
    return shutil.disk_usage(existing(folder)).free


def held_by(folder: Path) -> int:
    """Bytes that an earlier run left in its folder, which the next one replaces or goes on with."""
    files = (file for name in FOLDERS for file in (folder / name).rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _linux_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _control_group_free() -> int | None:
    """What the container that this process runs in may still take."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
