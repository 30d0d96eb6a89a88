"""Prompts → ``Rollout``: what one iteration learns from.

Answers are sampled from the policy; then the policy itself, the reference, the critic and the
reward model read them once more, in the same packed passes that training uses, so that the
log-probabilities of sampling (``logp_old``) and of the update come from one code path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages.batch import Batch, Example, Ids, behind, pack
from stages.data.plan import micro_batches, share
from stages.models.forward import response_logps, response_values, scores
from stages.models.generate import Sampling, generate, noise
from stages.models.network import Network, casts_kept
from stages.runtime.processes import World

Key = tuple[int, int]  # record position and sample index of an answer
Targets = dict[str, Tensor]  # what a method makes of a rollout and its minibatches aim at, by name
TENSORS = ("logp_old", "logp_ref", "values_old", "scores")


@dataclass(frozen=True)
class Readers:
    """The models that read answers; only ppo has a critic."""

    policy: Network
    reference: Network
    reward: Network
    critic: Network | None


@dataclass(frozen=True)
class Rollout:
    """B answers with everything that was known when they were sampled.

    Attributes:
        prompts: B rows of prompt ids.
        answers: B rows of answer ids; the stop token, where there is one, is the last.
        ended: ``[B]`` bool, whether an answer ended by itself.
        mask: ``[B, T]`` bool, True = a real token; T is the length limit.
        logp_old: ``[B, T]`` log π_old(y_t | x, y_<t), nats, at the sampling temperature.
        logp_ref: ``[B, T]`` of the reference.
        values_old: ``[B, T]`` V(x, y_<t); one slot more per row where the score is placed after the
            last token.
        scores: ``[B]`` what the reward model says, before clip and missing-EOS rule.
    """

    prompts: tuple[Ids, ...]
    answers: tuple[Ids, ...]
    ended: Tensor
    mask: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    values_old: Tensor
    scores: Tensor

    def __len__(self) -> int:
        return len(self.prompts)

    def examples(self) -> list[Example]:
        """Each answer behind its prompt."""
        return [behind(p, a) for p, a in zip(self.prompts, self.answers, strict=True)]

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, for a checkpoint."""
        flat = {name: getattr(self, name) for name in TENSORS}
        for name in ("prompts", "answers"):
            rows = getattr(self, name)
            flat[name] = torch.from_numpy(np.concatenate(rows).astype(np.int64))
            flat[f"{name}_lengths"] = torch.tensor([len(row) for row in rows])
        return {**flat, "ended": self.ended, "mask": self.mask}


class Collected(NamedTuple):
    """A rollout, and the seconds spent on sampling it and on reading it."""

    rollout: Rollout
    sampling_seconds: float
    reading_seconds: float


def from_tensors(tensors: dict[str, Tensor]) -> tuple[Rollout, Targets]:
    """The inverse of :meth:`Rollout.to_tensors`, and what is beside the rollout."""
    rows, tensors = {}, dict(tensors)
    for name in ("prompts", "answers"):
        ends = np.cumsum(tensors.pop(f"{name}_lengths").numpy())[:-1]
        rows[name] = tuple(np.split(tensors.pop(name).numpy(), ends))
    rest = {name: tensors.pop(name) for name in (*TENSORS, "ended", "mask")}
    return Rollout(rows["prompts"], rows["answers"], **rest), tensors


def collect(
    readers: Readers,
    prompts: Sequence[Ids],
    keys: Sequence[Key],
    sampling: Sampling,
    *,
    seed: int,
    budget: int,
    after_last: bool,
    world: World,
) -> Collected:
    """Sample an answer to each prompt and have all models read it.

    Args:
        readers: the four models; a missing critic gives values 0.
        prompts: B rows of ids, the same on every process.
        keys: (record position, sample index) of each answer, which seed its noise.
        sampling: limits and distribution.
        seed: the run's seed.
        budget: tokens per micro-batch of the reading passes.
        after_last: whether the critic also values the state after the answer.
        world: each process samples and reads its share; every process returns the whole.

    Returns:
        The rollout, on the CPU, and the seconds it took.
    """
    started = time.perf_counter()
    mine = share([len(p) for p in prompts], world.rank, world.size)
    own = [prompts[n] for n in mine]
    uniforms = noise(seed, [keys[n] for n in mine], sampling.max_new_tokens) if own else None
    with casts_kept(readers.policy):
        answers = [] if uniforms is None else generate(readers.policy, own, uniforms, sampling)
    examples = [behind(p, a.ids) for p, a in zip(own, answers, strict=True)]
    sampled = time.perf_counter()
    read = _read(readers, examples, sampling, budget=budget, after_last=after_last)
    rows = [
        (int(n), answer.ids, answer.ended, {name: read[name][i].numpy() for name in TENSORS})
        for i, (n, answer) in enumerate(zip(mine, answers, strict=True))
    ]
    rollout = _assemble(prompts, sorted(world.gather(rows), key=lambda row: row[0]), sampling)
    return Collected(rollout, sampled - started, time.perf_counter() - sampled)


def _assemble(prompts: Sequence[Ids], rows: list[Any], sampling: Sampling) -> Rollout:
    """The rows of all processes, in the order of the prompts."""
    answers = tuple(ids for _, ids, _, _ in rows)
    lengths = torch.tensor([len(ids) for ids in answers])
    stacked = {
        name: torch.from_numpy(np.stack([tensors[name] for *_, tensors in rows]))
        for name in TENSORS
    }
    return Rollout(
        prompts=tuple(prompts),
        answers=answers,
        ended=torch.tensor([ended for _, _, ended, _ in rows]),
        mask=torch.arange(sampling.max_new_tokens) < lengths[:, None],
        **stacked,
    )


@torch.no_grad()
def _read(
    readers: Readers,
    examples: Sequence[Example],
    sampling: Sampling,
    *,
    budget: int,
    after_last: bool,
) -> dict[str, Tensor]:
    """Log-probabilities, values and scores of complete answers, in evaluation mode."""
    tau, width = sampling.temperature, sampling.max_new_tokens
    passes: dict[str, tuple[Network | None, Callable[[Network, Batch], Tensor]]] = {
        "logp_old": (readers.policy, lambda n, b: response_logps(n, b, temperature=tau).logp),
        "logp_ref": (readers.reference, lambda n, b: response_logps(n, b, temperature=tau).logp),
        "values_old": (readers.critic, lambda n, b: response_values(n, b, after_last=after_last)),
        "scores": (readers.reward, scores),
    }
    shapes = {name: (len(examples), width) for name in passes} | {"scores": (len(examples),)}
    out = {
        name: torch.zeros(shape, dtype=dtype_of(readers.policy)) for name, shape in shapes.items()
    }
    for network, _ in passes.values():
        if network is not None:
            network.module.eval()
    for rows in micro_batches([len(example.ids) for example in examples], budget):
        batch = widened(pack([examples[n] for n in rows]), width).to(readers.policy.device)
        for name, (network, read) in passes.items():
            if network is not None:
                out[name][rows] = read(network, batch).cpu().to(out[name].dtype)
    return out


def widened(batch: Batch, width: int) -> Batch:
    """The same batch with T = ``width`` columns, so that tensors of all batches stack."""
    extra = (0, width - batch.mask.shape[1])
    targets = torch.nn.functional.pad(batch.targets, extra)
    mask = torch.nn.functional.pad(batch.mask, extra)
    return Batch(batch.row, targets, mask, batch.ends)


def dtype_of(network: Network) -> torch.dtype:
    """float64 for a float64 model, else float32."""
    return torch.float64 if network.module.dtype == torch.float64 else torch.float32
