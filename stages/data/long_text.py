"""The first or last tokens of a text that may be far longer than any limit, at a bounded cost.

A part of the text is tokenised, and a few that are longer by some characters. Where all of them
have the same wanted tokens, what lies further away has no bearing on them; where not, as in one
word without end, larger parts are taken, in the end the text itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Tokenise = Callable[[str], np.ndarray]

LEAST = 4096  # characters
PER_TOKEN = 16  # characters; a token has about 4
LONGER = range(1, 9)  # characters; a repeated text shifts its tokens by a part of its period
FACTOR = 16  # a text is tokenised whole unless it has so many times the characters of a part


class Tokens(NamedTuple):
    """Ids, and whether they are those of the whole text."""

    ids: np.ndarray
    whole: bool


def first_tokens(tokenise: Tokenise, text: str, most: int | None) -> Tokens:
    """The ids of a text, or the first ``most`` + 1 of a long one that has more than ``most``.

    Args:
        tokenise: text → ids.
        text: of any length.
        most: None = all.
    """
    return _part(tokenise, text, most, lambda size: text[:size], lambda ids, n: ids[:n])


def last_tokens(tokenise: Tokenise, text: str, most: int | None) -> Tokens:
    """The ids of a text, or the last ``most`` + 1 of a long one that has more than ``most``."""
    return _part(tokenise, text, most, lambda size: text[-size:], lambda ids, n: ids[-n:])


def _part(
    tokenise: Tokenise,
    text: str,
    most: int | None,
    of_text: Callable[[int], str],
    of_ids: Callable[[np.ndarray, int], np.ndarray],
) -> Tokens:
    wanted = 0 if most is None else max(most, 0) + 1
    size = LEAST + PER_TOKEN * wanted
    while wanted and FACTOR * size < len(text):
        found = of_ids(tokenise(of_text(size)), wanted)
        others = (of_ids(tokenise(of_text(size + n)), wanted) for n in LONGER)
        if len(found) == wanted and all(np.array_equal(found, other) for other in others):
            return Tokens(found, whole=False)
        size *= FACTOR
    return Tokens(tokenise(text), whole=True)
