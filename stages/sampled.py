"""What is told of sampled answers: figures on held-out prompts, and the answers themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages import judges
from stages.batch import Ids
from stages.config import OnlineConfig
from stages.config.rewards import Placed
from stages.data.kinds import PromptItem
from stages.data.store import Store
from stages.errors import TrainingError
from stages.functional.divergence import kl_estimate
from stages.functional.masking import masked, masked_sum
from stages.rollout import Key, Rollout
from stages.runtime import metrics
from stages.runtime.loop import require_finite
from stages.runtime.reporter import Reporter

Sample = dict[str, Any]


def answer_figures(rollout: Rollout) -> dict[str, float]:
    """Scores, KL in nats, lengths in tokens, and the shares that ended, were cut off, or are empty.

    An answer is empty where its end token is all there is.
    """
    lengths = rollout.mask.sum(dim=1).double()
    kl = kl_estimate(rollout.logp_old, rollout.logp_ref, estimator="k1")
    return {
        "objective/kl": float(masked_sum(kl, rollout.mask)) / len(rollout),
        "objective/score": float(rollout.scores.mean()),
        "objective/score_std": float(rollout.scores.double().std(correction=0)),
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_min": float(lengths.min()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/ended": float(rollout.ended.double().mean()),
        "rollout/cut": float((~rollout.ended).double().mean()),
        "rollout/empty": float((lengths <= rollout.ended.double()).double().mean()),
    }


def held_out_figures(
    held_out: Store,
    size: int,
    answer: Callable[[Sequence[PromptItem], Sequence[Key]], Rollout],
    terms: Sequence[Placed],
) -> dict[str, float]:
    """Score, KL and length of one answer to each held-out prompt, at fixed noise.

    Args:
        held_out: prompts.
        size: how many are answered at a time.
        answer: samples an answer to each of some prompts.
        terms: of the reward.

    Raises:
        TrainingError: a figure is not finite.
    """
    sums, rollouts = np.zeros(3), []
    for first in range(0, len(held_out), size):
        places = range(first, min(first + size, len(held_out)))
        rollout = answer([held_out[n] for n in places], [(-1 - n, 0) for n in places])
        rollouts.append((rollout.terms, rollout.judged))
        kl = kl_estimate(rollout.logp_old, rollout.logp_ref, estimator="k1")
        sums += [rollout.scores.sum(), masked_sum(kl, rollout.mask), rollout.mask.sum()]
    score, kl_mean, length = (float(value) for value in sums / len(held_out))
    raw, judged = (torch.cat(parts) for parts in zip(*rollouts, strict=True))
    return {
        "eval/score": score,
        "eval/kl": kl_mean,
        "eval/response_length_mean": length,
        **{f"eval/score_{name}": mean for name, mean in judges.means(terms, raw, judged).items()},
    }


def require_figures(figures: Mapping[str, float], what: str) -> None:
    """A guard: every figure is a number.

    Raises:
        TrainingError: one is not finite.
    """
    for name, value in figures.items():
        require_finite(value, what=f"{what}, {name}")


def require_scores(rollout: Rollout, what: str) -> None:
    """A guard: no broken score reaches the advantages.

    Raises:
        TrainingError: a score is not finite.
    """
    for value in rollout.scores.tolist():
        require_finite(value, what=f"{what}, score")


def require_near(kl: float, config: OnlineConfig, what: str) -> None:
    """A guard: stop where the policy has left the reference too far behind.

    Args:
        kl: mean over the answers of a rollout, nats.
        config: of the run.
        what: the rollout.

    Raises:
        TrainingError: the KL is above ``kl.stop_above``.
    """
    limit = config.kl.stop_above
    if limit is not None and kl > limit:
        raise TrainingError(
            f"{what}: the KL to the reference is {kl:.3g} nats per answer, above kl.stop_above "
            f"{limit:g}",
            do=f"raise {config.leash} or lower train.learning_rate; the state before is saved",
        )


def first_answers(
    rollout: Rollout,
    count: int,
    prompt: Callable[[int], Any],
    decode: Callable[[Ids], str],
    terms: Sequence[Placed],
) -> list[Sample]:
    """The first answers of a rollout with their scores and KL.

    Args:
        rollout: B answers.
        count: how many of them at most.
        prompt: row → its prompt as in the data.
        decode: ids → text.
        terms: of the reward.
    """
    kl = kl_estimate(rollout.logp_old, rollout.logp_ref, estimator="k1")
    sums = masked(kl, rollout.mask).sum(dim=1)
    return [
        {
            "prompt": prompt(n),
            "response": decode(rollout.answers[n]),
            "response_ids": rollout.answers[n].tolist(),
            "ended": bool(rollout.ended[n]),
            "score": float(rollout.scores[n]),
            "kl": float(sums[n]),
            **judges.of_answer(terms, rollout.terms[n], rollout.judged[n]),
        }
        for n in range(min(count, len(rollout)))
    ]


def show(
    samples: Sequence[Sample], when: Mapping[str, int], file: Path, reporter: Reporter
) -> None:
    """Answers as a table, and as lines of samples.jsonl that say when they were sampled."""
    for sample in samples:
        metrics.append(file, {**when, **sample})
    title = f"answers of iteration {when['iteration']}"
    reporter.table(title, ("prompt", "answer", "score", "kl"), [_row(s) for s in samples])


def _row(sample: Sample) -> list[str]:
    prompt = sample["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return [text, sample["response"], f"{sample['score']:.3f}", f"{sample['kl']:.3f}"]
