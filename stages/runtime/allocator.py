"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import ctypes

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, others do without


def give_back() -> None:
    """Hand freed memory back to the system.

    The C library keeps what small and middle-sized tensors leave behind, so that a copy made for
    saving would stand on top of the activations of the last step, long after they are gone.
    """
    if _TRIM is not None:
        _TRIM(0)
