"""Log-probabilities of chosen tokens, and the entropy of the distribution they came from.

Both are computed in float32 for half-precision logits; float64 stays float64. The logits at index t
are those that predict the label at index t.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label under the softmax at the sampling temperature.

        logp = x_y/τ − log Σ_v exp(x_v/τ)

    Source: Ziegler et al. 2019, code ``policy.py``: logits are divided by τ for the old, the new
    and the reference policy alike.

    Args:
        logits: ``[..., V]``, aligned with the labels.
        labels: ``[...]`` token ids.
        temperature: τ > 0.

    Returns:
        ``[...]``, nats.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit labels {tuple(labels.shape)}")
    return _chosen(log_softmax(logits, temperature=temperature), labels)


def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy of the softmax at the sampling temperature: H = −Σ_v p_v·log p_v.

    Not −logp of the sampled tokens, which has the same expectation and is another number.

    Args:
        logits: ``[..., V]``.
        temperature: τ > 0.

    Returns:
        ``[...]``, nats.
    """
    return _entropy(log_softmax(logits, temperature=temperature))


def logprobs_and_entropy(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Both of the above from one log-softmax.

    Args:
        logits: ``[..., V]``, aligned with the labels.
        labels: ``[...]`` token ids.
        temperature: τ > 0.
        entropy_gradient: whether the entropy is differentiated; otherwise it is a figure.

    Returns:
        Log-probabilities and entropies ``[...]``, nats.
    """
    logp = log_softmax(logits, temperature=temperature)
    return _chosen(logp, labels), _entropy(logp if entropy_gradient else logp.detach())


def log_softmax(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-softmax over the last axis of logits/τ, in float32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if temperature != 1.0:
        logits = logits.to(wide) / temperature
    return torch.log_softmax(logits, dim=-1, dtype=wide)


def _chosen(logp: Tensor, labels: Tensor) -> Tensor:
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _entropy(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp).sum(dim=-1)
