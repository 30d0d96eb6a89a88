"""Attention over packed rows, registered with transformers under the name ``rlhf_segments``.

The model is called with ``plan=…``, a keyword that transformers hands through to this function:

* ``Segments``: one row of concatenated sequences, attended segment by segment. A segment sees its
  parent and, causally, itself. There is no padding and no mask tensor: the work of a row is the sum
  over its segments of t · s instead of N². With ``store`` the keys and values of the row are kept:
  that is the prefill of decoding.
* ``Cache``: one new token for each of B rows, attending to all that the row has stored. The buffers
  are contiguous ``[B, H, S, D]``, read whole and masked at each row's length, so that nothing is
  copied from one token to the next.
"""

from __future__ import annotations

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


class Options(NamedTuple):
    """What a family asks of its attention besides queries, keys and values."""

    scaling: float
    dropout: float
    softcap: float | None
    window: int | None


@dataclass
class Segments:
    """The plan of a packed row; keys and values go to ``store`` where one is given."""

    segments: tuple[Segment, ...]
    store: Cache | None = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        """Queries, keys, values ``[1, H, N, D]`` → ``[1, N, H, D]``."""
        if self.store is not None:
            self.store.fill(module, key[0], value[0])
        parts = []
        for segment in self.segments:
            own = slice(segment.start, segment.stop)
            keys, values = key[0, :, own], value[0, :, own]
            if segment.parent is not None:
                parent = self.segments[segment.parent]
                before = slice(parent.start, parent.stop)
                keys = torch.cat([key[0, :, before], keys], dim=1)
                values = torch.cat([value[0, :, before], values], dim=1)
            parts.append(_causal(query[0, :, own], keys, values, options).transpose(0, 1))
        return torch.cat(parts).unsqueeze(0)


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
        groups = query.shape[1] // keys.shape[1]
        # Queries of the heads that share keys are rows of one product: no key is repeated.
        grouped = query.reshape(query.shape[0], keys.shape[1], groups, query.shape[3])
        scores = _capped(grouped.to(keys.dtype) @ keys.transpose(2, 3), options)
        columns = torch.arange(keys.shape[2], device=keys.device)
        seen = columns <= self.lengths[:, None]
        if options.window is not None:
            seen &= columns > self.lengths[:, None] - options.window
        weights = _softmax(scores.masked_fill(~seen[:, None, None], float("-inf")))
        return (weights @ values).reshape(query.shape[0], 1, query.shape[1], -1).to(query.dtype)

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


def _causal(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """Queries ``[H, t, D]`` over keys ``[G, s, D]`` whose last t are their own → ``[H, t, D]``."""
    heads, t, width = query.shape
    groups, s, _ = key.shape
    if s > SDPA_ABOVE and options.softcap is None and options.window is None:
        return _sdpa(query, key, value, options)
    grouped = query.reshape(groups, heads // groups * t, width)
    scores = _capped(grouped @ key.transpose(1, 2), options).view(heads, t, s)
    hidden = _hidden(t, s, options.window, query.device)
    weights = _softmax(scores.masked_fill(hidden, float("-inf")))
    weights = nn.functional.dropout(weights, options.dropout).to(value.dtype)
    return (weights.view(groups, -1, s) @ value).view(heads, t, -1)


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


def _capped(scores: Tensor, options: Options) -> Tensor:
    scores = scores * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    return scores


def _softmax(scores: Tensor) -> Tensor:
    exact = scores.dtype if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(dim=-1, dtype=exact).to(scores.dtype)


@lru_cache(maxsize=256)
def _hidden(t: int, s: int, window: int | None, device: torch.device) -> Tensor:
    """``[t, s]`` bool, True = key not seen: after the query, or out of its sliding window."""
    query = torch.arange(s - t, s, device=device)[:, None]
    key = torch.arange(s, device=device)
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)
