"""Sampling answers.

Each answer owns a row of uniform numbers, drawn before decoding starts; token t is the inverse of
the cumulative distribution at number t. So an answer does not depend on its neighbours, on how
answers are batched or on the number of processes, and rows can leave the batch when they end.

Prompts are prefilled as one packed row, once each however many answers are asked, then decoded
one token a step. Rows that have ended are dropped from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from stages.batch import Example, Ids, pack
from stages.models.attention import Cache, Segments
from stages.models.forward import logits, run_row, run_step
from stages.models.network import Network
from stages.seeds import seed_of

CACHE_TOKENS = 1 << 16  # tokens decoded side by side at most, prompts included
LOOK_ON_GPU = 8  # tokens between two looks at what has ended: a look waits for the device
COMPACT_AT = 0.8  # share of running rows below which ended rows leave the cache

Hear = Callable[[int], None]  # is told each token of the one answer that is sampled


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        max_new_tokens: T, the longest answer.
        temperature: τ > 0; 0 takes the most likely token.
        top_p: smallest set of tokens with at least this probability; 1.0 = all.
        top_k: number of most likely tokens; 0 = all.
        stop_ids: an answer ends with the first of these, which belongs to it.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class Answer(NamedTuple):
    """One sampled answer: its token ids, stop token included, and whether it ended by itself."""

    ids: Ids
    ended: bool


def noise(seed: int, answers: Sequence[tuple[int, int]], tokens: int) -> Tensor:
    """Uniform numbers ``[answers, tokens]`` in float64, a generator for each answer.

    Args:
        seed: the run's seed.
        answers: (record position, sample index) of each answer.
        tokens: how many numbers each gets.
    """
    rows = []
    for position, sample in answers:
        generator = torch.Generator().manual_seed(seed_of(seed, "answer", position, sample))
        rows.append(torch.rand(tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


@torch.no_grad()
def generate(
    network: Network,
    prompts: Sequence[Ids],
    uniforms: Tensor,
    sampling: Sampling,
    *,
    hear: Hear | None = None,
) -> list[Answer]:
    """Sample answers to prompts.

    Args:
        network: a policy, used in evaluation mode; its mode is restored.
        prompts: R rows of token ids; equal neighbours share their prefill.
        uniforms: ``[R, max_new_tokens]`` numbers in [0, 1).
        sampling: limits and distribution.
        hear: is told each token of a single answer as it is drawn, its stop token included; what it
            raises ends the sampling.

    Returns:
        R answers, in the order of the prompts.
    """
    assert all(len(prompt) for prompt in prompts), "a prompt has no token to go on from"
    assert hear is None or len(prompts) == 1, "one answer at a time can be listened to"
    training = network.module.training
    network.module.eval()
    answers: list[Answer] = [Answer(np.empty(0, np.int64), False)] * len(prompts)
    try:
        with network.autocast():
            decode = _decode if network.cached else _decode_with_transformers
            for rows in _chunks(prompts, sampling.max_new_tokens, same_length=not network.cached):
                asked = [prompts[r] for r in rows]
                chunk = decode(network, asked, uniforms[rows], sampling, hear)
                for row, answer in zip(rows, chunk, strict=True):
                    answers[row] = answer
    finally:
        network.module.train(training)
    return answers


def pick(scores: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """The token of each row at its uniform number, the inverse of the cumulative distribution.

    Args:
        scores: logits ``[B, V]``.
        uniform: ``[B]`` in [0, 1), float64, on the device of the logits.
        sampling: temperature and cuts.

    Returns:
        ``[B]`` token ids.
    """
    if sampling.temperature == 0.0:
        return scores.argmax(dim=-1)
    exact = scores.double() if scores.dtype == torch.float64 else scores.float()
    probabilities = (exact / sampling.temperature).softmax(dim=-1)
    cumulative = _cut(probabilities, sampling).double().cumsum(dim=-1)
    point = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=scores.shape[1] - 1)


def _cut(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Probability 0 for what top-k and top-p leave out; the most likely token always stays."""
    if 0 < sampling.top_k < probabilities.shape[-1]:
        least = probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.where(probabilities >= least, 0.0)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.where(before < sampling.top_p * ordered.sum(-1, keepdim=True), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept)
    return probabilities


def _chunks(prompts: Sequence[Ids], new_tokens: int, *, same_length: bool) -> list[list[int]]:
    """Rows sorted by prompt length, cut so that each chunk's cache stays within CACHE_TOKENS."""
    chunks: list[list[int]] = [[]]
    for row in sorted(range(len(prompts)), key=lambda r: (len(prompts[r]), prompts[r].tobytes())):
        width = len(prompts[row]) + new_tokens
        if chunks[-1]:
            full = (len(chunks[-1]) + 1) * width > CACHE_TOKENS
            shorter = len(prompts[chunks[-1][-1]]) < len(prompts[row])
            if full or (same_length and shorter):
                chunks.append([])
        chunks[-1].append(row)
    return [chunk for chunk in chunks if chunk]


