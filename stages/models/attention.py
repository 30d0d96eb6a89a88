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
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from stages.batch import Segment

NAME = "rlhf_segments"
GROWTH = 64  # columns added when a cache is full: copying is amortised over as many tokens
SDPA_ABOVE = 320  # keys; below it plain bf16 matmuls beat the backward of sdpa on a CPU
TILE_BELOW = 256  # keys; shorter segments share products, longer ones are busy enough alone
WASTE = 1.5  # a tile's products may be this much larger than its segments' own


class Options(NamedTuple):
    """What a family asks of its attention besides queries, keys and values."""

    scaling: float
    dropout: float
    softcap: float | None
    window: int | None


class Tile:
    """Segments of similar size, padded into one product of ``[R, H, T, S]`` scores.

    Short segments one by one would cost more in calls than in arithmetic.

    Attributes:
        queries: ``[R, T]`` row index of each query (0 in padding).
        keys: ``[R, S]`` row index of each key: the parent's tokens, then the segment's own.
        real: ``[R, T]`` bool, True = a query.
        tokens: ``[n]`` row index of the real queries.
    """

    def __init__(self, members: Sequence[Segment], row: tuple[Segment, ...], device: torch.device):
        own = [range(s.start, s.stop) for s in members]
        before = [_parent(s, row) for s in members]
        seen = [[*b, *o] for b, o in zip(before, own, strict=True)]
        self.queries, self.real = _padded(own, device)
        self.keys, _ = _padded(seen, device)
        # Positions within the sequence: a query sees its own position and earlier ones.
        shift = torch.tensor([len(b) for b in before], device=device)[:, None]
        self.position = torch.arange(self.queries.shape[1], device=device) + shift
        self.tokens = self.queries[self.real]
        self._hidden: dict[int | None, Tensor] = {}

    def hidden(self, window: int | None) -> Tensor:
        """``[R, 1, T, S]`` bool, True = key not seen. A padded query sees the first key alone."""
        if window not in self._hidden:
            columns = torch.arange(self.keys.shape[1], device=self.keys.device)
            query = self.position[:, :, None]
            seen = columns <= query  # padding stands behind every real query
            if window is not None:
                seen &= columns > query - window
            first = (columns == 0).expand_as(seen)
            self._hidden[window] = ~torch.where(self.real[:, :, None], seen, first)[:, None]
        return self._hidden[window]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Queries ``[H, N, D]``, keys and values ``[G, N, D]`` of a row → ``[n, H, D]``."""
        queries = query[:, self.queries].transpose(0, 1)  # [R, H, T, D]
        keys = key[:, self.keys].transpose(0, 1)  # [R, G, S, D]
        values = value[:, self.keys].transpose(0, 1)
        out = attended(queries, keys, values, self.hidden(options.window), options)
        return out.transpose(1, 2)[self.real]


class Alone:
    """A segment that makes products of its own, without a copy of its queries."""

    def __init__(self, segment: Segment, row: tuple[Segment, ...], device: torch.device):
        self.own = slice(segment.start, segment.stop)
        self.parent = _parent(segment, row)
        self.tokens = torch.arange(segment.start, segment.stop, device=device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Queries ``[H, N, D]``, keys and values ``[G, N, D]`` of a row → ``[n, H, D]``."""
        keys, values = key[:, self.own], value[:, self.own]
        if self.parent:
            before = slice(self.parent.start, self.parent.stop)
            keys = torch.cat([key[:, before], keys], dim=1)
            values = torch.cat([value[:, before], values], dim=1)
        return _causal(query[:, self.own], keys, values, options).transpose(0, 1)


