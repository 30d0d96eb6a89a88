"""``python -m tests.stages.killed STAGE FOLDER``: runs that SIGKILL ends at chosen moments.

A process of its own, since it forks a child for each run: see ``tests.torture.server``. The runs
are those of the campaign of kills: a checkpoint at every step (ppo, reinforce: iteration), of which
two are kept.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture import kills
from tests.torture.__main__ import IMPORTS
from tests.torture.server import forked

Prepare = Callable[[Path], None]


def die() -> None:
    """What a power cut is to a process."""
    os.kill(os.getpid(), signal.SIGKILL)


def nth_call(owner: Any, name: str, n: int, instead: Callable[..., Any]) -> None:
    """Have ``instead(real, *arguments)`` done in place of the n-th call of a function."""
    real, calls = getattr(owner, name), [0]

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == n:
            return instead(real, *arguments, **options)
        return real(*arguments, **options)

    setattr(owner, name, call)


@dataclass(frozen=True)
class Moment:
    """When a run is killed.

    Attributes:
        at: ``before`` or ``behind`` the n-th save, ``inside`` it at an operation of the disk, or in
            the n-th ``update`` on sampled answers.
        n: which of them; of sft and train-rm the n-th save is that of step n.
        operation: of the disk, such as ``replace``; a file is then half written, a folder there.
    """

    at: str
    n: int
    operation: str = ""

    def prepare(self, run_folder: Path) -> None:
        """Set the trap, in the process that is to die."""
        from stages.online import Criticless
        from stages.runtime.session import Session
        from stages.update import Update

        if self.at == "update":
            for owner in (Update, Criticless):
                nth_call(owner, "step", self.n, lambda real, *rest: die())
        elif self.at == "before":
            nth_call(Session, "save", self.n, lambda real, *rest: die())
        elif self.at == "behind":
            nth_call(Session, "save", self.n, _behind)
        else:
            trap = functools.partial(_inside, run_folder, self.operation)
            nth_call(Session, "save", self.n, trap)


def _behind(real: Any, *arguments: Any) -> None:
    real(*arguments)
    die()


def _inside(folder: Path, operation: str, real: Any, *arguments: Any) -> None:
    from tests.runtime.faults import Disk, watch

    class Trap(Disk):
        def call(self, name: str, work: Any, half: Any = None) -> Any:
            if name == operation:
                (half or work)()
                die()
            return work()

    with watch(Trap(folder)):
        real(*arguments)


SAVE = {
    "a file of it is half written": ("inside", "save_file"),
    "it is in its place without its mark": ("inside", "replace"),
    "an older one is half deleted": ("inside", "unlink"),
}
MOMENTS: dict[str, dict[str, Moment]] = {
    "sft": {
        "at the end of an epoch": Moment("before", 3),
        **{text: Moment(at, 3, operation) for text, (at, operation) in SAVE.items()},
    },
    "reward_model": {
        "between two steps": Moment("before", 3),
        "behind the save of an epoch's end": Moment("behind", 2),
        "a file of it is half written": Moment("inside", 3, "save_file"),
    },
    "ppo": {
        "in the second inner epoch": Moment("update", 8),
        "between two iterations": Moment("before", 1),
        "a file of it is half written": Moment("inside", 2, "save_file"),
        "it is in its place without its mark": Moment("inside", 2, "replace"),
    },
    "reinforce": {
        "in the second minibatch of an iteration": Moment("update", 4),
        "a file of it is half written": Moment("inside", 2, "save_file"),
    },
}


def main(stage: str, folder: Path) -> None:
    """Print a JSON object: for each moment how the run ended, and what differs from the whole."""
    for name in IMPORTS:
        importlib.import_module(name)
    template = folder / "template"
    template.mkdir(parents=True)
    made = forked(folder, "template", lambda: kills.make_project(template))
    assert made.code == 0, made.text
    whole, _ = kills._whole(folder, template, stage)
    report = {
        text: _trial(folder / f"trial-{n}", template, stage, moment, whole)
        for n, (text, moment) in enumerate(MOMENTS[stage].items())
    }
    print(json.dumps(report))


def _trial(
    place: Path, template: Path, stage: str, moment: Moment, whole: dict[str, str]
) -> dict[str, Any]:
    shutil.copytree(template, place)
    cache = place.parent / "cache"

    def doomed() -> None:
        moment.prepare(place / "run")
        kills.run(place, stage, resume=False, cache=cache)

    first = forked(place, "killed", doomed)
    left = forked(place, "look", lambda: kills.newest(place)).value
    last = forked(place, "resumed", lambda: kills.run(place, stage, resume=True, cache=cache))
    got = forked(place, "compared", lambda: kills.fingerprint(place)).value or {}
    return {
        "killed": first.code,
        "left": left,
        "resumed": last.code,
        "different": [name for name in whole if got.get(name) != whole[name]],
        "told": (first.text + last.text)[-2000:],
    }


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1], Path(sys.argv[2]))
