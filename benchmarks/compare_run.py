"""A stage in a process of its own: prints its seconds and the largest memory that it held."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys

from rlhf_cli.app import main


def measure(arguments: list[str]) -> int:
    """Run a command line with ``--json`` and print what it took, as one JSON line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*arguments, "--json"])
    if code:
        print(out.getvalue(), file=sys.stderr)
        return code
    seconds = json.loads(out.getvalue().splitlines()[-1])["seconds"]
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "kib": kib}))
    return 0


if __name__ == "__main__":
    sys.exit(measure(sys.argv[1:]))
