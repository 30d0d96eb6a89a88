"""A function for other processes that imports next to nothing."""

from __future__ import annotations

import os

from stages.errors import DataError


def double(number, chunk):
    """Twice the chunk, or what its name says."""
    if chunk == "leave":
        os._exit(9)
    if chunk == "refuse":
        raise DataError("refused", do="nothing", where="here")
    if chunk == "bug":
        raise KeyError("a bug")
    print("a library prints", flush=True)  # which must not get among the results
    return number * chunk
