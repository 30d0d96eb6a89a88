"""Forward passes over a packed batch, aligned with its targets.

The one place where predictions are shifted by one: the log-probability and the value of target t
are read from the hidden state of the token *before* it (Ziegler et al. 2019, ``policy.py``), the
score of a sequence from its last token. Hidden states are gathered before the output layer, so the
vocabulary projection is computed at targets only.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stages.batch import Batch, PackedRow, Segment, pad, separate
from stages.functional import logprobs
from stages.models.attention import Cache, Segments, plan_of
from stages.models.network import Network

CHUNK = 1 << 24  # logits held at once (64 MiB in fp32); beyond it chunks are recomputed in backward


Entropy = Literal["none", "value", "gradient"]


class Logps(NamedTuple):
    """Log-probabilities ``[B, T]`` of the targets in nats, and the entropy of each distribution."""

    logp: Tensor
    entropy: Tensor


def response_logps(
    network: Network, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "none"
) -> Logps:
    """``log π(y_t | x, y_<t)`` at the sampling temperature and, in the same pass, the entropy.

    Args:
        network: a policy.
        batch: B sequences with targets ``[B, T]``; on the network's device.
        temperature: τ, the logits are divided by it before the log-softmax.
        entropy: not computed (0), a value without gradient, or with its gradient.

    Returns:
        Both ``[B, T]`` in nats, 0 where ``batch.mask`` is False.
    """
    with network.autocast():
        hidden = hidden_states(network, batch.row)
        sources = previous(batch)[batch.mask]
        labels = batch.row.ids[batch.targets[batch.mask]]
        logp, spread = _chunked_logps(
            network, hidden.index_select(0, sources), labels, temperature, entropy
        )
    return Logps(_aligned(logp, batch.mask), _aligned(spread, batch.mask))


def response_values(network: Network, batch: Batch, *, after_last: bool = False) -> Tensor:
    """``V(x, y_<t)`` for all targets, ``[B, T]``, in units of the score; 0 where masked.

    Args:
        network: a critic.
        batch: B sequences with targets ``[B, T]``.
        after_last: also the value of the state after the whole response, in column T_b where the
            response leaves room in T.
    """
    with network.autocast():
        hidden = hidden_states(network, batch.row)
        sources, mask = previous(batch), batch.mask
        if after_last:
            sources, mask = _with_end(sources, batch)
        raw = network.head(hidden.index_select(0, sources[mask]))[:, 0]
    return _aligned(_scaled(network, raw), mask)


def scores(network: Network, batch: Batch) -> Tensor:
    """``[B]`` score of each sequence, read at its last real token: (head output - mean) / std."""
    with network.autocast():
        hidden = hidden_states(network, batch.row)
        raw = network.head(hidden.index_select(0, batch.ends))[:, 0]
    return _scaled(network, raw)


def hidden_states(network: Network, row: PackedRow) -> Tensor:
    """Final hidden states ``[N, H]`` of the row's tokens, whatever layout the network bears."""
    if network.mode == "tree":
        return run_row(network, row, plan_of(row.segments, row.ids.device))
    flat, index = separate(row)
    if network.mode == "packed":
        return run_row(network, flat, plan_of(flat.segments, row.ids.device)).index_select(0, index)
    ids, mask, place = pad(flat)
    out = network.backbone(
        input_ids=ids,
        attention_mask=mask.long(),
        use_cache=False,
        **_positions(network, (mask.cumsum(1) - 1).clamp(min=0)),
    )
    return out.last_hidden_state.flatten(0, 1).index_select(0, place[index])


def run_row(network: Network, row: PackedRow, plan: Segments) -> Tensor:
    """One pass of the backbone over a packed row, ``[N, H]``.

    The mask tensor stays away and the cache is off: with either, transformers attends across the
    segments of a row.
    """
    out = network.backbone(
        input_ids=row.ids[None],
        attention_mask=None,
        use_cache=False,
        plan=plan,
        **_positions(network, row.positions[None]),
    )
    return out.last_hidden_state[0]


