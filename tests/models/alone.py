"""What transformers itself says of each sequence alone: the truth that every layout is held to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    GraniteConfig,
    PreTrainedConfig,
)

from stages.batch import Example, behind
from stages.models.network import Network

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}

_WIDE = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ROTARY = {**_WIDE, "intermediate_size": 32, "max_position_embeddings": 256}


def other_config(name: str) -> PreTrainedConfig:
    """Families with an attention or a head of their own."""
    return {
        "falcon": lambda: FalconConfig(**_WIDE, alibi=False),
        "bloom": lambda: BloomConfig(
            vocab_size=97, hidden_size=16, n_layer=2, n_head=4, initializer_range=0.3,
            bos_token_id=None, eos_token_id=1, pad_token_id=0,
        ),
        "cohere": lambda: CohereConfig(**_ROTARY, num_key_value_heads=2, logit_scale=0.3),
        "granite": lambda: GraniteConfig(
            **_ROTARY, num_key_value_heads=2, logits_scaling=3.0, attention_multiplier=0.4,
            embedding_multiplier=2.0, residual_multiplier=0.5,
        ),
        "gemma2": lambda: Gemma2Config(
            **_ROTARY, num_key_value_heads=2, head_dim=8, sliding_window=6,
            final_logit_softcapping=2.0, attn_logit_softcapping=1.0, query_pre_attn_scalar=8,
        ),
    }[name]()  # fmt: skip


def twin(network: Network) -> Any:
    """A copy of the module that attends in its family's own way.

    The plain way computes its softmax in fp32 whatever the model's dtype, so in float64 it is sdpa.
    """
    module = copy.deepcopy(network.module)
    double = next(module.parameters()).dtype == torch.float64
    module.set_attn_implementation("sdpa" if double and module._supports_sdpa else "eager")
    return module


def logps_alone(module: Any, example: Example, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities ``[T]`` of an example's targets, from one plain forward pass."""
    chosen = torch.from_numpy(example.ids[example.targets])
    return _distributions(module, example, temperature).gather(1, chosen[:, None])[:, 0]


def entropy_alone(module: Any, example: Example, *, temperature: float = 1.0) -> Tensor:
    """Entropies ``[T]`` of the distributions that the targets were drawn from."""
    logp = _distributions(module, example, temperature)
    return -(logp.exp() * logp).sum(1)


def _distributions(module: Any, example: Example, temperature: float) -> Tensor:
    logits = module(input_ids=_row(example.ids)).logits[0]
    return (logits / temperature).log_softmax(dim=-1)[torch.from_numpy(example.targets) - 1]


def states_alone(module: Any, example: Example) -> Tensor:
    """The head's output ``[S]`` at every token."""
    hidden = module.base_model(input_ids=_row(example.ids)).last_hidden_state[0]
    return module.score(hidden)[:, 0]


def score_alone(module: Any, example: Example) -> Tensor:
    """The one logit of ``AutoModelForSequenceClassification`` for a single text."""
    return module(input_ids=_row(example.ids)).logits[0, 0]


def _row(ids: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]


def tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    """Token ids that neither pad nor end."""
    return rng.integers(2, 97, length)


def examples(*shapes: tuple[int, int], seed: int = 0) -> list[Example]:
    """Prompts and responses of the given lengths; every response token is a target."""
    rng = np.random.default_rng(seed)
    return [behind(tokens(rng, p), tokens(rng, t)) for p, t in shapes]


def weights_like(rows: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Random numbers of both signs, so that a loss made of them depends on every entry."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) for r in rows]


def gradients(module: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each parameter by name, zeros where the loss does not reach it."""
    module.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
    }


def assert_close(
    got: Tensor, expected: Tensor, dtype: torch.dtype, *, limit: float | None = None
) -> None:
    """Equal up to the dtype's tolerance, or another one, relative to the largest number."""
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    limit = (limit or TOLERANCES[dtype]) * max(1.0, largest)
    torch.testing.assert_close(got, expected, atol=limit, rtol=0.0)


def assert_same_gradients(
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    limit: float | None = None,
) -> None:
    """All gradients equal; none of them is zero everywhere."""
    assert got.keys() == expected.keys()
    assert any(bool(g.abs().max() > 0) for g in expected.values())
    for name, gradient in expected.items():
        try:
            assert_close(got[name], gradient, dtype, limit=limit)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
