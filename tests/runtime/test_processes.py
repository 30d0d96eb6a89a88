"""One process alone, and two that sum, gather and wait."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as processes

from stages.errors import ConfigError
from stages.runtime.processes import World, join


def test_a_process_alone_sums_and_gathers_what_it_has():
    world = World()
    numbers = torch.tensor([1.0, 2.0])
    assert world.main
    assert torch.equal(world.sum(numbers), torch.tensor([1.0, 2.0]))
    assert world.most(3) == 3
    assert world.gather(["a", "b"]) == ["a", "b"]
    world.wait()


def test_without_a_launcher_a_process_is_alone(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join("cpu") == World(rank=0, size=1, local_rank=0)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_launcher_that_asks_for_sharding_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError) as caught:
        join("cpu")
    assert caught.value.where == name
    monkeypatch.setenv(name, "false")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    join("cpu")


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def member(rank: int, port: int, results) -> None:
    """One of two processes; what it sees goes into ``results``."""
    import os

    from stages.config.shared import Optimisation
    from stages.runtime.optim import sum_gradients, trainee
    from stages.runtime.processes import leave
    from tests.families import tiny_policy

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    world = join("cpu")
    again = join("cpu")
    seen = {
        "world": (world.rank, world.size, world.main, again == world),
        "sum": world.sum(torch.tensor([1.0, 10.0]) * (rank + 1)).tolist(),
        "most": world.most([15, 2][rank]),
        "gather": world.gather([f"{rank}{n}" for n in range(3 - 2 * rank)]),
        "nothing": world.gather([] if rank == 0 else [{"loss": 0.5}]),
    }
    trained = trainee(tiny_policy("qwen3"), Optimisation())
    if rank == 0:  # the other process has no data and no gradient
        for n, p in enumerate(trained.parameters):
            p.grad = torch.full_like(p, float(n))
    sum_gradients(trained, world)
    seen["gradients"] = all(bool((p.grad == n).all()) for n, p in enumerate(trained.parameters))
    world.wait()
    leave()
    results[rank] = seen


@pytest.mark.slow
def test_two_processes_see_the_same_sums_and_gather_in_rank_order():
    with processes.Manager() as manager:
        results = manager.dict()
        processes.spawn(member, args=(free_port(), results), nprocs=2)
        first, second = results[0], results[1]
    assert first["world"] == (0, 2, True, True)
    assert second["world"] == (1, 2, False, True)
    for seen in (first, second):
        assert seen["sum"] == [3.0, 30.0]
        assert seen["most"] == 15
        assert seen["gather"] == ["00", "01", "02", "10"]
        assert seen["nothing"] == [{"loss": 0.5}]
        assert seen["gradients"]
