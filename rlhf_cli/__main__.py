"""``python -m rlhf_cli`` and the console script ``rlhf``."""

from __future__ import annotations

import os
import sys

from rlhf_cli.app import main
from rlhf_cli.world import LAUNCHED, follow_launcher


def run() -> None:
    """Run the command line of this process and end the process with its exit code."""
    _open_closed_streams()
    _speak_utf8()
    follow_launcher()
    _wait_briefly()
    code = main(sys.argv[1:])
    if code and LAUNCHED in os.environ:
        # The other processes of the world must not wait for an orderly end of this one: its
        # connections close now, and the launcher learns the true order of the failures.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Put /dev/null where a standard stream is closed (``>&-``), for which Python has None.

    Its number is taken too: the next file to be opened would otherwise get it, and with it what is
    meant for the stream.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


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
