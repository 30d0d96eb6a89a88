"""Stage 2, ``rlhf train-rm``: a reward model from rankings of K answers (Ouyang et al. 2022, §3.5).

    L = mean over prompts of  -(1/|P|) Σ_{(w,l)∈P} log σ(s_w - s_l)                       (Eq. 1)

All pairs P of a prompt's K answers are one batch element, and each answer is read once: a
micro-batch is a row of trees in which the K answers share their prompt. Afterwards the scores are
shifted so that demonstrations average 0.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stages import budget, inputs, roles
from stages.batch import Group, GroupBatch, pack_groups
from stages.config import RewardModelConfig
from stages.data import store
from stages.data.plan import optimiser_batch
from stages.functional import ranking
from stages.groups import read_all, scorer
from stages.models.configured import is_reward_model
from stages.models.load import load_reward, with_fresh_head
from stages.models.network import without_dropout
from stages.normaliser import Normaliser
from stages.pairs import judge
from stages.runtime import start
from stages.runtime.loop import require_finite, run_task
from stages.runtime.opening import begin, opened, require_parents
from stages.runtime.optim import Trainee, swapped, trainee
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import Result
from stages.runtime.session import Metrics, Session


def run(
    config: RewardModelConfig, reporter: Reporter, *, resume: bool = False, overwrite: bool = False
) -> Result:
    """Train a reward model on rankings and write the run folder.

    Args:
        config: the resolved config.
        reporter: hears about the progress.
        resume: continue from the newest checkpoint, or start where there is none.
        overwrite: replace what an earlier run left in the output folder.

    Returns:
        What the run came to.
    """
    with opened(config, reporter, resume=resume, overwrite=overwrite) as session:
        return session.done or _train(session, config)


def _train(session: Session, config: RewardModelConfig) -> Result:
    # 1. Text, data and model; a policy gets a fresh head, a reward model goes on with its own.
    text = start.text_of(config)
    models = roles.models(session, config, text)
    read = inputs.rankings(session, config, text)
    budget.require_disk(session, config, models, read)
    loading = start.loading_of(session)
    if is_reward_model(config.model, trust_remote_code=config.trust_remote_code):
        reward = load_reward(config.model, loading)
        # The loss does not see the shift; it is measured anew when training is over.
        reward.mean, reward.std = 0.0, 1.0
    else:
        reward = with_fresh_head(config.model, loading, seed=config.seed)
    without_dropout(reward)
    start.make_ready(session, reward, text)
    normaliser = Normaliser(session, config, text, read.records.train, read.second)
    normaliser.prepare()
    require_parents(session, [start.parent("model", config.model), *normaliser.parents()])
    begin(session)

    # 2. Steps on the rankings; the best model by held-out pair accuracy is kept.
    trained = trainee(reward, config.train)
    session.restore(model=trained)
    run_task(session, Ranked(session, config, text, trained, read.records, normaliser))
    show_calibration(session)
    return session.finish(f"rlhf ppo ppo.yaml reward.path={shlex.quote(config.output)}")


@dataclass
class Ranked:
    """Rankings as the task of the training loop."""

    session: Session
    config: RewardModelConfig
    text: start.Text
    trained: Trainee
    splits: store.Splits
    normaliser: Normaliser
    loss_name: str = "loss/ranking"

    @property
    def select_by(self) -> str:
        """The figure by which the best model is kept."""
        return "eval/accuracy"

    def records(self) -> int:
        """Number of rankings to learn from."""
        return len(self.splits.train)

    def records_per_step(self) -> int:
        """The rankings of an optimiser step."""
        return self.config.train.batch_size

    def draw(self, step: int) -> tuple[list[Group], np.ndarray, int]:
        """The rankings of an optimiser step, their lengths in tokens, and their number."""
        size = self.records_per_step()
        _, chosen = optimiser_batch(self.records(), size, self.config.seed, step)
        items = [self.splits.train[int(n)] for n in chosen]
        return items, np.array([item.tokens for item in items]), len(chosen)

    def denominator(self, items: Sequence[Group]) -> Tensor:
        """Prompts with a pair in the whole optimiser batch, or their pairs."""
        groups = pack_groups(items)
        return ranking.ranking_denominator(
            groups.ranks,
            groups.mask,
            ties=self.config.ranking.ties,
            pair_denominator=self.config.ranking.denominator,
            reduction=self.config.ranking.reduction,
        )

    def loss(self, items: Sequence[Group], denominator: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss, and its pair statistics."""
        groups = pack_groups(items)
        table = scorer(self.trained.network)(groups)
        ranks, mask = groups.ranks.to(table.device), groups.mask.to(table.device)
        options = self.config.ranking
        loss = ranking.ranking_loss(
            table,
            ranks,
            mask,
            margin=_margin(groups, table),
            ties=options.ties,
            pair_denominator=options.denominator,
            reduction=options.reduction,
            center_coef=options.center_coef,
            denominator=denominator,
        )
        pairs = ranking.pair_statistics(table.detach(), ranks, mask)
        return loss, {"pairs": pairs.pairs, "correct": pairs.correct, "margin": pairs.margin}

    def describe(self, sums: dict[str, float]) -> Metrics:
        """Accuracy and margin over the strict pairs of the step."""
        pairs = sums["pairs"] or float("nan")
        return {
            "reward_model/accuracy": sums["correct"] / pairs,
            "reward_model/margin": sums["margin"] / pairs,
        }

    def evaluate(self) -> Metrics:
        """Figures on the held-out rankings."""
        held_out = self.splits.eval
        if held_out is None:
            return {}
        self.trained.network.module.eval()
        tables = read_all(self.session, held_out, scorer(self.trained.network))
        total = float(sum(table.sum() for table in tables))
        require_finite(total, what=f"step {self.session.progress.step}, sum of the eval scores")
        judged = judge(held_out, tables)
        self.session.facts["calibration"] = judged.bins
        return judged.figures

    def publish(self, name: str, weights: dict[str, Tensor] | None = None) -> None:
        """Measure the offset of the scores, then write the reward model as a model folder."""
        network = self.trained.network
        with swapped(self.trained, weights):
            mean, std, measured_on = self.normaliser.measure(network)
        identity = start.identity_of(
            self.session, self.text, "reward", mean=mean, std=std, normalised_on=measured_on
        )
        base = self.config.model
        start.publish(self.session, self.text, network, name, identity, base=base, weights=weights)


def show_calibration(session: Session) -> None:
    """Whether σ(|difference|), the confidence in an order, is the share of right orders."""
    rows = [
        [f"{b['n']:.0f}", f"{b['confidence']:.3f}", f"{b['accuracy']:.3f}"]
        for b in session.facts.get("calibration", [])
    ]
    if rows:
        columns = ("pairs", "confidence", "accuracy")
        session.reporter.table("calibration on held-out pairs", columns, rows)


def _margin(groups: GroupBatch, like: Tensor) -> float | Tensor:
    return 0.0 if groups.margins is None else groups.margins.to(like.device, like.dtype)
