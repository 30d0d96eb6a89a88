"""Prompts → ``Rollout``: what one iteration learns from.

Answers are sampled from the policy; then the policy itself, the reference, the critic and the
reward models of its vocabulary read them once more, in the same packed passes that training uses,
so that the log-probabilities of sampling (``logp_old``) and of the update come from one code path.
Other rewards read the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages.batch import Batch, Example, Ids, behind, pack
from stages.data.plan import micro_batches, share
from stages.errors import TrainingError
from stages.judges import Failure, Judge, Kept, columns
from stages.models.forward import response_logps, response_values, scores
from stages.models.generate import Answer, Sampling, generate, noise
from stages.models.network import Network, casts_kept
from stages.runtime.processes import World
from stages.runtime.rewards.texts import Score, Scorer

Key = tuple[int, int]  # record position and sample index of an answer
Targets = dict[str, Tensor]  # what a method makes of a rollout and its minibatches aim at, by name
TENSORS = ("logp_old", "logp_ref", "values_old", "terms", "judged")


@dataclass(frozen=True)
class Readers:
    """What reads answers; only ppo has a critic.

    Attributes:
        policy: which wrote them.
        reference: what the KL is measured from.
        rewards: reward models that read the policy's token ids, by the names of their terms.
        critic: the value network.
        texts: the terms of the reward that read texts, by name.
    """

    policy: Network
    reference: Network
    rewards: Mapping[str, Network]
    critic: Network | None
    texts: Mapping[str, Scorer] = field(default_factory=dict)

    @property
    def reward(self) -> Network:
        """The first reward model that reads token ids."""
        return next(iter(self.rewards.values()))

    @property
    def networks(self) -> list[Network]:
        """All that read token ids."""
        found = [self.policy, self.reference, *self.rewards.values(), self.critic]
        return [network for network in found if network is not None]


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
        scores: ``[B]`` the weighted sum of the reward's terms, before clip and missing-EOS rule.
        terms: ``[B, J]`` what each term says, before its own clip and normalising.
        judged: ``[B, J]`` bool, False = the term has no judgement.
    """

    prompts: tuple[Ids, ...]
    answers: tuple[Ids, ...]
    ended: Tensor
    mask: Tensor
    logp_old: Tensor
    logp_ref: Tensor
    values_old: Tensor
    scores: Tensor
    terms: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    judged: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.prompts)

    def examples(self) -> list[Example]:
        """Each answer behind its prompt."""
        return [behind(p, a) for p, a in zip(self.prompts, self.answers, strict=True)]

    def to_tensors(self) -> dict[str, Tensor]:
        """As named tensors, for a checkpoint."""
        flat = {name: getattr(self, name) for name in (*TENSORS, "scores")}
        for name in ("prompts", "answers"):
            rows = getattr(self, name)
            flat[name] = torch.from_numpy(np.concatenate(rows).astype(np.int64))
            flat[f"{name}_lengths"] = torch.tensor([len(row) for row in rows])
        return {**flat, "ended": self.ended, "mask": self.mask}


class Collected(NamedTuple):
    """A rollout, and what comes with it.

    Attributes:
        rollout: the answers.
        sampling_seconds: spent on sampling them.
        reading_seconds: spent on reading them.
        moments: of normalised terms of the reward, this rollout included.
    """

    rollout: Rollout
    sampling_seconds: float
    reading_seconds: float
    moments: Kept


def from_tensors(tensors: dict[str, Tensor]) -> tuple[Rollout, Targets]:
    """The inverse of :meth:`Rollout.to_tensors`, and what is beside the rollout."""
    rows, tensors = {}, dict(tensors)
    for name in ("prompts", "answers"):
        ends = np.cumsum(tensors.pop(f"{name}_lengths").numpy())[:-1]
        rows[name] = tuple(np.split(tensors.pop(name).numpy(), ends))
    rest = {name: tensors.pop(name) for name in (*TENSORS, "scores", "ended", "mask")}
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
    judge: Judge | None = None,
) -> Collected:
    """Sample an answer to each prompt and have all models read it.

    Args:
        readers: the models; a missing critic gives values 0.
        prompts: B rows of ids, the same on every process.
        keys: (record position, sample index) of each answer, which seed its noise.
        sampling: limits and distribution.
        seed: the run's seed.
        budget: tokens per micro-batch of the reading passes.
        after_last: whether the critic also values the state after the answer.
        world: each process samples, reads and judges its share; every process returns the whole.
        judge: what becomes of the terms of the reward; None adds up the models of ``readers``.

    Returns:
        The rollout, on the CPU, and the seconds it took.

    Raises:
        TrainingError: a term of the reward failed, or none has a judgement of an answer.
    """
    judge = judge or Judge.alone(list(readers.rewards))
    started = time.perf_counter()
    mine = share([len(p) for p in prompts], world.rank, world.size)
    own = [prompts[n] for n in mine]
    uniforms = noise(seed, [keys[n] for n in mine], sampling.max_new_tokens) if own else None
    with casts_kept(readers.policy):
        answers = [] if uniforms is None else generate(readers.policy, own, uniforms, sampling)
    examples = [behind(p, a.ids) for p, a in zip(own, answers, strict=True)]
    sampled = time.perf_counter()
    read = _read(readers, examples, sampling, judge.names, budget=budget, after_last=after_last)
    texts = judge.read([int(n) for n in mine], answers)
    rows = _gathered(world, mine, answers, read, texts, judge)
    _require_judged(rows, judge)
    rollout, moments = _assemble(prompts, rows, sampling, judge)
    return Collected(rollout, sampled - started, time.perf_counter() - sampled, moments)


