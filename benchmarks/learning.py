"""What both sides learn from the same records, in as many steps at the same learning rate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import inputs
from benchmarks.environments import ask, do
from benchmarks.rounds import Round
from benchmarks.works import Job, Work

HELD_OUT = 100
WORDS = 200  # few enough for each to be met often
SFT = Work(
    "learning SFT",
    "sft",
    records=512,
    batch=16,
    size="tiny",
    epochs=2,
    learning_rate=2e-3,
    prompt_words=6,
    answer_words=10,
    words=WORDS,
)
REWARD = Work(
    "learning reward model",
    "reward_model",
    records=400,
    batch=8,
    micro=12,
    size="tiny",
    k=4,
    learning_rate=1e-3,
    prompt_words=6,
    answer_words=10,
    words=WORDS,
)
PPO = Work(
    "learning PPO",
    "ppo",
    records=128,
    batch=32,
    micro=32,  # at the end of its prompts the peer takes a step at each micro-batch
    size="tiny",
    epochs=2,
    iterations=16,
    new_tokens=24,
    learning_rate=2e-4,
    prompt_words=6,
    answer_words=10,
    words=WORDS,
)
SIDES = {"peer": "peer", "rlhf": "ours"}
NAMES = {
    "loss": "SFT: held-out loss, nats per token",
    "accuracy": "reward model: held-out pair accuracy",
    "log_loss": "reward model: held-out log loss of a pair",
    "score": "PPO: score of the reward model",
    "kl": "PPO: KL from the reference, nats per answer",
    "length": "PPO: tokens of an answer",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where the part reads and writes.

    Attributes:
        models: the folder of the tiny models.
        folder: everything that is made here.
        say: hears what is done.
    """

    models: Path
    folder: Path
    say: Callable[[str], None]


def compare(place: Place, seeds: Sequence[int], rows: list[Row]) -> None:
    """Train on both sides and judge on held-out records.

    The policy and the reward model of PPO are those that this project trained here.

    Args:
        place: folders.
        seeds: of the PPO runs; none leaves PPO out.
        rows: the figures are added to it as soon as they are known.
    """
    start, reward = str(place.models / "model"), str(place.models / "reward")
    more, policies = _stage(place, SFT, start, reward)
    rows += more
    more, rewards = _stage(place, REWARD, reward, reward)
    rows += more
    if seeds:
        rows += _ppo(place, policies["rlhf"], rewards["rlhf"], seeds)


def _stage(place: Place, work: Work, model: str, reward: str) -> tuple[list[Row], dict[str, str]]:
    """A stage on both sides with one seed: its rows and the trained models."""
    job = _job(place, work, model, reward)
    held_out = _held_out(place, work)
    before = _judge(work.stage, model, held_out)
    trained = _train(place, job)
    after = {name: _judge(work.stage, folder, held_out) for name, folder in trained.items()}
    rows = [
        {"what": NAMES[key], "before": [before[key]], **{n: [after[n][key]] for n in SIDES}}
        for key in before
    ]
    return rows, trained


def _ppo(place: Place, policy: str, reward: str, seeds: Sequence[int]) -> list[Row]:
    """PPO on both sides with several seeds, against one reward model."""
    prompts = _held_out(place, PPO)
    job = _job(place, PPO, policy, reward)
    before = _judge("ppo", policy, prompts, reward, policy)
    after: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for seed in seeds:
        for name, trained in _train(place, replace(job, seed=seed)).items():
            after[name].append(_judge("ppo", trained, prompts, reward, policy))
    return [
        {
            "what": NAMES[key],
            "before": [before[key]],
            **{name: [figures[key] for figures in after[name]] for name in SIDES},
            "within": within(*([figures[key] for figures in after[n]] for n in SIDES)),
        }
        for key in before
    ]


def within(left: Sequence[float], right: Sequence[float]) -> bool:
    """Whether the ranges of two sides over their seeds overlap."""
    return min(left) <= max(right) and min(right) <= max(left)


def _job(place: Place, work: Work, model: str, reward: str) -> Job:
    data, pairs = inputs.write_data(place.folder, work)
    return Job(work, model, reward, str(data), str(pairs), "", save=True)


def _held_out(place: Place, work: Work) -> str:
    """Records that no side has trained on."""
    rows = inputs.records(work, HELD_OUT, seed=1)
    return str(inputs.write_lines(place.folder / f"{work.slug}-held-out.jsonl", rows))


def _train(place: Place, job: Job) -> dict[str, str]:
    """The folders of the models that both sides trained, in as many optimiser steps."""
    folders = {name: place.folder / f"{job.work.slug}-{name}-{job.seed}" for name in SIDES}
    readings = {}
    for name, folder in folders.items():
        place.say(f"{job.work.name}, seed {job.seed}: {name}")
        readings[name] = do(SIDES[name], replace(job, output=str(folder)))
    Round(readings["peer"], readings["rlhf"]).require_equal_work()
    return {name: str(folder / "model") for name, folder in folders.items()}


def _judge(*arguments: str) -> dict[str, Any]:
    return ask(sys.executable, "judge", *arguments)
