"""A timed region of a process: seconds, memory, and how much others disturbed it.

Standard library only, since it also runs in the peers' environments.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
STATUS = Path("/proc/self/status")


class Cpu(NamedTuple):
    """CPU seconds of the whole machine: spent by anyone, and taken away by the hypervisor."""

    busy: float
    stolen: float


def read_cpu(text: str, ticks: int) -> Cpu:
    """The first line of ``/proc/stat``; interrupts and waiting are nobody's load.

    Args:
        text: the file.
        ticks: clock ticks of a second.
    """
    user, nice, system, _, _, _, _, steal = map(int, text.split("\n", 1)[0].split()[1:9])
    return Cpu((user + nice + system) / ticks, steal / ticks)


def disturbance(before: Cpu, after: Cpu, *, own: float, seconds: float, cores: int) -> float:
    """The share of the machine's CPU time that went to others or was stolen.

    Args:
        before: the machine at the start.
        after: the machine at the end.
        own: CPU seconds of this process and its children in between.
        seconds: wall time in between.
        cores: of the machine.
    """
    others = max(0.0, after.busy - before.busy - own) + after.stolen - before.stolen
    return others / (seconds * cores)


def machine_cpu() -> Cpu | None:
    """The machine's CPU time now; None where the system does not tell."""
    try:
        return read_cpu(STAT.read_text(), os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError):
        return None


def own_cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    usages = [resource.getrusage(who) for who in whose]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_mib() -> float:
    """Largest resident memory of this process so far, in MiB."""
    try:
        # Not ru_maxrss: after a fork it starts at the size of the parent.
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@dataclass
class Watch:
    """Started and stopped around the work; ``import_mib`` is read when it is made.

    Attributes:
        import_mib: resident memory once the libraries are imported.
        seconds: wall time of the region.
        mib: peak of the resident memory up to the end of the region.
        disturbed: share of the CPU time that others had; None where the system does not tell.
    """

    import_mib: float = field(default_factory=peak_mib)
    seconds: float = 0.0
    mib: float = 0.0
    disturbed: float | None = None
    _from: tuple[float, float, Cpu | None] = (0.0, 0.0, None)

    def start(self) -> None:
        """The region begins."""
        self._from = (own_cpu(), time.perf_counter(), machine_cpu())

    def so_far(self) -> float:
        """Seconds since the region began."""
        return time.perf_counter() - self._from[1]

    def stop(self) -> None:
        """The region ends."""
        own, started, before = self._from
        self.seconds = time.perf_counter() - started
        after = machine_cpu()
        self.mib = peak_mib()
        if before is not None and after is not None:
            self.disturbed = disturbance(
                before,
                after,
                own=own_cpu() - own,
                seconds=self.seconds,
                cores=os.cpu_count() or 1,
            )

    def figures(self) -> dict[str, float | None]:
        """What a child process reports of it."""
        return {
            "seconds": self.seconds,
            "mib": self.mib,
            "import_mib": self.import_mib,
            "disturbed": self.disturbed,
        }
