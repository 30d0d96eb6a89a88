"""Attention of a packed row as one call of torch's variable-length kernel: CUDA, bf16 or fp16.

The kernel (``torch.nn.attention.varlen.varlen_attn``; Dao 2023, FlashAttention-2) takes the tokens
of all sequences end to end and two tables of boundaries, one for queries and one for keys, so a row
is neither padded nor cut into tiles, and no score is ever stored: its memory is that of its output.

A tree is expressed by its boundaries. The queries of an answer are its own tokens, its keys are
those of its prompt and then its own: where a sequence has more keys than queries, the kernel aligns
the causal mask with the *last* query and key, which is what a child of a tree needs. The prompt's
keys are copied once for each answer, as in a tile.

What the kernel cannot do is left to the tiles of ``attention``: other number formats, dropout,
soft caps, and heads wider than WIDEST.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.batch import Segment, parent_of

HALF = (torch.bfloat16, torch.float16)
WIDEST = 192  # numbers of a head; beyond it the backward kernel runs on some GPUs only
GRAIN = 8  # a head's width must be a multiple of it
OLDEST = (8, 0)  # compute capability (Ampere)


class Varlen:
    """A packed row as the kernel wants it.

    Attributes:
        keys: row index of each key, ``[M]``: for each segment its parent's tokens, then its own;
            None where no segment has a parent, and the keys are the row itself.
        query_bounds, key_bounds: ``[S + 1]`` int32, where each of the S segments begins and ends.
        longest_query, longest_key: of all segments, in tokens.
    """

    def __init__(self, row: tuple[Segment, ...], device: torch.device) -> None:
        assert all(a.stop == b.start for a, b in pairwise(row)), "the segments leave a gap"
        filled = [segment for segment in row if segment.stop > segment.start]
        own = [range(segment.start, segment.stop) for segment in filled]
        before = [parent_of(segment, row) for segment in filled]
        seen = [len(b) + len(o) for b, o in zip(before, own, strict=True)]
        self.query_bounds = _bounds([len(o) for o in own], device)
        self.key_bounds = _bounds(seen, device)
        self.longest_query, self.longest_key = max(map(len, own)), max(seen)
        self.keys: Tensor | None = None
        if any(before):
            pieces = [
                np.arange(r.start, r.stop) for pair in zip(before, own, strict=True) for r in pair
            ]
            self.keys = torch.from_numpy(np.concatenate(pieces)).to(device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """Causal attention of every segment to its parent and itself.

        Args:
            query: ``[H, N, D]`` of a row of N tokens.
            key: ``[G, N, D]``, H a multiple of G.
            value: as the keys.
            scaling: factor of the scores before the softmax.
            window: how many tokens a query sees, itself included; None = all before it.

        Returns:
            ``[N, H, D]`` in the dtype that the passes compute in.
        """
        dtype = computed_in(value)
        queries, keys, values = (t.transpose(0, 1).to(dtype) for t in (query, key, value))
        if self.keys is not None:
            keys, values = keys[self.keys], values[self.keys]
        attention = kernel()
        assert attention is not None
        attended: Tensor = attention(
            queries,
            keys,
            values,
            self.query_bounds,
            self.key_bounds,
            self.longest_query,
            self.longest_key,
            scale=scaling,
            # The kernel counts the keys *before* a query, and -1 is all of them.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return attended


def suits(query: Tensor, value: Tensor, *, dropout: float, softcap: float | None) -> bool:
    """Whether the kernel can attend these ``[…, D]`` queries and values on their device."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and computed_in(value) in HALF
        and dropout == 0.0
        and softcap is None
        and width == value.shape[-1]
        and width <= WIDEST
        and width % GRAIN == 0
        and available(query.device)
    )


def computed_in(value: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, else that of the tensor.

    Rotary positions leave queries and keys in fp32 under autocast, values in half precision.
    """
    kind = value.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype


@lru_cache
def available(device: torch.device) -> bool:
    """Whether this build of torch has the kernel, and the GPU can run it."""
    return kernel() is not None and torch.cuda.get_device_capability(device) >= OLDEST


@lru_cache
def kernel() -> Callable[..., Any] | None:
    """The kernel; None in a torch that has none, or one without windows or shared keys."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa"} <= known.keys() else None


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return torch.from_numpy(ends).to(device)
