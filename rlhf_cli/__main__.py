"""``python -m rlhf_cli`` and the console script ``rlhf``."""

from __future__ import annotations

import os
import sys

from rlhf_cli.app import main
from rlhf_cli.launch import LAUNCHED


def run() -> None:
    """Run the command line of this process and end the process with its exit code."""
    _speak_utf8()
    code = main(sys.argv[1:])
    if code and LAUNCHED in os.environ:
        # The other processes of the world must not wait for an orderly end of this one: its
        # connections close now, and the launcher learns the true order of the failures.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _speak_utf8() -> None:
    """Write UTF-8 whatever the locale says; a lone surrogate of a file name is escaped."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")


if __name__ == "__main__":
    run()
