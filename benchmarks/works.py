"""What is compared: the works, their sizes and the settings that both sides share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

Stage = Literal["sft", "reward_model", "ppo", "sample"]


@dataclass(frozen=True)
class Work:
    """A training or a sampling run that either side can do.

    Attributes:
        name: as the table shows it.
        stage: what is run.
        records: demonstrations, rankings, episodes or prompts.
        batch: records of an optimiser step; of a rollout in ppo.
        micro: sequences (reward_model: pairs) that the peer reads at once.
        size: of the model, a key of ``inputs.SIZES``.
        k: answers of a ranking, or samples of a prompt.
        epochs: passes over the records; in ppo over each rollout.
        iterations: rollouts of ppo.
        new_tokens: longest sampled answer.
        ending: whether the model ends half of its answers before token 16.
        learning_rate: constant over the run.
        kl_coef: β of ppo.
        prompt_words: median length of a prompt.
        answer_words: median length of an answer.
        spread: of the logarithm of the lengths; 0 makes all of the median length.
        words: how many different ones there are; None is all that the model knows.
    """

    name: str
    stage: Stage
    records: int
    batch: int
    micro: int = 16
    size: str = "small"
    k: int = 1
    epochs: int = 1
    iterations: int = 1
    new_tokens: int = 64
    ending: bool = False
    learning_rate: float = 1e-5
    kl_coef: float = 0.05
    prompt_words: int = 24
    answer_words: int = 40
    spread: float = 0.6
    words: int | None = None

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return "".join(c if c.isalnum() else "-" for c in self.name.lower())


def sft(records: int) -> Work:
    """Demonstrations in two optimiser steps."""
    name = f"SFT, {records} demonstrations of mixed lengths"
    return Work(name, "sft", records=records, batch=records // 2)


def reward(records: int, k: int) -> Work:
    """Rankings in two optimiser steps."""
    name = f"reward model, {records} rankings of K = {k}"
    return Work(name, "reward_model", records=records, batch=records // 2, micro=12, k=k)


def ppo(episodes: int, *, epochs: int = 1, ending: bool = False, tokens: int = 64) -> Work:
    """One rollout, of which each epoch is an optimiser step.

    There are prompts for two: at the end of its prompts the peer takes a step at each micro-batch.
    """
    length = "of mixed lengths" if ending else f"of {tokens} tokens"
    return Work(
        f"PPO, {episodes} answers {length}, {epochs} epoch{'s' if epochs > 1 else ''}",
        "ppo",
        records=2 * episodes,
        batch=episodes,
        epochs=epochs,
        new_tokens=tokens,
        ending=ending,
        learning_rate=1e-6,
    )


def sample(prompts: int, k: int = 1) -> Work:
    """Answers of mixed lengths."""
    each = f" × {k}" if k > 1 else ""
    name = f"sampling, {prompts} prompts{each}, mixed lengths"
    return Work(name, "sample", records=prompts, batch=prompts, k=k, ending=True)


LONG_ROWS = Work(
    "SFT, 135 M model, rows of 512 tokens",
    "sft",
    records=16,
    batch=8,
    micro=4,
    size="medium",
    prompt_words=128,
    answer_words=384,
    spread=0.0,
)
SAMPLING = (sample(64), sample(16, 4), sample(256))
FULL: tuple[Work, ...] = (
    sft(128),
    LONG_ROWS,
    reward(32, 4),
    reward(8, 9),
    ppo(64),
    ppo(64, epochs=4),
    ppo(64, ending=True),
    *SAMPLING,
)
REDUCED: tuple[Work, ...] = (
    sft(64),
    reward(12, 4),
    reward(4, 9),
    ppo(64),
    ppo(32, epochs=4),
    ppo(64, ending=True),
    *SAMPLING,
)
"""What fits into half an hour where a matrix product runs at a tenth of a TFLOP/s."""
QUICK: tuple[Work, ...] = tuple(
    replace(work, size="tiny") for work in (sft(64), reward(12, 4), ppo(32), sample(64))
)


@dataclass(frozen=True)
class Job:
    """A work with its files, as it is handed to a child process.

    Attributes:
        work: what to do.
        model: the policy's folder.
        reward: the reward model's folder.
        data: demonstrations, rankings or prompts.
        pairs: the rankings as pairs, for peers.
        output: a folder to write; the trained model is ``model`` in it.
        precision: ``fp32`` or ``bf16``.
        seed: of the order of the data, and of sampling.
        save: whether the peer saves its model.
    """

    work: Work
    model: str
    reward: str
    data: str
    pairs: str
    output: str
    precision: str = "fp32"
    seed: int = 0
    save: bool = False

    def write(self, path: Path) -> Path:
        """Into a file that a child process reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path


def read_job(path: str) -> Job:
    """The job in a file."""
    values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return Job(work=Work(**values.pop("work")), **values)
