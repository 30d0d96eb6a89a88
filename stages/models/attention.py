"""Attention over packed rows, registered with transformers under the name ``rlhf_segments``.

The model is called with ``plan=…``, a keyword that transformers hands through to this function:

* ``Segments``: one row of concatenated sequences, attended segment by segment. A segment sees its
  parent and, causally, itself: the work of a row is about the sum over its segments of t · s, not
  N². Short segments of similar size share their products. With ``store`` the keys and values of
  the row are kept: that is the prefill of decoding.
* ``Cache``: one new token for each of B rows, attending to all that the row has stored. The buffers
  are contiguous ``[B, H, S, D]``, read whole and masked at each row's length, so that nothing is
  copied from one token to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from stages.batch import Segment, parent_of
from stages.models import varlen
from stages.models.products import Options, attended, bias_of, causal, taken
from stages.models.varlen import Varlen

NAME = "rlhf_segments"
GROWTH = 64  # columns added when a cache is full: copying is amortised over as many tokens
TILE_BELOW = 256  # keys; shorter segments share products, longer ones are busy enough alone
WASTE = 1.5  # a tile's products may be this much larger than its segments' own


class Tile:
    """Segments of similar size, padded into one product of ``[R, H, T, S]`` scores.

    Short segments one by one would cost more in calls than in arithmetic.

    Attributes:
        queries: ``[R, T]`` row index of each query (0 in padding).
        keys: ``[R, S]`` row index of each key: the parent's tokens, then the segment's own.
        real: ``[R, T]`` bool, True = a query.
        tokens: ``[R · T]`` row index of each output; −1 in padding.
    """

    def __init__(self, members: Sequence[Segment], row: tuple[Segment, ...], device: torch.device):
        before = [parent_of(s, row) for s in members]
        start, stop = (np.array([[s[n]] for s in members]) for n in (0, 1))
        first, shift = (np.array([[f(b)] for b in before]) for f in (lambda b: b.start, len))
        query = np.arange((stop - start).max())
        key = np.arange((shift + stop - start).max())
        real, seen = start + query < stop, key < shift + stop - start
        queries = np.where(real, start + query, 0)
        keys = np.where(seen, np.where(key < shift, first + key, start + key - shift), 0)
        # Positions within the sequence: a query sees its own position and earlier ones.
        self.queries, self.keys, self.real, self.position = (
            torch.from_numpy(array).to(device) for array in (queries, keys, real, shift + query)
        )
        self.tokens = np.where(real, queries, -1).ravel()
        self._bias: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """``[R, 1, T, S]``, −∞ at a key not seen. A padded query sees the first key alone."""
        if (window, dtype) not in self._bias:
            columns = torch.arange(self.keys.shape[1], device=self.keys.device)
            query = self.position[:, :, None]
            seen = columns <= query  # padding stands behind every real query
            if window is not None:
                seen &= columns > query - window
            first = (columns == 0).expand_as(seen)
            seen = torch.where(self.real[:, :, None], seen, first)[:, None]
            self._bias[window, dtype] = bias_of(seen, dtype)
        return self._bias[window, dtype]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Queries ``[H, N, D]``, keys and values ``[G, N, D]`` of a row → ``[R · T, H, D]``."""
        bias = self.bias(options.window, query.dtype)
        queries, keys, values = (
            taken(heads, index)
            for heads, index in ((query, self.queries), (key, self.keys), (value, self.keys))
        )
        return attended(queries, keys, values, bias, options).transpose(1, 2).flatten(0, 1)


class Alone:
    """A segment that makes products of its own, without a copy of its queries."""

    def __init__(self, segment: Segment, row: tuple[Segment, ...]):
        self.own = slice(segment.start, segment.stop)
        self.parent = parent_of(segment, row)
        self.tokens = np.arange(segment.start, segment.stop)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Queries ``[H, N, D]``, keys and values ``[G, N, D]`` of a row → ``[n, H, D]``."""
        keys, values = key[:, self.own], value[:, self.own]
        if self.parent:
            before = slice(self.parent.start, self.parent.stop)
            keys = torch.cat([key[:, before], keys], dim=1)
            values = torch.cat([value[:, before], values], dim=1)
        return causal(query[:, self.own], keys, values, options).transpose(0, 1)


class Segments:
    """The plan of a packed row; keys and values go to ``store`` where one is given."""

    def __init__(
        self, row: tuple[Segment, ...], device: torch.device, store: Cache | None = None
    ) -> None:
        self.row, self.device, self.store = row, device, store

    @cached_property
    def whole(self) -> Varlen:
        """The row for one call of the variable-length kernel."""
        return Varlen(self.row, self.device)

    @cached_property
    def parts(self) -> list[Tile | Alone]:
        """The row in pieces, for everything that the kernel cannot do."""
        return [
            Tile(members, self.row, self.device)
            if len(members) > 1
            else Alone(members[0], self.row)
            for members in _tiles(self.row)
        ]

    @cached_property
    def place(self) -> Tensor:
        """``[N]`` where each token of the row is among the outputs of the parts."""
        tokens = np.concatenate([part.tokens for part in self.parts])
        place = np.empty(self.row[-1].stop, dtype=np.int64)
        place[tokens[tokens >= 0]] = np.flatnonzero(tokens >= 0)
        return torch.from_numpy(place).to(self.device)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Queries, keys, values ``[1, H, N, D]`` → ``[1, N, H, D]``."""
        query, key, value = query[0], key[0], value[0]
        if self.store is not None:
            self.store.fill(module, key, value)
        scaling, dropout, softcap, window = options
        if varlen.suits(query, value, dropout=dropout, softcap=softcap):
            out = self.whole.attend(query, key, value, scaling=scaling, window=window)
            return out.unsqueeze(0)
        out = torch.cat([p.attend(query, key, value, options) for p in self.parts])
        return out.index_select(0, self.place).unsqueeze(0)