def _gathered(
    world: World,
    mine: np.ndarray,
    answers: Sequence[Answer],
    read: dict[str, Tensor],
    texts: dict[str, list[Score]] | Failure,
    judge: Judge,
) -> list[Any]:
    """What all processes know of each answer, in the order of the prompts.

    Raises:
        TrainingError: a term failed, on whichever process: then it ends the run on all.
    """
    if isinstance(texts, Failure):
        rows: list[Any] = [texts]
    else:
        why = columns(texts, judge.names, read["terms"], read["judged"])
        rows = [
            (int(n), answer, {name: read[name][i].numpy() for name in TENSORS}, why[i])
            for i, (n, answer) in enumerate(zip(mine, answers, strict=True))
        ]
    gathered = world.gather(rows)
    for row in gathered:
        if isinstance(row, Failure):
            raise row.error()
    return sorted(gathered, key=lambda row: row[0])


def _require_judged(rows: Sequence[Any], judge: Judge) -> None:
    """Every answer has a judgement of one term at least: none is taken for a zero.

    Raises:
        TrainingError: one has none.
    """
    for n, answer, tensors, why in rows:
        if not tensors["judged"].any():
            raise TrainingError(
                f"no term of the reward has a judgement of an answer to {judge.told(n, answer)} "
                f"({why})",
                where="reward",
                do="let the reward judge it, or add a term that judges every answer, then run the "
                "same command again with --resume",
            )


def _assemble(
    prompts: Sequence[Ids], rows: list[Any], sampling: Sampling, judge: Judge
) -> tuple[Rollout, Kept]:
    """The rows of all processes, in the order of the prompts."""
    answers = tuple(answer.ids for _, answer, *_ in rows)
    lengths = torch.tensor([len(ids) for ids in answers])
    stacked = {
        name: torch.from_numpy(np.stack([tensors[name] for _, _, tensors, _ in rows]))
        for name in TENSORS
    }
    scores, moments = judge.weigh(stacked["terms"], stacked["judged"])
    rollout = Rollout(
        prompts=tuple(prompts),
        answers=answers,
        ended=torch.tensor([answer.ended for _, answer, *_ in rows]),
        mask=torch.arange(sampling.max_new_tokens) < lengths[:, None],
        scores=scores,
        **stacked,
    )
    return rollout, moments


@torch.no_grad()
def _read(
    readers: Readers,
    examples: Sequence[Example],
    sampling: Sampling,
    names: Sequence[str],
    *,
    budget: int,
    after_last: bool,
) -> dict[str, Tensor]:
    """Log-probabilities, values and scores of complete answers, in evaluation mode."""
    tau, width, count = sampling.temperature, sampling.max_new_tokens, len(examples)
    dtype = dtype_of(readers.policy)
    out = {name: torch.zeros((count, width), dtype=dtype) for name in TENSORS[:3]}
    out["terms"] = torch.zeros((count, len(names)), dtype=dtype)
    out["judged"] = torch.ones((count, len(names)), dtype=torch.bool)
    passes: list[tuple[Tensor, Network, Callable[[Network, Batch], Tensor]]] = [
        (out["logp_old"], readers.policy, lambda n, b: response_logps(n, b, temperature=tau).logp),
        (
            out["logp_ref"],
            readers.reference,
            lambda n, b: response_logps(n, b, temperature=tau).logp,
        ),
    ]
    if readers.critic is not None:
        values = partial(response_values, after_last=after_last)
        passes.append((out["values_old"], readers.critic, values))
    for name, network in readers.rewards.items():
        passes.append((out["terms"][:, names.index(name)], network, scores))
    for _, network, _ in passes:
        network.module.eval()
    for rows in micro_batches([len(example.ids) for example in examples], budget):
        batch = widened(pack([examples[n] for n in rows]), width).to(readers.policy.device)
        for target, network, read in passes:
            target[rows] = read(network, batch).cpu().to(dtype)
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
