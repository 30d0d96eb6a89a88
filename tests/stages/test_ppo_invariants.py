"""What must hold of PPO whatever the model: the numbered invariants, on six families."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages import ppo
from stages.runtime.reporter import SilentReporter
from tests.families import FAMILIES, WITH_DROPOUT
from tests.stages.project import Listener, Project
from tests.stages.results import (
    assert_equal,
    checkpoints,
    classifier,
    logps,
    policy,
    raw_score,
    rows,
    samples,
    weights,
)
from tests.stages.watch import in_rollout_order, sums, watch_models, watch_steps

QUIET = SilentReporter()
MODELS = [(name, 0.0) for name in FAMILIES] + [(name, 0.1) for name in WITH_DROPOUT]
KLS = ("policy/approx_kl_k1", "policy/approx_kl_k2", "policy/approx_kl_k3")


@pytest.fixture(params=MODELS, ids=[f"{n}-dropout" if d else n for n, d in MODELS])
def family(request: pytest.FixtureRequest, project: Project) -> str:
    """A policy of one family, with dropout in its config where it has any."""
    name, dropout = request.param
    project.model("policy", name, dropout=dropout, dtype=torch.float64)
    project.model("judge", name, dropout=dropout, dtype=torch.float64, kind="reward", seed=1)
    return str(name)


def own_models(**changes: Any) -> dict[str, Any]:
    return {"model": "policy", "reward.path": "judge", **changes}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_invariant_1_the_first_minibatch_has_ratio_1_exactly_where_it_is_the_rollout(
    project: Project, family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_rollout_order(monkeypatch)
    seen = watch_steps(monkeypatch)
    changes = {"train.batch_size": 6, "train.total_episodes": 6, "train.precision": precision}
    ppo.run(project.config("ppo", **own_models(**changes)), QUIET)
    (step,) = seen
    assert step.figures is not None
    assert step.figures["policy/ratio"] == pytest.approx(1.0, abs=1e-6)
    for name in (*KLS, "policy/clip_fraction", "value/clip_fraction"):
        assert step.figures[name] == 0.0, name
    advantages, mask = step.targets["advantages"], step.rollout.mask
    expected = -float(sums(advantages, mask).sum() / mask.sum())
    assert step.figures["loss/policy"] == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.0, abs=1e-6), "whitened over the same minibatch"


@pytest.mark.parametrize("family", [(name, 0.0) for name in FAMILIES], indirect=True, ids=FAMILIES)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_invariant_1_another_split_of_the_first_minibatch_moves_logps_by_rounding_only(
    project: Project, family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    changes = {
        "train.batch_size": 3,
        "train.precision": precision,
        "train.tokens_per_micro_batch": 20,
        "ppo.whiten_advantages": False,
    }
    ppo.run(project.config("ppo", **own_models(**changes)), QUIET)
    figures = seen[0].figures
    assert figures is not None
    # k2 is half the mean square of the difference, k1 its negative mean.
    bound = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 0.02}[precision]
    assert (2 * figures["policy/approx_kl_k2"]) ** 0.5 <= bound
    assert abs(figures["policy/approx_kl_k1"]) <= min(bound, 1e-3)
    assert figures["policy/clip_fraction"] == 0.0
    assert figures["value/clip_fraction"] == 0.0
    advantages, mask = (
        t[seen[0].rows] for t in (seen[0].targets["advantages"], seen[0].rollout.mask)
    )
    expected = -float(sums(advantages, mask).sum() / mask.sum())
    assert figures["loss/policy"] == pytest.approx(expected, rel=0.02, abs=1e-6)


def test_invariant_2_the_first_iteration_has_no_kl_and_its_rewards_sum_to_the_score(
    project: Project, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    # With γ = λ = 1 the return of the first token is the sum of all rewards.
    changes = {"kl.coef": 0.5, "ppo.lam": 1.0}
    ppo.run(project.config("ppo", **own_models(**changes)), QUIET)
    rollout, targets = seen[0].rollout, seen[0].targets
    assert torch.equal(rollout.logp_old, rollout.logp_ref)
    torch.testing.assert_close(targets["returns"][:, 0], rollout.scores, rtol=1e-12, atol=1e-12)
    first = rows("runs/ppo", "train")[0]
    assert first["objective/kl"] == 0.0
    assert first["objective/reward"] == pytest.approx(first["objective/score"], rel=1e-12)


def test_invariant_3_the_kl_part_of_the_rewards_is_the_log_ratio_of_whole_answers(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    project.model("other", seed=5, dtype=torch.float64)
    changes = {"reference": "other", "kl.coef": 0.3, "ppo.lam": 1.0}
    ppo.run(project.config("ppo", **changes), QUIET)
    rollout, targets = seen[0].rollout, seen[0].targets
    ours, reference, judge = policy("base"), policy("other"), classifier("reward")
    kls = []
    for n, (prompt, answer) in enumerate(zip(rollout.prompts, rollout.answers, strict=True)):
        ids, start = [*prompt.tolist(), *answer.tolist()], len(prompt) - 1
        kl = float(logps(ours, ids)[start:].sum() - logps(reference, ids)[start:].sum())
        kls.append(kl)
        total = raw_score(judge, ids) - 0.3 * kl
        assert float(targets["returns"][n, 0]) == pytest.approx(total, rel=1e-9)
    first = rows("runs/ppo", "train")[0]
    assert first["objective/kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-9)
    assert samples("runs/ppo")[0]["kl"] == pytest.approx(kls[0], rel=1e-9)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_log_probabilities_are_taken_at_the_sampling_temperature(
    project: Project, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    ppo.run(project.config("ppo", **{"rollout.temperature": temperature}), QUIET)
    rollout, model = seen[0].rollout, policy("base")
    for n, (prompt, answer) in enumerate(zip(rollout.prompts, rollout.answers, strict=True)):
        ids = [*prompt.tolist(), *answer.tolist()]
        expected = logps(model, ids, temperature=temperature)[len(prompt) - 1 :]
        torch.testing.assert_close(
            rollout.logp_old[n, : len(answer)], expected, rtol=1e-9, atol=1e-12
        )
    assert torch.equal(rollout.logp_ref, rollout.logp_old)
    assert seen[0].figures is not None
    assert seen[0].figures["policy/approx_kl_k2"] < 1e-20


def test_invariant_10_terms_with_a_vanishing_weight_are_as_good_as_absent(
    project: Project,
) -> None:
    plain = project.config("ppo", output="runs/plain")
    other = project.config(
        "ppo",
        output="runs/other",
        **{"ptx.data": "documents.jsonl", "ptx.coef": 1e-300, "ppo.ent_coef": 1e-300},
    )
    ppo.run(plain, QUIET)
    ppo.run(other, QUIET)
    assert_equal(weights("runs/other/model"), weights("runs/plain/model"))
    extra = {"loss/ptx", "optim/grad_norm_ptx"}
    found = [{k: v for k, v in row.items() if k not in extra} for row in rows("runs/other")]
    assert_equal(found, rows("runs/plain"))
    assert not any(extra & row.keys() for row in rows("runs/plain"))


def test_invariant_10_a_clip_range_that_nothing_reaches_is_no_clipping(project: Project) -> None:
    for name, value in (("wide", 1e9), ("off", None)):
        changes = {"ppo.epochs": 3, "ppo.clip_range": 1e9, "ppo.value_clip_range": value}
        ppo.run(project.config("ppo", output=f"runs/{name}", **changes), QUIET)
    assert_equal(weights("runs/wide/critic"), weights("runs/off/critic"))
    assert all(row["value/clip_fraction"] == 0.0 for row in rows("runs/wide", "train"))
    assert all(row["policy/clip_fraction"] == 0.0 for row in rows("runs/wide", "train"))


@pytest.mark.parametrize("budget", [1, 15])
def test_invariant_5_the_token_budget_changes_neither_metrics_nor_weights(
    project: Project, budget: int
) -> None:
    ptx = {"ptx.data": "documents.jsonl", "ptx.coef": 0.5, "ptx.ratio": 2, "ppo.ent_coef": 0.01}
    for name, tokens in (("cut", budget), ("whole", 100_000)):
        changes = {"output": f"runs/{name}", "train.tokens_per_micro_batch": tokens, **ptx}
        ppo.run(project.config("ppo", **changes), QUIET)
    assert_equal(rows("runs/cut"), rows("runs/whole"), rtol=1e-9)
    for part in ("model", "critic"):
        assert_equal(weights(f"runs/cut/{part}"), weights(f"runs/whole/{part}"), rtol=1e-9)


def test_invariant_11_reference_and_reward_model_stay_bit_identical_without_gradient(
    project: Project, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_models(monkeypatch)
    ppo.run(project.config("ppo", **own_models()), QUIET)
    ((readers, before),) = seen
    for name in ("reference", "reward"):
        network = getattr(readers, name)
        assert_equal(dict(network.module.state_dict()), before[name])
        assert not network.module.training
        for parameter in network.module.parameters():
            assert parameter.grad is None
            assert not parameter.requires_grad
    for name in ("policy", "critic"):
        now = getattr(readers, name).module.state_dict()
        assert any(not torch.equal(now[key], value) for key, value in before[name].items())


@pytest.mark.parametrize(
    "family", [("llama", 0.0), *((name, 0.1) for name in WITH_DROPOUT)], indirect=True, ids=str
)
def test_with_learning_rate_0_every_ratio_is_1_and_no_weight_moves(
    project: Project, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    changes = {"train.learning_rate": 0.0, "ppo.epochs": 2}
    ppo.run(project.config("ppo", **own_models(**changes)), QUIET)
    assert len(seen) == 8
    for step in seen:
        assert step.figures is not None
        assert step.figures["policy/ratio"] == pytest.approx(1.0, abs=1e-10)
        assert step.figures["policy/approx_kl_k2"] < 1e-20
        assert step.figures["policy/clip_fraction"] == 0.0
    assert [row["objective/kl"] for row in rows("runs/ppo", "train")] == [0.0, 0.0]
    assert_equal(weights("runs/ppo/model"), weights("policy"))
    assert_equal(weights("runs/ppo/critic")["score.weight"], weights("judge")["score.weight"])


def test_invariant_13_decay_0_makes_the_average_the_weights_themselves(project: Project) -> None:
    ppo.run(project.config("ppo", train__ema_decay=0.0), QUIET)
    assert_equal(weights("runs/ppo/model_ema"), weights("runs/ppo/model"))


def test_the_average_moves_once_an_optimiser_step(project: Project) -> None:
    changes = {"train.ema_decay": 0.9, "train.max_steps": 1, "train.batch_size": 6}
    ppo.run(project.config("ppo", **changes), QUIET)
    first, now = weights("base"), weights(checkpoints("runs/ppo")[-1])
    expected = {name: 0.9 * first[name] + 0.1 * now[name] for name in now}
    assert_equal(weights("runs/ppo/model_ema"), expected, rtol=1e-12)


def test_evaluation_changes_no_weight_and_repeats_itself(project: Project) -> None:
    project.write("held_out.jsonl", [{"prompt": "fa:"}, {"prompt": "gab:"}])
    for name, held_out in (("seen", "held_out.jsonl"), ("unseen", None)):
        changes = {"data.eval": held_out, "evaluate.every": 1, "output": f"runs/{name}"}
        ppo.run(project.config("ppo", **changes), Listener())
    assert_equal(weights("runs/seen/model"), weights("runs/unseen/model"))
    assert rows("runs/seen", "train") == rows("runs/unseen", "train")
    still = {"data.eval": "held_out.jsonl", "evaluate.every": 1, "train.learning_rate": 0.0}
    ppo.run(project.config("ppo", output="runs/still", **still), Listener())
    figures = [row["eval/score"] for row in rows("runs/still", "eval")]
    assert len(figures) == 3
    assert len(set(figures)) == 1
