"""``rlhf dpo``, ``odpo``, ``kto``, ``orpo`` and ``simpo``: preferences without a reward model.

All of them take rankings of K answers. A prompt is one batch element: its K answers share it in a
tree and pass through the model once each, and the loss is taken over every strict pair of them, as
in the reward model's. The formulas stand in ``stages/functional/``, a file each.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stages import budget, inputs, methods, roles
from stages.batch import Group, margin_table, pack_groups
from stages.config import KtoConfig, PreferenceConfig
from stages.data import store
from stages.data.plan import optimiser_batch
from stages.data.store import Store
from stages.groups import read_all
from stages.methods import Answers
from stages.models import lora
from stages.models.load import load_policy
from stages.models.network import Network, without_dropout
from stages.pairs import judge
from stages.references import Remembered, answer_logps, reader, remembered
from stages.runtime import start
from stages.runtime.loop import run_task
from stages.runtime.opening import begin, opened, require_parents
from stages.runtime.optim import Trainee, trainee
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import Result
from stages.runtime.session import Metrics, Session

JUDGED = ("eval/accuracy", "eval/margin", "eval/length_accuracy")
"""Figures of rewards that any method's implicit rewards have too, beside the accuracy by K."""


class Item(NamedTuple):
    """A record, and what the remembered reference said of its answers."""

    group: Group
    reference: np.ndarray | None


def run(
    config: PreferenceConfig, reporter: Reporter, *, resume: bool = False, overwrite: bool = False
) -> Result:
    """Train a policy on preferences and write the run folder.

    Args:
        config: the resolved config of one of the methods.
        reporter: hears about the progress.
        resume: continue from the newest checkpoint, or start where there is none.
        overwrite: replace what an earlier run left in the output folder.

    Returns:
        What the run came to.
    """
    with opened(config, reporter, resume=resume, overwrite=overwrite) as session:
        return session.done or _train(session, config)


def _train(session: Session, config: PreferenceConfig) -> Result:
    # 1. Text, data, policy and, where the method has one, its reference.
    text = start.text_of(config)
    models = roles.models(session, config, text)
    read = inputs.preferences(session, config, text)
    budget.require_disk(session, config, models, read)
    loading = start.loading_of(session)
    policy = without_dropout(load_policy(config.model, loading))
    start.make_ready(session, policy, text)
    require_parents(session, [start.parent("model", config.model)])
    begin(session)
    reference, said = _reference(session, config, text, policy, read.records)

    # 2. Steps on the preferences; the best model by a held-out figure is kept.
    trained = trainee(policy, config.train)
    session.restore(model=trained)
    run_task(session, Preferred(session, config, text, trained, read.records, reference, said))
    policy_folder = shlex.quote(config.output)
    return session.finish(f"rlhf sample {policy_folder} prompts.jsonl --output answers.jsonl")


def _reference(
    session: Session,
    config: PreferenceConfig,
    text: start.Text,
    policy: Network,
    records: store.Splits,
) -> tuple[Network | None, Remembered | None]:
    """The reference as a network, or what it says; the policy is still the model it was."""
    if not methods.has_reference(config):
        return None, None
    off = None if config.lora is None else lora.without(policy, "policy")
    if not methods.reads_reference_live(config):
        policy.module.eval()
        return None, remembered(session, off or policy, records)
    if off is not None:
        return off, None
    reference = without_dropout(load_policy(config.model, start.loading_of(session)))
    start.adopt(reference, text)
    return reference.freeze(), None


