"""``python -m rlhf_cli`` and the console script ``rlhf``."""

from __future__ import annotations

import os
import sys

from rlhf_cli.app import main
from rlhf_cli.launch import LAUNCHED


def run() -> None:
    """Run the command line of this process and end the process with its exit code."""
    _speak_utf8()
    _wait_briefly()
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


def _wait_briefly() -> None:
    """Let torch's threads spin for some microseconds when they wait, then sleep.

    GNU OpenMP's own habit is to spin for milliseconds, which on a busy machine takes the cores from
    those that are waited for; never to spin costs a wake-up in each small operation. It is read
    when torch is loaded, which is after this.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if __name__ == "__main__":
    run()
