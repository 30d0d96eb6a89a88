"""``python -m tests.torture``: kills and bad input for a chosen time, and what came of it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.torture import kills

IMPORTS = (
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "pyarrow",
    "rlhf_cli.app",
    "stages.sft",
    "stages.reward_model",
    "stages.ppo",
    "stages.online",
    "stages.preference",
    "stages.sample",
    "stages.check",
    "tests.stages.test_resume",
)
SHARES = {"kills": 0.7, "fuzz": 0.3}


def main() -> int:
    """Run the campaigns that are asked for; 1 where a trial failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all campaigns together")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--only", choices=sorted(SHARES), help="one campaign for all of the time")
    parser.add_argument("--stage", choices=kills.STAGES, help="kills: of one stage, one at a time")
    parser.add_argument("--output", help="where the JSON report goes; default: after the table")
    options = parser.parse_args()
    for name in IMPORTS:
        importlib.import_module(name)
    chosen = {options.only: 1.0} if options.only else SHARES
    reports: dict[str, Any] = {}
    for name, share in chosen.items():
        module = importlib.import_module(f"tests.torture.{name}")
        # Nothing is lost where the fuzz's thousands of files are kept in memory.
        place = "/dev/shm" if name == "fuzz" and os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="torture-", dir=place) as folder:
            how = {"seconds": share * options.seconds, "seed": options.seed}
            if name == "kills" and options.stage:
                how |= {"stages": (options.stage,), "workers": 1}
            report = module.campaign(Path(folder) / name, **how)
        reports[name] = report.to_dict()
    tell({"seed": options.seed, **reports}, options.output)
    return 1 if any(report["failures"] for report in reports.values()) else 0


def tell(reports: dict[str, Any], output: str | None) -> None:
    """A table for a person, and the whole report as JSON."""
    for name, report in reports.items():
        if not isinstance(report, dict):
            print(f"{name:<10} {report}")
            continue
        for key, value in report.items():
            shown = len(value) if isinstance(value, list) else value
            print(f"{name:<10} {key:<12} {shown}")
    text = json.dumps(reports, indent=1)
    if output:
        Path(output).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