@lru_cache(maxsize=4)
def plan_of(row: tuple[Segment, ...], device: torch.device) -> Segments:
    """The plan of a row, made once for all the models that read it."""
    return Segments(row, device)


@dataclass
class Cache:
    """Stored keys and values of B rows; ``lengths[b]`` tokens of row b are real.

    ``source`` ``[B, S]`` says, before the prefill, which token of the packed row fills a column.
    """

    source: Tensor
    lengths: Tensor
    dtype: torch.dtype | None = None
    buffers: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _bias: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.width = int(self.lengths.max()) + 1  # columns in use, with the coming token

    def fill(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """Prefill: keys and values ``[H, N, D]`` of the packed prompts → ``[B, H, S, D]``."""
        self.buffers[module] = (self._placed(key), self._placed(value))

    def _placed(self, row: Tensor) -> Tensor:
        placed = row.to(self.dtype or row.dtype)[:, self.source].transpose(0, 1)
        return nn.functional.pad(placed, (0, 0, 0, GROWTH))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """One token a row: queries, keys, values ``[B, H, 1, D]`` → ``[B, 1, H, D]``."""
        keys, values = self._appended(module, key[:, :, 0], value[:, :, 0])
        bias = self.bias(options.window, keys.dtype)
        out = attended(query.to(keys.dtype), keys, values, bias, options)
        return out.transpose(1, 2).to(query.dtype)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """``[B, 1, 1, S]``, −∞ at a column that a row's new token does not see; once a step."""
        if (window, dtype) not in self._bias:
            columns = torch.arange(self.width, device=self.lengths.device)
            seen = columns <= self.lengths[:, None]
            if window is not None:
                seen &= columns > self.lengths[:, None] - window
            self._bias[window, dtype] = bias_of(seen[:, None, None], dtype)
        return self._bias[window, dtype]

    def _appended(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The columns in use, a view of the buffers: products read them in place."""
        keys, values = self.buffers[module]
        if keys.shape[2] < self.width:
            pad = (0, 0, 0, GROWTH)
            keys, values = nn.functional.pad(keys, pad), nn.functional.pad(values, pad)
            self.buffers[module] = (keys, values)
        rows = torch.arange(keys.shape[0], device=keys.device)
        keys[rows, :, self.lengths] = key.to(keys.dtype)
        values[rows, :, self.lengths] = value.to(values.dtype)
        return keys[:, :, : self.width], values[:, :, : self.width]

    def advance(self) -> None:
        """Every layer has stored its token: each row is one longer."""
        self.lengths = self.lengths + 1
        self.width += 1
        self._bias.clear()

    def keep(self, rows: Tensor) -> None:
        """Only ``rows`` go on; the others have ended."""
        self.lengths = self.lengths[rows]
        self.width = int(self.lengths.max()) + 1
        self._bias.clear()
        width = -(-self.width // GROWTH) * GROWTH
        for module, (keys, values) in self.buffers.items():
            self.buffers[module] = (keys[rows, :, :width], values[rows, :, :width])


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Segments | Cache,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer; the plan does the work."""
    options = Options(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout if module.training else 0.0,
        softcap=softcap,
        window=sliding_window,
    )
    return plan.attend(module, query, key, value, options), None


AttentionInterface.register(NAME, segment_attention)


def _tiles(row: tuple[Segment, ...]) -> list[list[Segment]]:
    """Segments grouped by size: products no larger than WASTE times the segments' own work."""
    sized = sorted(
        ((len(parent_of(s, row)) + s.stop - s.start, s.stop - s.start, s) for s in row),
        key=lambda item: item[:2],
    )
    tiles: list[list[Segment]] = []
    work = longest = 0
    for s, t, segment in sized:
        longest, work = max(longest, t), work + t * s
        padded = (len(tiles[-1]) + 1) * longest * s if tiles else 0
        if not tiles or s > TILE_BELOW or padded > WASTE * work:
            tiles.append([])
            longest, work = t, t * s
        if t:
            tiles[-1].append(segment)
    return [tile for tile in tiles if tile]
