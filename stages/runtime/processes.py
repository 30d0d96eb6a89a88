"""The processes of a run: one, or a data-parallel world started by a launcher.

Every process computes its share; what is decided or reported is first summed or gathered over all
of them, in rank order, so that one process and several see the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stages.errors import ConfigError

T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # the main process may tokenise for long while the others wait


@dataclass(frozen=True)
class World:
    """Who this process is: ``rank`` of ``size``; ``local_rank`` on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def main(self) -> bool:
        """The process that prints, logs and writes shared files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes; the argument is overwritten."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)
        if dist.get_backend() == "nccl":
            tensor = tensor.cuda()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, items: Sequence[T]) -> list[T]:
        """The items of all processes, those of rank 0 first, on every process."""
        if self.size == 1:
            return list(items)
        parts: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, list(items))
        return [item for part in parts for item in part]

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size > 1:
            dist.barrier()


def join(device: str) -> World:
    """Join the world that a launcher announced in the environment, or be alone.

    Raises:
        ConfigError: the launcher asks for sharding, which this version does not do.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    for name, what in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            raise ConfigError(
                f"the launcher asks for {what}, and only data-parallel processes are supported",
                where=name,
                do="launch with --num-processes, torchrun, or accelerate without sharding",
            )
    if size == 1:
        return World()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if not dist.is_initialized():
        if on_gpu:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    world = World(dist.get_rank(), dist.get_world_size(), local)
    assert (world.rank, world.size) == (rank, size), "the launcher and the process group disagree"
    return world


def leave() -> None:
    """Close the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
