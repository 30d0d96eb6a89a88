"""Freed memory goes back to the system."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.runtime import allocator

MIB = 1 << 20
KIB_64 = 1 << 14  # numbers of four bytes


def resident() -> int:
    """Bytes of memory that this process holds."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(allocator._TRIM is None, reason="only glibc can be asked")
def test_freed_tensors_are_given_back() -> None:
    tensors = [torch.ones(KIB_64) for _ in range(4096)]  # below what is mapped apart
    pins = tensors[::256]  # one kept among many freed: the top of the heap cannot just fall
    tensors.clear()
    before = resident()
    allocator.give_back()
    assert before - resident() > 150 * MIB
    assert all(float(pin.sum()) == KIB_64 for pin in pins)
