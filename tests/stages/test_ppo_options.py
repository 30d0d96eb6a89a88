"""Each option of stage 3 against a computation by hand from what the run wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stages import ppo
from stages.errors import ConfigError
from stages.runtime.reporter import SilentReporter
from tests.stages.project import DOCUMENTS, END_ID, Project, ids_of
from tests.stages.results import logps, policy, rows, samples
from tests.stages.watch import Step, sums, watch_steps

QUIET = SilentReporter()


def one_step(project: Project, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Step:
    """The only minibatch of a run of one rollout."""
    seen = watch_steps(monkeypatch)
    values = {"train.batch_size": 6, "train.total_episodes": 6, "rollout.max_new_tokens": 8}
    ppo.run(project.config("ppo", **values | changes), QUIET)
    return seen[0]


RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "subtract": {"score.missing_eos.subtract": 1.5},
    "replace": {"score.missing_eos.replace": -3.0},
    "clip": {"score.clip": 0.25},
    "clip_and_subtract": {"score.clip": 0.25, "score.missing_eos.subtract": 1.5},
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_for_scores_are_applied_once_and_in_their_order(
    project: Project, rule: str
) -> None:
    # Two letters end an answer, so that some end and some are cut.
    changes = {"kl.coef": 0.0, "rollout.stop": ["a", "b"], "rollout.max_new_tokens": 8}
    ppo.run(project.config("ppo", **changes, **RULES[rule]), QUIET)
    found = samples("runs/ppo")[:6]
    assert {sample["ended"] for sample in found} == {True, False}
    expected = []
    for sample in found:
        score = float(np.clip(sample["score"], -0.25, 0.25)) if "clip" in rule else sample["score"]
        if not sample["ended"] and "subtract" in rule:
            score -= 1.5
        expected.append(-3.0 if not sample["ended"] and rule == "replace" else score)
    first = rows("runs/ppo", "train")[0]
    assert first["objective/reward"] == pytest.approx(np.mean(expected), rel=1e-9)
    raw = np.mean([sample["score"] for sample in found])
    assert first["objective/score"] == pytest.approx(raw, rel=1e-9)


def test_stop_tokens_end_an_answer_and_belong_to_it(project: Project) -> None:
    changes = {"rollout.stop": ["a", "e", " "], "rollout.max_new_tokens": 12}
    ppo.run(project.config("ppo", **changes), QUIET)
    stops = {END_ID, *ids_of("ae ")}
    for sample in samples("runs/ppo"):
        ids = sample["response_ids"]
        assert not stops & set(ids[:-1])
        assert sample["ended"] == (ids[-1] in stops)
        assert sample["ended"] or len(ids) == 12
    first = rows("runs/ppo", "train")[0]
    mine = samples("runs/ppo")[:6]
    assert first["rollout/ended"] == np.mean([sample["ended"] for sample in mine])
    assert first["rollout/cut"] == pytest.approx(1 - first["rollout/ended"])
    lengths = [len(sample["response_ids"]) for sample in mine]
    assert first["rollout/response_length_mean"] == pytest.approx(np.mean(lengths))
    assert first["rollout/response_length_min"] == min(lengths)
    assert first["rollout/response_length_max"] == max(lengths)


def test_a_stop_text_of_several_tokens_is_refused(project: Project) -> None:
    with pytest.raises(ConfigError, match="2 tokens"):
        ppo.run(project.config("ppo", **{"rollout.stop": ["ab"]}), QUIET)


@pytest.mark.parametrize("lam", [1.0, 0.0])
def test_advantages_are_rewards_to_go_minus_values_or_one_step_errors(
    project: Project, monkeypatch: pytest.MonkeyPatch, lam: float
) -> None:
    changes = {"kl.coef": 0.0, "ppo.lam": lam, "ppo.whiten_advantages": False}
    step = one_step(project, monkeypatch, **changes)
    rollout = step.rollout
    for n, answer in enumerate(rollout.answers):
        values = [*rollout.values_old[n, : len(answer)].tolist(), 0.0]
        rewards = [0.0] * (len(answer) - 1) + [float(rollout.scores[n])]
        for t in range(len(answer)):
            advantage = (
                sum(rewards[t:]) - values[t] if lam else rewards[t] + values[t + 1] - values[t]
            )
            assert float(step.targets["advantages"][n, t]) == pytest.approx(advantage, rel=1e-9)
            assert float(step.targets["returns"][n, t]) == pytest.approx(
                advantage + values[t], rel=1e-9, abs=1e-12
            )


def test_after_last_puts_the_score_one_slot_later_where_there_is_room(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"score.position": "after_last", "rollout.stop": ["a", "b"], "kl.coef": 0.0}
    step = one_step(project, monkeypatch, **changes, **{"ppo.lam": 0.0, "ppo.gamma": 0.5})
    rollout, targets = step.rollout, step.targets
    kinds = set()
    for n, answer in enumerate(rollout.answers):
        length, room = len(answer), len(answer) < 8
        kinds.add(room)
        assert int(targets["value_mask"][n].sum()) == length + room
        last = length if room else length - 1
        # λ = 0: the return is r + γ·V of the next slot.
        assert float(targets["returns"][n, last]) == pytest.approx(
            float(rollout.scores[n]), rel=1e-9
        )
        if room:
            value = float(rollout.values_old[n, length])
            assert value != 0.0
            assert float(targets["returns"][n, length - 1]) == pytest.approx(0.5 * value, rel=1e-9)
    assert kinds == {True, False}
    squares = 0.5 * (rollout.values_old - targets["returns"]) ** 2
    slots = targets["value_mask"]
    assert step.figures is not None
    expected = float(sums(squares, slots).sum() / slots.sum())
    assert step.figures["loss/value"] == pytest.approx(expected, rel=1e-9)


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_rollout(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = one_step(project, monkeypatch, **{"train.batch_size": 2})
    real = step.targets["advantages"][step.rollout.mask].numpy()
    assert np.mean(real) == pytest.approx(0.0, abs=1e-9)
    assert np.std(real) == pytest.approx(1.0, rel=1e-6)


def test_whitened_rewards_keep_their_mean_and_have_variance_1(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"ppo.whiten_rewards": True, "kl.coef": 0.0, "ppo.lam": 1.0}
    step = one_step(project, monkeypatch, **changes)
    rollout, mask = step.rollout, step.rollout.mask
    rewards = torch.zeros_like(rollout.logp_old)
    for n, answer in enumerate(rollout.answers):
        rewards[n, len(answer) - 1] = rollout.scores[n]
    real = rewards[mask]
    mean, spread = real.mean(), (real.var(unbiased=False) + 1e-8).sqrt()
    whitened = (rewards - mean) / spread + mean
    torch.testing.assert_close(
        step.targets["returns"][:, 0], sums(whitened, mask), rtol=1e-9, atol=1e-12
    )


def test_explained_variance_is_that_of_the_values_at_sampling_time(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = one_step(project, monkeypatch)
    mask = step.rollout.mask
    returns, values = step.targets["returns"][mask].numpy(), step.rollout.values_old[mask].numpy()
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert rows("runs/ppo", "train")[0]["value/explained_variance"] == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "fixed_length"])
def test_the_first_losses_are_averages_of_the_configured_kind(
    project: Project, monkeypatch: pytest.MonkeyPatch, aggregation: str
) -> None:
    changes = {"ppo.aggregation": aggregation, "rollout.stop": ["a", "b"]}
    step = one_step(project, monkeypatch, **changes, **{"ppo.whiten_advantages": False})
    mask = step.rollout.mask
    lengths = mask.sum(1)

    def averaged(values: torch.Tensor) -> float:
        if aggregation == "token_mean":
            return float(sums(values, mask).sum() / lengths.sum())
        if aggregation == "seq_mean":
            return float((sums(values, mask) / lengths).mean())
        return float(sums(values, mask).sum() / (8 * len(lengths)))

    assert step.figures is not None
    assert len(set(lengths.tolist())) > 1
    # At ratio 1 and before the critic moved, nothing is clipped.
    assert step.figures["loss/policy"] == pytest.approx(
        averaged(-step.targets["advantages"]), rel=1e-9
    )
    squares = 0.5 * (step.rollout.values_old - step.targets["returns"]) ** 2
    assert step.figures["loss/value"] == pytest.approx(averaged(squares), rel=1e-9)


def test_entropy_is_that_of_the_whole_softmax_and_its_bonus_raises_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = one_step(project, monkeypatch)
    model, found = policy("base"), []
    for prompt, answer in zip(step.rollout.prompts, step.rollout.answers, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
        with torch.no_grad():
            log_softmax = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found += (-(log_softmax.exp() * log_softmax).sum(-1)).tolist()
    assert step.figures is not None
    assert step.figures["policy/entropy"] == pytest.approx(np.mean(found), rel=1e-9)
    last = {}
    for coef in (0.0, 5.0):
        changes = {"ppo.ent_coef": coef, "train.total_episodes": 60, "output": f"runs/{coef}"}
        last[coef] = ppo.run(project.config("ppo", **changes), QUIET).metrics["policy/entropy"]
    assert last[5.0] > last[0.0] + 0.1


def test_the_pretraining_loss_is_that_of_ratio_documents_an_episode(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"ptx.data": "documents.jsonl", "ptx.coef": 2.0, "ptx.ratio": 3}
    step = one_step(project, monkeypatch, **changes)
    assert len(step.documents) == 18
    texts = {tuple(ids_of(record["text"], end=True)) for record in DOCUMENTS}
    assert {tuple(ids) for ids in step.documents} == texts
    model = policy("base")
    expected = -torch.cat([logps(model, ids) for ids in step.documents]).mean()
    assert step.figures is not None
    assert step.figures["loss/ptx"] == pytest.approx(float(expected), rel=1e-9)


def test_the_pretraining_gradient_is_weighted_and_added_to_that_of_the_policy(
    project: Project,
) -> None:
    base = {"ptx.data": "documents.jsonl", "train.max_steps": 1, "train.batch_size": 6}
    norms = {}
    for coef in (1.0, 4.0):
        config = project.config("ppo", output=f"runs/{coef}", **base, **{"ptx.coef": coef})
        row = ppo.run(config, QUIET).metrics
        norms[coef] = (row["optim/grad_norm_policy"], row["optim/grad_norm_ptx"])
    assert norms[4.0][0] == pytest.approx(norms[1.0][0], rel=1e-9)
    assert norms[4.0][1] == pytest.approx(4 * norms[1.0][1], rel=1e-9)