class Segments:
    """The plan of a packed row; keys and values go to ``store`` where one is given."""

    def __init__(
        self, row: tuple[Segment, ...], device: torch.device, store: Cache | None = None
    ) -> None:
        self.store = store
        self.parts = [
            Tile(members, row, device) if len(members) > 1 else Alone(members[0], row, device)
            for members in _tiles(row)
        ]
        order = torch.cat([part.tokens for part in self.parts])
        self.inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=device)
        )

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Queries, keys, values ``[1, H, N, D]`` → ``[1, N, H, D]``."""
        if self.store is not None:
            self.store.fill(module, key[0], value[0])
        out = torch.cat([p.attend(query[0], key[0], value[0], options) for p in self.parts])
        return out[self.inverse].unsqueeze(0)


@dataclass
class Cache:
    """Stored keys and values of B rows; ``lengths[b]`` tokens of row b are real.

    ``source`` ``[B, S]`` says, before the prefill, which token of the packed row fills a column.
    """

    source: Tensor
    lengths: Tensor
    dtype: torch.dtype | None = None
    buffers: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)

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
        columns = torch.arange(keys.shape[2], device=keys.device)
        seen = columns <= self.lengths[:, None]
        if options.window is not None:
            seen &= columns > self.lengths[:, None] - options.window
        out = attended(query.to(keys.dtype), keys, values, ~seen[:, None, None], options)
        return out.transpose(1, 2).to(query.dtype)

    def _appended(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.buffers[module]
        if int(keys.shape[2]) <= self.width:
            pad = (0, 0, 0, GROWTH)
            keys, values = nn.functional.pad(keys, pad), nn.functional.pad(values, pad)
            self.buffers[module] = (keys, values)
        rows = torch.arange(keys.shape[0], device=keys.device)
        keys[rows, :, self.lengths] = key.to(keys.dtype)
        values[rows, :, self.lengths] = value.to(values.dtype)
        return keys, values

    @property
    def width(self) -> int:
        """Columns in use: the longest row's length."""
        return int(self.lengths.max())

    def advance(self) -> None:
        """Every layer has stored its token: each row is one longer."""
        self.lengths = self.lengths + 1

    def keep(self, rows: Tensor) -> None:
        """Only ``rows`` go on; the others have ended."""
        self.lengths = self.lengths[rows]
        width = -(-(self.width + 1) // GROWTH) * GROWTH
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


def attended(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, options: Options) -> Tensor:
    """Queries ``[R, H, T, D]`` over keys ``[R, G, S, D]`` → ``[R, H, T, D]``.

    The queries of the heads that share keys are rows of one product: no key is repeated.

    Args:
        query: H heads.
        key: G groups of heads, H a multiple of G.
        value: as the keys.
        hidden: bool, broadcast to ``[R, H, T, S]``, True = key not seen.
        options: scaling, dropout, softcap.
    """
    rows, heads, t, width = query.shape
    groups, s = key.shape[1:3]
    grouped = query.reshape(rows, groups, heads // groups * t, width)
    scores = (grouped @ key.transpose(2, 3)).view(rows, heads, t, s) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    exact = scores.dtype if scores.dtype == torch.float64 else torch.float32
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1, dtype=exact)
    weights = nn.functional.dropout(weights, options.dropout).to(value.dtype)
    return (weights.view(rows, groups, -1, s) @ value).view(rows, heads, t, -1)


def _causal(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """Queries ``[H, t, D]`` over keys ``[G, s, D]`` whose last t are their own → ``[H, t, D]``."""
    t, s = query.shape[1], key.shape[1]
    if s > SDPA_ABOVE and options.softcap is None and options.window is None:
        return _sdpa(query, key, value, options)
    hidden = _hidden(t, s, options.window, query.device)
    return attended(query[None], key[None], value[None], hidden, options)[0]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    whole = query.shape[1] == key.shape[1]
    mask = None if whole else ~_hidden(query.shape[1], key.shape[1], None, query.device)
    return nn.functional.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=whole,
        scale=options.scaling,
        enable_gqa=query.shape[0] != key.shape[0],
    )[0]


def _tiles(row: tuple[Segment, ...]) -> list[list[Segment]]:
    """Segments grouped by size: products no larger than WASTE times the segments' own work."""
    sized = sorted(
        ((len(_parent(s, row)) + s.stop - s.start, s.stop - s.start, s) for s in row),
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


def _parent(segment: Segment, row: tuple[Segment, ...]) -> range:
    """The tokens of the segment that is read before this one; none for a root."""
    if segment.parent is None:
        return range(0)
    parent = row[segment.parent]
    return range(parent.start, parent.stop)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of unequal length as ``[R, S]`` filled with 0 on the right, and the mask of the real."""
    width = max(len(row) for row in rows)
    values = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return values, torch.arange(width, device=device) < lengths[:, None]


@lru_cache(maxsize=256)
def _hidden(t: int, s: int, window: int | None, device: torch.device) -> Tensor:
    """``[t, s]`` bool, True = key not seen: after the query, or out of its sliding window."""
    query = torch.arange(s - t, s, device=device)[:, None]
    key = torch.arange(s, device=device)
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)
