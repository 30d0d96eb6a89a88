"""Little of everything: default settings on a CPU, one record, answers of one token or none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from stages import online, ppo, reward_model, sft
from stages.advantage import estimate
from stages.config import PpoConfig, resolve
from stages.functional.returns import after_last_mask, shape_rewards
from stages.rollout import Rollout
from stages.runtime.reporter import SilentReporter
from tests.stages.project import (
    DEFAULTS,
    DEMONSTRATIONS,
    LETTERS,
    ONLINE,
    PROMPTS,
    TURN,
    TURN_END,
    Project,
    rankings,
)
from tests.stages.results import rows, run_json, samples

QUIET = SilentReporter()
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}
RUNS |= dict.fromkeys(ONLINE, online.run)
SAMPLING = ("ppo", *ONLINE)
GPU = torch.cuda.is_available() or torch.backends.mps.is_available()


@pytest.mark.skipif(GPU, reason="device: auto takes the accelerator of this machine")
@pytest.mark.parametrize("stage", RUNS)
def test_every_stage_runs_on_a_cpu_with_its_default_settings(project: Project, stage: str) -> None:
    values: dict[str, Any] = {"stage": stage, "model": "base", "output": f"runs/{stage}"}
    values["data"] = {"train": DEFAULTS[stage]["data.train"]}
    if stage in SAMPLING:
        values["reward"] = {"path": "reward"}
    result = RUNS[stage](resolve(values), QUIET)
    assert result.status == "done"
    assert result.step == {"sft": 2, "reward_model": 1}.get(stage, 8)
    assert run_json(f"runs/{stage}")["device"] == "cpu"


@pytest.mark.parametrize("stage", RUNS)
def test_one_record_is_enough_to_learn_from(project: Project, stage: str) -> None:
    project.write("demonstrations.jsonl", DEMONSTRATIONS[:1])
    project.write("rankings.jsonl", rankings()[:1])
    project.write("prompts.jsonl", PROMPTS[:1])
    passes = {"train.epochs": 2, "train.max_steps": None}
    changes = {"train.total_episodes": None} if stage in SAMPLING else passes
    result = RUNS[stage](project.config(stage, **changes), QUIET)
    assert result.step == 2, "an epoch of one step, twice; or a rollout of two minibatches"
    losses = [v for row in rows(f"runs/{stage}") for n, v in row.items() if n.startswith("loss/")]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)


# Short answers.


LENGTHS, ENDED, SCORES = [0, 1, 1, 3], [False, True, False, True], [9.0, 1.0, 2.0, 3.0]


def short_answers() -> Rollout:
    """No token, an end token alone, one token that was cut, three tokens; NaN beside them."""
    mask = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    nothing = torch.full((4, 4), math.nan, dtype=torch.float64)
    logp = torch.where(mask, -1.0, nothing)
    values = torch.where(after_last_mask(mask), 0.25, nothing)
    return Rollout(
        prompts=(np.array([5]),) * 4,
        answers=tuple(np.full(n, 1) for n in LENGTHS),
        ended=torch.tensor(ENDED),
        mask=mask,
        logp_old=logp,
        logp_ref=logp - 0.5,
        values_old=values,
        scores=torch.tensor(SCORES, dtype=torch.float64),
    )


def of_ppo(**sections: Any) -> PpoConfig:
    values = {"stage": "ppo", "model": "m", "data": {"train": "x"}, "output": "o"}
    config = resolve({**values, "reward": {"path": "r"}, **sections})
    assert isinstance(config, PpoConfig)
    return config


@pytest.mark.parametrize("position", ["last", "after_last"])
def test_the_score_lands_on_a_real_token_and_an_empty_answer_gets_none(position: Any) -> None:
    ppo_section = {"lam": 1.0, "whiten_advantages": False}
    config = of_ppo(ppo=ppo_section, score={"position": position})
    found = estimate(short_answers(), config, kl_coef=0.1)
    # γ = λ = 1: the return of the first token is the sum of all rewards, R − β·Σ kl.
    totals = found.targets["returns"][:, 0].tolist()
    assert totals == pytest.approx([0.0, 1.0 - 0.05, 2.0 - 0.05, 3.0 - 0.15])
    assert float(found.targets["returns"][0].abs().sum()) == 0.0
    assert float(found.targets["advantages"][0].abs().sum()) == 0.0
    assert found.kl == pytest.approx(0.5 * 5 / 4)
    short = short_answers()
    shaped = shape_rewards(
        short.logp_old, short.logp_ref, short.mask, short.scores, kl_coef=0.0, position=position
    )
    assert shaped.rewards.sum(dim=1).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("whiten", [False, True])
def test_empty_and_end_token_only_answers_give_finite_numbers_and_their_share(whiten: bool) -> None:
    config = of_ppo(ppo={"whiten_rewards": whiten, "whiten_advantages": whiten})
    found = estimate(short_answers(), config, kl_coef=0.1)
    assert bool(torch.isfinite(found.targets["advantages"]).all())
    assert bool(torch.isfinite(found.targets["returns"]).all())
    assert all(math.isfinite(value) for value in found.metrics.values())
    expected = {"empty": 0.5, "ended": 0.5, "cut": 0.5, "response_length_mean": 1.25}
    expected |= {"response_length_min": 0.0, "response_length_max": 3.0}
    assert {name: found.metrics[f"rollout/{name}"] for name in expected} == expected


def test_a_policy_that_stops_at_once_is_survived_and_told(project: Project) -> None:
    stops = [*LETTERS, TURN, TURN_END]  # all tokens but the padding token
    ppo.run(project.config("ppo", **{"rollout.stop": stops}), QUIET)
    first = rows("runs/ppo", "train")[0]
    alone = [s["ended"] and len(s["response_ids"]) == 1 for s in samples("runs/ppo")[:6]]
    assert first["rollout/empty"] == pytest.approx(np.mean(alone))
    assert first["rollout/empty"] > 0.5
    assert {"loss/policy", "loss/value", "objective/reward", "policy/entropy"} <= first.keys()
