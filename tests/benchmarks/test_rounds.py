"""Who takes turns with whom, what counts as disturbed, and what is done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks import watch
from benchmarks.rounds import Reading, Round, UnequalWork, alternate, counted, spread
from benchmarks.watch import Cpu

STAT = "cpu  100 20 30 4000 50 6 7 80 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"


def test_the_machines_time_is_read_without_idling_and_interrupts() -> None:
    assert watch.read_cpu(STAT, ticks=10) == Cpu(busy=15.0, stolen=8.0)


@pytest.mark.parametrize(
    ("busy", "stolen", "own", "expected"),
    [
        (20.0, 0.0, 20.0, 0.0),  # all of it was ours
        (20.0, 0.0, 15.0, 0.25),  # others had 5 of 20
        (15.0, 3.0, 15.0, 0.15),  # the hypervisor had 3 of 20
        (19.9, 0.0, 20.0, 0.0),  # the clocks differ by a tick
    ],
)
def test_disturbance_is_what_others_had_of_the_machine(
    busy: float, stolen: float, own: float, expected: float
) -> None:
    before, after = Cpu(100.0, 7.0), Cpu(100.0 + busy, 7.0 + stolen)
    found = watch.disturbance(before, after, own=own, seconds=10.0, cores=2)
    assert found == pytest.approx(expected)


def test_a_watch_tells_time_and_memory() -> None:
    clock = watch.Watch()
    clock.start()
    held = bytearray(1 << 25)
    clock.stop()
    figures = clock.figures()
    assert figures["seconds"] is not None
    assert figures["seconds"] > 0
    assert clock.mib >= clock.import_mib > len(held) / (1 << 20) / 32


def side(name: str, disturbed: list[float], order: list[str]) -> Callable[[], Reading]:
    left: Iterator[float] = iter(disturbed)

    def run() -> Reading:
        order.append(name)
        return Reading(seconds=1.0, disturbed=next(left))

    return run


def test_sides_take_turns_at_going_first() -> None:
    order: list[str] = []
    quiet = [0.0] * 3
    done = alternate(side("peer", quiet, order), side("ours", quiet, order), wanted=3, spare=2)
    assert order == ["peer", "ours", "ours", "peer", "peer", "ours"]
    assert len(done) == 3


def test_a_disturbed_round_is_repeated() -> None:
    order: list[str] = []
    peer = side("peer", [0.0, 0.5, 0.0, 0.0], order)
    done = alternate(peer, side("ours", [0.0] * 4, order), wanted=3, spare=2)
    assert [r.clean for r in done] == [True, False, True, True]
    assert [r.clean for r in counted(done, 3)] == [True, True, True]


def test_repeating_has_a_bound_and_the_quietest_of_the_rest_are_used() -> None:
    order: list[str] = []
    peer = side("peer", [0.9, 0.3, 0.0, 0.2], order)
    done = alternate(peer, side("ours", [0.0] * 4, order), wanted=3, spare=1)
    assert len(done) == 4
    assert [r.disturbed for r in counted(done, 3)] == [0.0, 0.2, 0.3]


def test_a_system_that_does_not_tell_counts_as_quiet() -> None:
    assert Round(Reading(1.0), Reading(1.0)).clean


def test_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0)


def test_a_round_of_unlike_numbers_of_steps_is_refused() -> None:
    with pytest.raises(UnequalWork, match="the peer took 40 steps, rlhf 32"):
        alternate(lambda: Reading(1.0, steps=40), lambda: Reading(1.0, steps=32), wanted=1, spare=0)
