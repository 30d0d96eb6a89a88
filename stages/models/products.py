"""The products of attention: queries over keys, with what a family asks of them.

Plain matrix products, grouped where heads share keys, or PyTorch's own function where it is faster.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

SDPA_ABOVE = 320  # keys; below it plain bf16 matmuls beat the backward of sdpa on a CPU


class Options(NamedTuple):
    """What a family asks of its attention besides queries, keys and values."""

    scaling: float
    dropout: float
    softcap: float | None
    window: int | None


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, options: Options) -> Tensor:
    """Queries ``[R, H, T, D]`` over keys ``[R, G, S, D]`` → ``[R, H, T, D]``.

    The queries of the heads that share keys are rows of one product: no key is repeated. Scaling
    the queries touches T · D numbers where scaling the scores would touch T · S, and a bias is
    added in place: the backward pass of a sum moves nothing.

    Args:
        query: H heads.
        key: G groups of heads, H a multiple of G.
        value: as the keys.
        bias: broadcast to ``[R, H, T, S]``, 0 or −∞ where a key is not seen.
        options: scaling, dropout, softcap.
    """
    rows, heads, t, width = query.shape
    groups, s = key.shape[1:3]
    grouped = (query * options.scaling).reshape(rows, groups, heads // groups * t, width)
    scores = (grouped @ key.transpose(2, 3)).view(rows, heads, t, s)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    exact = scores.dtype if scores.dtype == torch.float64 else torch.float32
    weights = scores.add_(bias).softmax(dim=-1, dtype=exact)
    weights = nn.functional.dropout(weights, options.dropout).to(value.dtype)
    return (weights.view(rows, groups, -1, s) @ value).view(rows, heads, t, -1)


def taken(heads: Tensor, index: Tensor) -> Tensor:
    """Tokens ``index`` ``[R, S]`` of ``[H, N, D]`` → ``[R, H, S, D]``.

    By ``index_select`` over whole tokens, whose backward pass adds in the order of the index.
    That of ``heads[:, index]`` adds in whatever order the threads come, so two equal runs would
    end with other weights, and is four times slower.
    """
    tokens = heads.transpose(0, 1).flatten(1).index_select(0, index.flatten())
    return tokens.view(*index.shape, len(heads), -1).transpose(1, 2)


def causal(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """Queries ``[H, t, D]`` over keys ``[G, s, D]`` whose last t are their own → ``[H, t, D]``."""
    t, s = query.shape[1], key.shape[1]
    if s > SDPA_ABOVE and options.softcap is None and options.window is None:
        return _sdpa(query, key, value, options)
    bias = bias_of(_seen(t, s, options.window, query.device), query.dtype)
    return attended(query[None], key[None], value[None], bias, options)[0]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    whole = query.shape[1] == key.shape[1]
    mask = None if whole else _seen(query.shape[1], key.shape[1], None, query.device)
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


def bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, −∞ elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, float("-inf")
    )


@lru_cache(maxsize=256)
def _seen(t: int, s: int, window: int | None, device: torch.device) -> Tensor:
    """``[t, s]`` bool, True = key seen: not after the query, and within its sliding window."""
    query = torch.arange(s - t, s, device=device)[:, None]
    key = torch.arange(s, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
