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

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return "".join(c if c.isalnum() else "-" for c in self.name.lower())


SFT = Work("SFT, mixed lengths", "sft", records=64, batch=32)
REWARD_4 = Work("reward model, K = 4", "reward_model", records=12, batch=6, micro=12, k=4)
REWARD_9 = Work("reward model, K = 9", "reward_model", records=4, batch=2, micro=12, k=9)
PPO = Work("PPO, 1 epoch", "ppo", records=64, batch=64, learning_rate=1e-6)
PPO_4 = replace(PPO, name="PPO, 4 epochs", epochs=4)
PPO_MIXED = replace(PPO, name="PPO, mixed answer lengths", ending=True)
SAMPLE = Work("sampling, 64 prompts", "sample", records=64, batch=64, ending=True)
SAMPLE_K = replace(SAMPLE, name="sampling, 16 prompts × 4", records=16, batch=16, k=4)
SAMPLE_256 = replace(SAMPLE, name="sampling, 256 prompts", records=256, batch=256)

FULL = (SFT, REWARD_4, REWARD_9, PPO, PPO_4, PPO_MIXED, SAMPLE, SAMPLE_K, SAMPLE_256)
QUICK = tuple(replace(work, size="tiny") for work in (SFT, REWARD_4, PPO, SAMPLE))


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
