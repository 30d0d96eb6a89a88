"""Standard output by its own name and by others."""

from __future__ import annotations

import os
import sys

STDOUT = "-"


def is_stdout(name: str) -> bool:
    """Whether a name leads to what standard output is, such as ``/dev/stdout``.

    The file that standard output was led into by the shell counts as well: two writers with
    places of their own would write over each other.
    """
    if name == STDOUT:
        return True
    try:
        return os.path.samestat(os.stat(name), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # no such file; a stream without a descriptor; a NUL in the name
        return False
