"""Stateless randomness: each random choice of a run has a name, and its seed follows from the name.

No generator state has to be saved or restored: a resumed run asks for the same names and gets the
same numbers.
"""

from __future__ import annotations

import json
from hashlib import blake2b


def seed_of(seed: int, *key: str | int) -> int:
    """The 64-bit seed of one random choice: the first 8 bytes of BLAKE2b over the JSON of its key.

    Args:
        seed: the run's seed.
        key: what is chosen and for which position, such as ``("order", epoch)``.

    Returns:
        An integer in [0, 2**64), the same on every machine and in every process.
    """
    name = json.dumps([seed, *key]).encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
