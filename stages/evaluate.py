"""``rlhf evaluate``: how good a reward model is on rankings, or a policy on prompts.

A reward model is held against the rankings of people. A policy answers prompts, alone or beside
another one that is asked the same and draws with the same noise; a reward model scores the answers.
Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.answer_figures import Sampled
from stages.answers import CHUNK, Drawing, prompts_of
from stages.comparison import Comparison, Names
from stages.config.shared import PromptData
from stages.data import store
from stages.data.kinds import Judged
from stages.data.store import LoadSpec, Splits, Store
from stages.errors import CheckpointError, ConfigError, Interrupted
from stages.groups import read, scorer
from stages.models.configured import max_positions, reads_whole, reward_config
from stages.models.load import Loading, load_reward
from stages.models.precision import choose
from stages.models.source import identity_of
from stages.pairs import Accuracies, Regret, Verdicts
from stages.runtime import start
from stages.runtime.processes import World
from stages.runtime.reporter import Reporter
from stages.runtime.signals import StopRequest
from stages.scored import BUDGET, require_finite


@dataclass(frozen=True)
class RewardOptions:
    """Which reward model to hold against which rankings.

    Attributes:
        reward: run folder, model folder or hub id.
        rankings: a file of ranked answers in any format, or ``-`` for standard input.
        limit: only the first N records.
        device: ``auto | cpu | cuda | mps``.
        precision: ``auto | bf16 | fp32 | fp64``.
    """

    reward: str
    rankings: str
    limit: int | None = None
    device: str = "auto"
    precision: str = "auto"


@dataclass(frozen=True)
class PolicyOptions:
    """Which policies to ask, and who scores them.

    Attributes:
        names: the policy, another one, and the reward model.
        prompts: a file of prompts in any format, or ``-`` for standard input.
        best_of: the n of the best-of-n curve; empty: 1, 2, 4, … up to ``drawing.k``.
        drawing: how answers are drawn.
        limit: only the first N prompts.
        device, precision: as above.
    """

    names: Names
    prompts: str
    best_of: tuple[int, ...] = ()
    drawing: Drawing = field(default_factory=Drawing)
    limit: int | None = None
    device: str = "auto"
    precision: str = "auto"

    def sizes(self) -> tuple[int, ...]:
        """The n of the best-of-n curve.

        Raises:
            ConfigError: there is no score to choose by, or there are fewer than n answers.
        """
        k = self.drawing.k
        if not self.best_of:
            return tuple(1 << n for n in range(k.bit_length()))
        most, where = max(self.best_of), "command line: --best-of"
        if not self.names.reward:
            raise ConfigError(
                "the best of n answers is chosen by score, and nothing scores them",
                where=where,
                do="name a reward model with --reward",
            )
        if most > k:
            raise ConfigError(
                f"the best of {most} cannot be told from {k} answers per prompt",
                where=where,
                do=f"add --k {most}",
            )
        return self.best_of


def of_reward(options: RewardOptions, reporter: Reporter) -> dict[str, Any]:
    """Hold a reward model against rankings.

    Args:
        options: which.
        reporter: hears about the progress.

    Returns:
        The figures of docs/commands.md by their names.

    Raises:
        CheckpointError: there is no such reward model.
        DataError: the file holds no rankings, or none with a strict pair.
        TrainingError: a score is not finite.
    """
    positions = max_positions(reward_config(options.reward, False))
    _require_last_token(options.reward)
    _remark_critic(options.reward, reporter)
    loading = Loading(choose(options.device, options.precision))
    rankings = _told(_rankings(options, positions), reporter)
    table = scorer(load_reward(options.reward, loading).freeze())
    verdict = Verdict()

    def judge(places: range) -> None:
        items = [rankings[n] for n in places]
        tables = read([item.group for item in items], table, budget=BUDGET, world=World())
        require_finite(np.concatenate(tables), options.reward)
        verdict.add(items, tables)

    _in_chunks(rankings, "rankings", reporter, judge)
    return verdict.figures()


def of_policy(options: PolicyOptions, reporter: Reporter) -> dict[str, Any]:
    """Sample a policy's answers to prompts, and compare them with another one's.

    Args:
        options: which.
        reporter: hears about the progress.

    Returns:
        The figures of docs/commands.md by their names; None for what was not asked for.

    Raises:
        CheckpointError: a model cannot be used, or they do not read the same tokens.
        ConfigError: as for ``PolicyOptions.sizes``.
        DataError: the file holds no prompts, or none that leaves room for an answer.
        TrainingError: a score is not finite.
    """
    sizes, drawing, names = options.sizes(), options.drawing, options.names
    names.require()
    codec = names.codec()
    of_ids = names.of_ids(codec)
    _remark_policy(options, of_ids, reporter)
    loading = Loading(choose(options.device, options.precision))
    found = prompts_of(
        options.prompts,
        codec,
        positions=names.positions(codec),
        max_new_tokens=drawing.max_new_tokens,
        limit=options.limit,
        max_dropped=1.0,
        fields=len(names.judges) < len(names.reward),
    )
    prompts = _told(found, reporter)
    sides = Sampled(drawing.k), Sampled(drawing.k)
    comparison = Comparison(names.load(codec, loading, prompts), codec, drawing, *sides)

    def answer(places: range) -> None:
        comparison.add([prompts[n] for n in places], places)

    _in_chunks(prompts, "prompts", reporter, answer)
    return comparison.figures(sizes) | {"prompts": len(prompts)}


@dataclass
class Verdict:
    """What rankings say of a reward model, counted while they pass by."""

    pairs: Verdicts = field(default_factory=Verdicts)
    sources: Accuracies = field(default_factory=Accuracies)
    labelers: Accuracies = field(default_factory=Accuracies)
    regret: Regret = field(default_factory=Regret)

    def add(self, items: list[Judged], tables: list[np.ndarray]) -> None:
        """Count rankings with the K scores of each."""
        for item, table in zip(items, tables, strict=True):
            gaps = self.pairs.add(item.group, table)
            self.sources.add(item.source, gaps)
            self.labelers.add(item.labeler, gaps)
        self.regret.add([item.group for item in items], tables, [item.scores for item in items])

    def figures(self) -> dict[str, Any]:
        """All figures by their names."""
        told, bins = self.pairs.judgement()
        return {
            "accuracy": told["eval/accuracy"],
            "accuracy_by_k": {str(k): v for k, v in sorted(self.pairs.by_k.shares().items())},
            "by_source": self.sources.shares(),
            "by_labeler": self.labelers.shares(),
            "margin": told["eval/margin"],
            "log_loss": told["eval/loss"],
            "ece": told["eval/ece"],
            "bins": bins,
            "best_of_n_regret": self.regret.mean(),
            "regret_unit": "score" if self.regret.scored else "rank",
            "length_accuracy": told["eval/length_accuracy"],
            "rankings": self.regret.rankings,
            "pairs": len(self.pairs.gaps),
        }


def _rankings(options: RewardOptions, positions: int | None) -> Splits:
    data = PromptData(
        train=options.rankings,
        eval=None,
        limit=options.limit,
        max_prompt_tokens=1 << 30,  # the positions alone limit a text
        max_dropped=1.0,
    )
    spec = LoadSpec(kind="judged", data=data, max_positions=positions)
    return store.load(spec, start.own_codec(options.reward))


def _told(found: Splits, reporter: Reporter) -> Store:
    """The records; where some are left out, that is said."""
    (report,) = found.report.roles
    if report.kept < report.records:
        reporter.warn(report.line().removeprefix(f"{report.role}: "))
    return found.train


def _in_chunks(
    records: Store, unit: str, reporter: Reporter, work: Callable[[range], None]
) -> None:
    """Work through the records, a bounded number of them at a time.

    Raises:
        Interrupted: a signal came between two chunks.
    """
    total = len(records)
    reporter.begin("evaluate", total=total, unit=unit)
    with StopRequest() as stop:
        for first in range(0, total, CHUNK):
            places = range(first, min(first + CHUNK, total))
            work(places)
            reporter.advance(places.stop)
            if stop.signum and places.stop < total:
                raise Interrupted(
                    stop.signum,
                    what=f"interrupted after {places.stop} of {total} {unit}",
                    do="run the same command again; nothing was written",
                )
    reporter.end()


def _require_last_token(name: str) -> None:
    """Rankings are stored as ids that end where the score is read.

    Raises:
        CheckpointError: the model reads its score elsewhere, as encoders do.
    """
    if reads_whole(name):
        raise CheckpointError(
            "does not read its score at the last token, so rankings cannot be packed for it",
            where=name,
            do="score the file with rlhf score, or name a decoder model",
        )


def _remark_critic(name: str, reporter: Reporter) -> None:
    """What works and may not be meant."""
    identity = identity_of(name)
    if identity is not None and identity.kind == "critic":
        reporter.warn(
            f"{name} is a critic: it has learned to foretell returns, not to judge answers"
        )


def _remark_policy(options: PolicyOptions, of_ids: list[str], reporter: Reporter) -> None:
    if options.names.against is not None and options.drawing.top_p < 1:
        reporter.warn(
            "--top-p cuts the distribution that answers are sampled from; the KL is that of the "
            "whole softmax, of which they are no fair sample"
        )
    for placed in options.names.reward:
        if placed.term.normalise:
            reporter.note(f"{placed.key}.normalise is left out: there is no run to normalise over")
    for name, path in options.names.judges.items():
        _remark_critic(path, reporter)
        if name not in of_ids:
            reporter.note(f"{path} reads the text, in its own template and tokens")