@dataclass
class Preferred:
    """Preferences as the task of the training loop."""

    session: Session
    config: PreferenceConfig
    text: start.Text
    trained: Trainee
    splits: store.Splits
    reference: Network | None
    said: Remembered | None
    loss_name: str = "loss/preference"
    point: Tensor | None = None

    @property
    def select_by(self) -> str:
        """The figure by which the best model is kept."""
        return methods.selected_by(self.config)

    def records(self) -> int:
        """Number of records to learn from."""
        return len(self.splits.train)

    def records_per_step(self) -> int:
        """The records of an optimiser step."""
        return self.config.train.batch_size

    def draw(self, step: int) -> tuple[list[Item], np.ndarray, int]:
        """The records of an optimiser step, their lengths in tokens, and their number."""
        size = self.records_per_step()
        _, chosen = optimiser_batch(self.records(), size, self.config.seed, step)
        said = None if self.said is None else self.said.train
        items = [Item(self.splits.train[int(n)], said[int(n)] if said else None) for n in chosen]
        return items, np.array([item.group.tokens for item in items]), len(chosen)

    def denominator(self, items: Sequence[Item]) -> Tensor:
        """Prompts with a pair, or pairs, or answers; for kto the batch's z_0 is measured too."""
        if isinstance(self.config, KtoConfig):
            self.point = self._point([item.group for item in items])
        groups = pack_groups([item.group for item in items])
        return methods.denominator(self.config, groups.ranks, groups.mask)

    def loss(self, items: Sequence[Item], denominator: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss, and sums for the figures."""
        groups = pack_groups([item.group for item in items])
        logps, lengths = answer_logps(self.trained.network, groups)
        mask, ranks = groups.mask.to(logps.device), groups.ranks.to(logps.device)
        said = None
        if self.reference is not None:
            with torch.no_grad():
                said, _ = answer_logps(self.reference, groups)
        elif self.said is not None:
            said = _table([item.reference for item in items], mask).to(logps)
        gaps = None if groups.margins is None else groups.margins.to(logps)
        ratios = None if said is None else logps - said
        point = None if self.point is None else self.point.to(logps)
        answers = Answers(logps, lengths, ranks, mask, ratios, gaps, point)
        loss = methods.loss(self.config, answers, denominator)
        return loss, methods.statistics(self.config, answers)

    def describe(self, sums: dict[str, float]) -> Metrics:
        """Accuracy, margin, and what chosen and rejected answers are worth."""
        return methods.figures(sums, self.point)

    def evaluate(self) -> Metrics:
        """Figures on the held-out records."""
        held_out = self.splits.eval
        if held_out is None:
            return {}
        self.trained.network.module.eval()
        answers = self._held_out(held_out)
        whole = methods.denominator(self.config, answers.ranks, answers.mask)
        figures = {"eval/loss": float(methods.loss(self.config, answers, whole.double()))}
        if answers.point is not None:
            sums = methods.statistics(self.config, answers)
            told = methods.figures({k: float(v) for k, v in sums.items()}, answers.point)
            figures |= {f"eval/{k}": told[f"preference/{k}"] for k in ("accuracy", "margin", "kl")}
            return figures
        rewards = methods.rewards(self.config, answers).numpy()
        judged = judge(held_out, rewards).figures
        kept = {k: v for k, v in judged.items() if k in JUDGED or k.startswith("eval/accuracy")}
        return figures | kept

    def _held_out(self, held_out: Store) -> Answers:
        """All held-out answers in float64 on the CPU, every process with its share read."""
        items = [held_out[n] for n in range(len(held_out))]
        policy = self._read(self.trained.network, items)
        said = self.said.eval if self.said is not None else None
        if self.reference is not None:
            said = self._read(self.reference, items)
        sizes = [len(item.answers) for item in items]
        mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        logps = _table(policy, mask)
        ranks = _table([np.array(item.ranks) for item in items], mask).long()
        lengths = _table([np.array([len(y) for y in item.answers]) for item in items], mask)
        return Answers(
            logps=logps,
            lengths=lengths,
            ranks=ranks,
            mask=mask,
            ratios=None if said is None else logps - _table(said, mask),
            gaps=margin_table(items, mask.shape[1]),
            point=self._point(items) if isinstance(self.config, KtoConfig) else None,
        )

    def _read(self, network: Network, items: Sequence[Group]) -> list[np.ndarray]:
        return read_all(self.session, items, reader(network))

    def _point(self, groups: Sequence[Group]) -> Tensor:
        """z_0 of a batch: the answers to each prompt behind the prompt before it."""
        assert self.reference is not None
        pairs = _mismatched(groups, start.positions_of(self.config))
        rows = zip(
            self._read(self.trained.network, pairs), self._read(self.reference, pairs), strict=True
        )
        ratios = [float(x) for policy, said in rows for x in policy - said]
        return methods.point_of(ratios)

    def publish(self, name: str, weights: dict[str, Tensor] | None = None) -> None:
        """Write the policy as a model folder."""
        network, base = self.trained.network, self.config.model
        identity = start.identity_of(self.session, self.text, "policy")
        start.publish(self.session, self.text, network, name, identity, base=base, weights=weights)


def _mismatched(groups: Sequence[Group], positions: int | None) -> list[Group]:
    """Each prompt with the answers to the next one; of a single prompt there are none.

    A prompt that leaves too few positions loses its oldest tokens.
    """
    if len(groups) < 2:
        return []
    found = []
    for asked, answered in zip(groups, [*groups[1:], groups[0]], strict=True):
        room = len(asked.prompt)
        if positions is not None:
            room = min(room, positions - max(map(len, answered.answers)))
        prompt = asked.prompt[len(asked.prompt) - room :]
        found.append(Group(prompt, answered.answers, answered.ranks))
    return found


def _table(rows: Sequence[np.ndarray | None], mask: Tensor) -> Tensor:
    """Values of each record's answers as ``[P, K]`` in float64, 0 where there is no answer."""
    table = torch.zeros(mask.shape, dtype=torch.float64)
    for n, row in enumerate(rows):
        assert row is not None
        table[n, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.float64))
    return table
