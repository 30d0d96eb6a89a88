"""The offset and scale that make a reward model's scores comparable, measured after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stages.batch import Example, Group, behind, pack
from stages.config import RewardModelConfig
from stages.data.plan import micro_batches, share
from stages.data.store import Store
from stages.errors import ConfigError
from stages.functional import ranking
from stages.models import generate
from stages.models.forward import scores
from stages.models.load import load_policy
from stages.models.network import Network
from stages.runtime import start
from stages.runtime.loop import require_finite
from stages.runtime.session import Session


@dataclass
class Normaliser:
    """Measures the mean (and std) of raw scores that make scores comparable between models.

    ``demonstrations``: they average 0 (Ouyang et al. 2022, §3.5). ``reference``: samples of a
    policy have mean 0 and std 1 (Ziegler et al. 2019, ``rewards.py``).
    """

    session: Session
    config: RewardModelConfig
    text: start.Text
    rankings: Store
    demonstrations: Store | None
    texts: Sequence[Example] = ()

    def prepare(self) -> None:
        """The texts to score, before training: what cannot be read is refused at the start."""
        on = self.config.normalise.on
        if on == "reference":
            self.texts = self._samples()
        elif on == "demonstrations":
            self.texts = self._demonstrations()

    def parents(self) -> list[dict[str, str]]:
        """The policy that is sampled, where one is."""
        if self.config.normalise.on != "reference":
            return []
        return [start.parent("policy", self._policy())]

    def measure(self, network: Network) -> tuple[float, float, str]:
        """Mean and std of the raw scores, and what they were measured on.

        Raises:
            TrainingError: the scores are not finite.
        """
        on = self.config.normalise.on
        if on == "none":
            return 0.0, 1.0, "none"
        network.module.eval()
        raw = torch.tensor(raw_scores(self.session, network, self.texts), dtype=torch.float64)
        if on == "reference":
            mean, std = ranking.normalise_by_moments(raw)
        else:
            mean, std = ranking.normalise_by_mean(raw)
        require_finite(float(mean), what=f"step {self.session.progress.step}, mean score")
        return float(mean), float(std), self._described()

    def _described(self) -> str:
        options = self.config.normalise
        if options.on == "reference":
            return f"{options.samples} samples of {self._policy()}"
        return options.demonstrations or "the best-ranked answers of data.train"

    def _demonstrations(self) -> list[Example]:
        """The demonstrations of a file, or the best-ranked answer of each training prompt."""
        if self.demonstrations is not None:
            return list(self.demonstrations)
        self.session.reporter.note("scores are shifted: best-ranked answers average 0")
        return [best_answer(group) for group in self.rankings]

    def _policy(self) -> str:
        return self.config.normalise.policy or self.config.model

    def _samples(self) -> list[Example]:
        """Answers of the policy to training prompts, one each until there are enough."""
        options = self.config.normalise
        known = self._prompts(options.max_new_tokens)
        prompts = [known[n % len(known)] for n in range(options.samples)]
        policy = load_policy(self._policy(), start.loading_of(self.session)).freeze()
        sampling = generate.Sampling(options.max_new_tokens, self.text.codec.stop_ids)
        keys = [(n, 0) for n in range(options.samples)]
        uniforms = generate.noise(self.config.seed, keys, options.max_new_tokens)
        answers = generate.generate(policy, prompts, uniforms, sampling)
        return [behind(p, answer.ids) for p, answer in zip(prompts, answers, strict=True)]

    def _prompts(self, room: int) -> list[np.ndarray]:
        """The training prompts that leave room for an answer."""
        positions = start.positions_of(self.config)
        prompts = [group.prompt for group in self.rankings]
        fitting = [p for p in prompts if positions is None or len(p) + room <= positions]
        if not fitting:
            raise ConfigError(
                f"{room} leaves no prompt room for an answer in {positions} positions",
                where="normalise.max_new_tokens",
                do="lower it",
            )
        return fitting


def best_answer(group: Group) -> Example:
    """The best-ranked answer behind its prompt."""
    return behind(group.prompt, group.answers[int(np.argmin(group.ranks))])


@torch.no_grad()
def raw_scores(session: Session, network: Network, examples: Sequence[Example]) -> list[float]:
    """The head's output at the last token of each sequence, in the order given."""
    lengths = np.array([len(example.ids) for example in examples])
    world, budget = session.world, session.config.train.tokens_per_micro_batch
    mine = share(lengths, world.rank, world.size)
    found: list[tuple[int, float]] = []
    for rows in micro_batches(lengths[mine], budget):
        chosen = [int(mine[n]) for n in rows]
        out = scores(network, pack([examples[n] for n in chosen]).to(network.device))
        raw = out.double() * network.std + network.mean
        found += list(zip(chosen, raw.tolist(), strict=True))
    return [value for _, value in sorted(world.gather(found))]
