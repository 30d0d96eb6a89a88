"""``python -m tests.stages.world JOBS.json``, in each process of a world: command lines in turn.

One start of the processes serves many runs, since most of it is imports. Between two runs the
processes part and meet again at another port.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import stages.update
from stages.data.plan import share
from stages.errors import ResourceError
from stages.runtime import loop
from stages.update import Update
from tests.runtime.faults import Disk, watch

ROOT = Path(__file__).parents[2]
LAUNCH = (
    "import sys; from rlhf_cli.launch import launch\n"
    "sys.exit(launch([], 2, command=[sys.executable, *{!r}]))"
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Job:
    """One command line in every process of a world.

    Attributes:
        argv: the arguments of ``rlhf``.
        code: the exit code that is expected of every process.
        stop: the optimiser step in which one process gets a SIGTERM; 0 for none.
        fail: the optimiser step in which one process fails; 0 for none.
        rank: which process that is.
        traced: the run folder that is watched (see ``traced``); none for "".
    """

    argv: Sequence[str]
    code: int = 0
    stop: int = 0
    fail: int = 0
    rank: int = 0
    traced: str = ""


def start_world(
    folder: Path, jobs: Sequence[Job], *, torchrun: bool = False
) -> subprocess.Popen[str]:
    """Start two processes that do the jobs in turn.

    Args:
        folder: their current directory.
        jobs: what they do.
        torchrun: started by it, not by the launcher of ``--num-processes``.
    """
    ports = free_ports(len(jobs))
    file = folder / "jobs.json"
    file.write_text(
        json.dumps([asdict(job) | {"port": p} for job, p in zip(jobs, ports, strict=True)])
    )
    program = ["-m", "tests.stages.world", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*TORCHRUN, *program] if torchrun else ["-c", LAUNCH.format(program)]
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, **pipes)


def free_ports(n: int) -> list[int]:
    """Different ports that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def main(file: Path) -> int:
    """Do the jobs; the exit code is that of the first which ends otherwise than expected."""
    from rlhf_cli.app import main as command_line

    rank = int(os.environ["RANK"])
    Path(f"process-{rank}").write_text(str(os.getpid()))
    for values in json.loads(file.read_text()):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(values.pop("port"))}
        # A store that torchrun keeps for the whole world remembers the run before.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        job = Job(**values)
        with traced(job.traced), disturbed(job, rank):
            code = command_line(job.argv)
        if code != job.code:
            return code or 1
    return 0


@contextmanager
def disturbed(job: Job, rank: int) -> Iterator[None]:
    """A signal, or a failure, in one process in the midst of an optimiser step."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1
        if rank == job.rank and calls[0] == job.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        if rank == job.rank and calls[0] == job.fail:
            raise ResourceError("there is no room left", do="make room")

    with before_calls(loop, "_train_step", count), before_calls(Update, "step", count):
        yield


@contextmanager
def before_calls(owner: Any, name: str, see: Callable[..., None]) -> Iterator[None]:
    """Have every call of a function seen with its arguments before it is done."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def call(*arguments: Any, **options: Any) -> Any:
        see(*arguments, **options)
        return real(*arguments, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextmanager
def traced(folder: str) -> Iterator[None]:
    """Write down what this process saw: gradients of every step, its shares, files it changed.

    Nothing for ""; else ``gradients-R.safetensors`` and ``seen-R.json``, R the rank, beside it.
    """
    if not folder:
        yield
        return
    place, rank = Path(folder), os.environ.get("RANK", "0")
    gradients: dict[str, torch.Tensor] = {}
    shares: list[int] = []
    steps = [0]

    def keep(trained: Any, **_: Any) -> None:  # as the optimiser gets them, clipped
        for name, p in zip(trained.names, trained.parameters, strict=True):
            gradients[f"{steps[0]:03d} {name}"] = p.grad.detach().clone()
        steps[0] += 1

    def take(_: Any, lengths: Any, *, world: Any, **__: Any) -> None:
        shares.append(len(share(lengths, world.rank, world.size)))

    with ExitStack() as stack:
        for owner in (loop, stages.update):
            stack.enter_context(before_calls(owner, "take_step", keep))
            stack.enter_context(before_calls(owner, "accumulate", take))
        disk = stack.enter_context(watch(Disk(place.absolute())))
        yield
    seen = Path(f"{folder}-seen")
    seen.mkdir(exist_ok=True)
    save_file(gradients, seen / f"gradients-{rank}.safetensors")
    told = {"shares": shares, "operations": disk.log}
    (seen / f"seen-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the tool ends where a launcher started it
