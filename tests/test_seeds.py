"""A seed follows from its name alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stages.seeds import seed_of


def test_a_seed_is_the_first_8_bytes_of_blake2b_over_the_json_of_its_key():
    """The expected numbers come from ``b2sum -l 64`` over the bytes of the JSON."""
    assert seed_of(0, "order", 0) == 0xE9590F28A2C62E19
    assert seed_of(7, "answer", 12, 3) == 0xFF2A834BCBA875A1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "order", 1), (1, "order", 0)),
        ((0, "order", 1), (0, "order", "1")),
        ((0, "order", 1, 2), (0, "order", 12)),
        ((0, "order"), (0, "order", 0)),
        ((0, "a", "b"), (0, 'a", "b')),
    ],
)
def test_different_names_have_different_seeds(one, other):
    assert seed_of(*one) != seed_of(*other)


def test_seeds_fill_the_range_of_64_bits():
    seeds = [seed_of(s, "x", n) for s in range(20) for n in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**63


def test_a_seed_is_the_same_in_every_process():
    program = "from stages.seeds import seed_of; print(seed_of(3, 'order', 4))"
    told = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, text=True,
            capture_output=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert told == {f"{seed_of(3, 'order', 4)}\n"}