def _decode(
    network: Network,
    prompts: Sequence[Ids],
    uniforms: Tensor,
    sampling: Sampling,
    hear: Hear | None,
) -> list[Answer]:
    """Prefill, then one token a step for the rows that still run."""
    cache, hidden = _prefill(network, prompts)
    stop = torch.tensor(sampling.stop_ids, device=network.device)
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=network.device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=network.device)
    uniforms = uniforms.to(network.device)
    running = torch.arange(len(prompts), device=network.device)
    alive = torch.ones_like(running, dtype=torch.bool)
    look = LOOK_ON_GPU if network.device.type == "cuda" and hear is None else 1
    for step in range(sampling.max_new_tokens):
        token = pick(logits(network, hidden), uniforms[running, step], sampling)
        if hear is not None:
            hear(int(token[0]))
        tokens[running, step] = torch.where(alive, token, 0)
        lengths[running] += alive
        alive &= ~torch.isin(token, stop)
        if step + 1 == sampling.max_new_tokens:
            break
        left = len(alive) if (step + 1) % look else int(alive.sum())
        if left == 0:
            break
        if left < COMPACT_AT * len(alive):
            kept = alive.nonzero()[:, 0]
            cache.keep(kept)
            running, token, alive = running[kept], token[kept], alive[kept]
        hidden = run_step(network, token, cache)
    return _answers(tokens, lengths, sampling)


def _prefill(network: Network, prompts: Sequence[Ids]) -> tuple[Cache, Tensor]:
    """Each different prompt once, packed; its keys and values for every row that asks for it.

    Returns:
        The cache of B rows and the hidden state ``[B, H]`` of each prompt's last token.
    """
    unique = list({prompt.tobytes(): prompt for prompt in prompts}.values())
    place = {prompt.tobytes(): n for n, prompt in enumerate(unique)}
    batch = pack([Example(prompt, np.empty(0, np.int64)) for prompt in unique]).to(network.device)
    of = [place[prompt.tobytes()] for prompt in prompts]
    starts = torch.tensor([batch.row.segments[n].start for n in of], device=network.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=network.device)
    columns = torch.arange(int(lengths.max()), device=network.device)
    source = torch.where(columns < lengths[:, None], starts[:, None] + columns, 0)
    cache = Cache(source, lengths, network.compute)
    hidden = run_row(network, batch.row, Segments(batch.row.segments, network.device, cache))
    return cache, hidden[starts + lengths - 1]


def _answers(tokens: Tensor, lengths: Tensor, sampling: Sampling) -> list[Answer]:
    stops = set(sampling.stop_ids)
    rows = [row[:n] for row, n in zip(tokens.cpu().numpy(), lengths.tolist(), strict=True)]
    return [Answer(row, len(row) > 0 and int(row[-1]) in stops) for row in rows]


class _Inverse(LogitsProcessor):
    """Makes transformers' greedy search take the token that ``pick`` takes."""

    def __init__(
        self, uniforms: Tensor, prompt: int, sampling: Sampling, hear: Hear | None
    ) -> None:
        self.uniforms, self.prompt, self.sampling, self.hear = uniforms, prompt, sampling, hear

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = pick(scores, self.uniforms[:, input_ids.shape[1] - self.prompt], self.sampling)
        if self.hear is not None:
            self.hear(int(token[0]))
        chosen = torch.full_like(scores, float("-inf"))
        return chosen.scatter(1, token[:, None], 0.0)


def _decode_with_transformers(
    network: Network,
    prompts: Sequence[Ids],
    uniforms: Tensor,
    sampling: Sampling,
    hear: Hear | None,
) -> list[Answer]:
    """The same answers by transformers' own loop, for families whose attention is their own.

    The prompts have one length: padding on the left would reach recurrent and ALiBi layers.
    """
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(network.device)
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=list(sampling.stop_ids),
        pad_token_id=0,
    )
    module: Any = network.module  # it generates, which its declared class does not say
    with _settings(module, settings):
        out = module.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[_Inverse(uniforms.to(ids.device), ids.shape[1], sampling, hear)],
        )
    tokens = out[:, ids.shape[1] :]
    ended = torch.isin(tokens, torch.tensor(sampling.stop_ids, device=out.device))
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, tokens.shape[1])
    return _answers(tokens, lengths, sampling)


@contextmanager
def _settings(module: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """Other generation settings for a while: the model's own would fill in what is not said."""
    kept, module.generation_config = module.generation_config, settings
    try:
        yield
    finally:
        module.generation_config = kept