def run_step(network: Network, ids: Tensor, cache: Cache) -> Tensor:
    """One pass over the newest token ``[B]`` of each row against its cache, ``[B, H]``."""
    out = network.backbone(
        input_ids=ids[:, None],
        attention_mask=None,
        use_cache=False,
        plan=cache,
        **_positions(network, cache.lengths[:, None]),
    )
    cache.advance()
    return out.last_hidden_state[:, 0]


def logits(network: Network, hidden: Tensor) -> Tensor:
    """The policy's logits ``[..., V]`` from hidden states, with what its family adds."""
    config = network.module.config.get_text_config()
    out = network.head(hidden)
    if (scale := getattr(config, "logit_scale", None)) is not None:  # cohere
        out = out * scale
    if (scale := getattr(config, "logits_scaling", None)) is not None:  # granite
        out = out / scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # gemma
        out = torch.tanh(out / cap) * cap
    return out


def previous(batch: Batch) -> Tensor:
    """``[B, T]`` row index of the token before each target (0 where masked).

    Inside a segment it is the neighbour; the first token of an answer follows the last of its
    prompt. A target with nothing before it is a mistake of the encoder.
    """
    before = _before(batch.row.segments).to(batch.row.ids.device)
    sources = torch.where(batch.mask, before[batch.targets], 0)
    assert bool((sources >= 0).all()), "a target has no token before it"
    return sources


def _before(segments: tuple[Segment, ...]) -> Tensor:
    """``[N]`` row index of the token before each; −1 where there is none."""
    before = np.arange(-1, segments[-1].stop - 1)
    for segment in segments:
        if segment.stop > segment.start:
            parent = None if segment.parent is None else segments[segment.parent]
            before[segment.start] = _last(parent)
    return torch.from_numpy(before)


def _last(segment: Segment | None) -> int:
    """Row index of a segment's last token; −1 where there is none."""
    return -1 if segment is None or segment.stop == segment.start else segment.stop - 1


def _with_end(sources: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sources and mask widened by the state after the response, where there is room."""
    lengths = batch.mask.sum(1, keepdim=True)
    columns = torch.arange(batch.mask.shape[1], device=batch.mask.device)
    after = (columns == lengths) & (lengths > 0)
    return torch.where(after, batch.ends[:, None], sources), batch.mask | after


def _chunked_logps(
    network: Network, hidden: Tensor, labels: Tensor, temperature: float, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies ``[M]``, never more than CHUNK logits at a time."""
    vocabulary = network.module.config.get_text_config().vocab_size
    size = max(1, CHUNK // vocabulary)
    if len(hidden) <= size:
        return _logps(network, hidden, labels, temperature, entropy)
    parts = [
        checkpoint(_logps, network, h, y, temperature, entropy, use_reentrant=False)
        for h, y in zip(hidden.split(size), labels.split(size), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([spread for _, spread in parts])


def _logps(
    network: Network, hidden: Tensor, labels: Tensor, temperature: float, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    out = logits(network, hidden)
    if entropy == "none":
        logp = logprobs.token_logprobs(out, labels, temperature=temperature)
        return logp, torch.zeros_like(logp)
    return logprobs.logprobs_and_entropy(
        out, labels, temperature=temperature, entropy_gradient=entropy == "gradient"
    )


def _scaled(network: Network, raw: Tensor) -> Tensor:
    exact = raw if raw.dtype == torch.float64 else raw.float()
    return (exact - network.mean) / network.std


def _aligned(values: Tensor, mask: Tensor) -> Tensor:
    """Values ``[M]`` of the True entries in a tensor of the mask's shape, 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _positions(network: Network, positions: Tensor) -> dict[str, Any]:
    backbone: Any = type(network.backbone)
    return {"position_ids": positions} if _takes_positions(backbone) else {}


@lru_cache
def _takes_positions(backbone: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters
