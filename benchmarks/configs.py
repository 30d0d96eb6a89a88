"""This project's configs for the works, with the peers' settings where those are fixed."""

from __future__ import annotations

from typing import Any

from benchmarks.works import Job

MICRO_BATCH = 4096  # tokens
NEVER = 1 << 30


def values_of(job: Job) -> dict[str, Any]:
    """The config of a training job, as the keys of a YAML file."""
    work = job.work
    train: dict[str, Any] = {
        "batch_size": work.batch,
        "tokens_per_micro_batch": MICRO_BATCH,
        "learning_rate": work.learning_rate,
        "schedule": "constant",
        "adam_betas": [0.9, 0.999],  # those of the peers
        "precision": job.precision,
    }
    data: dict[str, Any] = {"train": job.data, "eval": None, "max_prompt_tokens": 4096}
    values = {
        "stage": work.stage,
        "model": job.model,
        "data": data,
        "output": job.output,
        "train": train,
        "seed": job.seed,
        "device": "cpu",
        "log": {"every": 1},
        "checkpoint": {"every": NEVER},
    }
    if work.stage == "ppo":
        train["total_episodes"] = work.batch * work.iterations
        train["max_grad_norm"] = float(NEVER)  # the peer's trainer of PPO clips no gradient
        return values | _ppo(job)
    train["epochs"] = work.epochs
    data["max_response_tokens"] = 4096
    return values | ({"normalise": {"on": "none"}} if work.stage == "reward_model" else {})


def _ppo(job: Job) -> dict[str, Any]:
    work = job.work
    return {
        "reward": {"path": job.reward},
        "rollout": {"batch_size": work.batch, "max_new_tokens": work.new_tokens},
        "ppo": {"epochs": work.epochs},
        "kl": {"coef": work.kl_coef},
        "log": {"every": 1, "samples": work.batch},
    }
