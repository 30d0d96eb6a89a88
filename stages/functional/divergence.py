"""KL divergences, estimated from sampled tokens or summed over the vocabulary.

Source: Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stages.functional.logprobs import log_softmax

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logp: Tensor, logp_other: Tensor, *, estimator: Estimator) -> Tensor:
    """KL(p‖q) estimated at tokens x sampled from p, with d = log q(x) − log p(x).

        k1 = −d              unbiased, signed
        k2 = d²/2            biased, ≥ 0
        k3 = e^d − 1 − d     unbiased, ≥ 0

    Args:
        logp: log p(x), the policy that sampled; nats.
        logp_other: log q(x), same shape.
        estimator: k1, k2 or k3.

    Returns:
        Same shape, nats.
    """
    if logp.shape != logp_other.shape:
        raise ValueError(f"shapes {tuple(logp.shape)} and {tuple(logp_other.shape)} differ")
    d = logp_other - logp
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.expm1(d) - d  # e^d − 1 loses every digit of a small d
    raise ValueError(f"unknown estimator {estimator!r}")


def exact_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p‖q) of two softmax distributions: Σ_v p_v·(log p_v − log q_v).

    Args:
        logits_p: ``[..., V]``.
        logits_q: ``[..., V]``.

    Returns:
        ``[...]``, nats.
    """
    if logits_p.shape != logits_q.shape:
        raise ValueError(f"shapes {tuple(logits_p.shape)} and {tuple(logits_q.shape)} differ")
    logp, logq = log_softmax(logits_p), log_softmax(logits_q)
    return (logp.exp() * (logp - logq)).sum(dim=-1)
