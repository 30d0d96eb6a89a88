"""Stage 1, ``rlhf sft``: imitate demonstrations (Ouyang et al. 2022, §3.5 and App. C.1).

    L = -(1/N) Σ_t log π(y_t | x, y_<t)        over the N answer tokens of the optimiser batch

The answer and its end token are targets; the prompt carries no loss. For the models that PPO starts
from, a share of pretraining documents is mixed into each batch (App. C.3); all their tokens are
targets.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stages import budget, inputs, roles
from stages.batch import Example, pack
from stages.config import SftConfig
from stages.data import store
from stages.data.plan import documents_per_step, micro_batches, optimiser_batch, share, stream
from stages.data.store import Store
from stages.functional.masking import loss_denominator
from stages.functional.supervised import sft_loss
from stages.models.forward import response_logps
from stages.models.load import load_policy
from stages.runtime import start
from stages.runtime.loop import run_task
from stages.runtime.opening import begin, opened, require_parents
from stages.runtime.optim import Trainee, trainee
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import Result
from stages.runtime.session import Metrics, Session

CHUNK = 256  # held-out examples planned together


def run(
    config: SftConfig, reporter: Reporter, *, resume: bool = False, overwrite: bool = False
) -> Result:
    """Fine-tune a language model on demonstrations and write the run folder.

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


def _train(session: Session, config: SftConfig) -> Result:
    # 1. Text, data and model; everything that can be refused is refused here.
    text = start.text_of(config)
    models = roles.models(session, config, text)
    read = inputs.demonstrations(session, config, text)
    budget.require_disk(session, config, models, read)
    policy = load_policy(config.model, start.loading_of(session))
    start.make_ready(session, policy, text)
    require_parents(session, [start.parent("model", config.model)])
    begin(session)

    # 2. Steps on the demonstrations; the best model by held-out loss is kept.
    trained = trainee(policy, config.train)
    session.restore(model=trained)
    run_task(session, Supervised(session, config, text, trained, read.records, read.second))
    return session.finish(f"rlhf train-rm reward_model.yaml model={shlex.quote(config.output)}")


@dataclass
class Supervised:
    """Demonstrations, and documents among them, as the task of the training loop."""

    session: Session
    config: SftConfig
    text: start.Text
    trained: Trainee
    splits: store.Splits
    documents: Store | None
    loss_name: str = "loss/sft"
    select_by: str = "eval/loss"

    def records(self) -> int:
        """Number of demonstrations to learn from."""
        return len(self.splits.train)

    def records_per_step(self) -> int:
        """The demonstrations of an optimiser step, which leave room for its documents."""
        return self.config.train.batch_size - self._documents_per_step()

    def draw(self, step: int) -> tuple[list[Example], np.ndarray, int]:
        """The examples of an optimiser step, their lengths, and how many demonstrations."""
        mixed, size = self._documents_per_step(), self.records_per_step()
        _, chosen = optimiser_batch(self.records(), size, self.config.seed, step)
        items = [self.splits.train[int(n)] for n in chosen]
        if self.documents is not None:
            places = stream(
                len(self.documents), self.config.seed, step * mixed, mixed, name="ptx order"
            )
            items += [self.documents[int(n)] for n in places]
        return items, np.array([len(item.ids) for item in items]), len(chosen)

    def _documents_per_step(self) -> int:
        if self.documents is None:
            return 0
        return documents_per_step(self.config.train.batch_size, self.config.sft.pretrain.share)

    def denominator(self, items: Sequence[Example]) -> Tensor:
        """N: the targets of the whole optimiser batch, or its sequences."""
        return loss_denominator(_targets(items), aggregation=self.config.sft.aggregation)

    def loss(
        self, items: Sequence[Example], denominator: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's share of the loss."""
        batch = pack(items).to(self.session.arithmetic.device)
        logp = response_logps(self.trained.network, batch).logp
        aggregation = self.config.sft.aggregation
        loss = sft_loss(logp, batch.mask, aggregation=aggregation, denominator=denominator)
        return loss, {}

    def describe(self, sums: dict[str, float]) -> Metrics:
        """Nothing besides the loss."""
        return {}

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Token mean of the held-out loss in nats, and its exponential."""
        held_out = self.splits.eval
        if held_out is None:
            return {}
        network = self.trained.network
        network.module.eval()
        nll, targets = [], 0
        for first in range(0, len(held_out), CHUNK):
            items = [held_out[n] for n in range(first, min(first + CHUNK, len(held_out)))]
            targets += sum(len(item.targets) for item in items)
            nll += self._losses(items)
        loss = sum(self.session.world.gather(nll)) / targets
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def _losses(self, items: Sequence[Example]) -> list[float]:
        """Summed losses of this process's micro-batches."""
        lengths = np.array([len(item.ids) for item in items])
        world, one = self.session.world, torch.ones(())
        mine = share(lengths, world.rank, world.size)
        budget = self.config.train.tokens_per_micro_batch
        plan = micro_batches(lengths[mine], budget)
        return [float(self._nll([items[mine[n]] for n in rows], one)) for rows in plan]

    def _nll(self, items: Sequence[Example], one: Tensor) -> Tensor:
        batch = pack(items).to(self.session.arithmetic.device)
        logp = response_logps(self.trained.network, batch).logp
        one = one.to(logp.device)
        return sft_loss(logp, batch.mask, aggregation="token_mean", denominator=one)

    def publish(self, name: str, weights: dict[str, Tensor] | None = None) -> None:
        """Write the policy as a model folder."""
        network, base = self.trained.network, self.config.model
        identity = start.identity_of(self.session, self.text, "policy")
        start.publish(self.session, self.text, network, name, identity, base=base, weights=weights)


def _targets(items: Sequence[Example]) -> Tensor:
    """The target mask ``[B, T]`` of a whole optimiser batch, from its lengths."""
    lengths = torch.tensor([len(item.targets) for item in items])
    return torch.arange(int(lengths.max())) < lengths[:, None]
