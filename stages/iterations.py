"""The loop of the stages that learn from their own answers: rollout, targets, minibatches, again.

What a method makes of a rollout, and what a minibatch does, it brings itself; sampling, evaluation,
log, guards, checkpoints and the KL controller are the same for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from stages import diagnosis, judges, sampled
from stages.config import OnlineConfig, StageConfig
from stages.config.episodes import Kl
from stages.data import store
from stages.data.kinds import PromptItem
from stages.data.plan import shuffled, stream
from stages.data.records import to_json
from stages.functional.control import next_kl_coef
from stages.models.generate import Sampling
from stages.rollout import Collected, Key, Readers, Rollout, Targets, collect, from_tensors
from stages.rollout_method import Method
from stages.runtime import start
from stages.runtime.loop import Plan, minibatches, modes_kept
from stages.runtime.session import Session, precision_of


class Asked(NamedTuple):
    """The records that a rollout asks, and the key of each answer to them."""

    records: list[int]
    keys: list[Key]


@dataclass
class Loop:
    """The iterations of a run; what must survive a stop is in the session's progress.

    ``cut``: whether ``train.max_steps`` ended the iteration before its last minibatch.
    """

    session: Session
    config: OnlineConfig
    text: start.Text
    prompts: store.Splits
    readers: Readers
    method: Method
    plan: Plan
    rollout: Rollout | None = None
    targets: Targets = field(default_factory=dict)
    cut: bool = False

    def restore(self) -> None:
        """Continue where the newest checkpoint was written, within an iteration too."""
        extra = self.session.restore(**self.method.trainees)
        state, kl = self.session.progress.stage, self.config.kl
        state.setdefault("kl_coef", kl.coef if isinstance(kl, Kl) else 0.0)
        state.setdefault("minibatch", 0)
        if "rollout" in extra:
            self.rollout, self.targets = from_tensors(extra["rollout"])
        self.session.tell_length(self._total_steps)

    def _total_steps(self, asked: StageConfig) -> int:
        """Optimiser steps of the whole run under a config of its stage."""
        assert isinstance(asked, OnlineConfig)
        return Plan.of(asked, len(self.prompts.train)).total_steps

    def run(self) -> None:
        """Iterate to the end."""
        with self.session.guarded(self._in_progress):
            self._iterate()
        if not self.cut:
            self.session.save()
        self.session.reporter.end()

    def _iterate(self) -> None:
        """Rollouts, steps, log, evaluations and checkpoints."""
        session, progress, config = self.session, self.session.progress, self.config
        total = self.plan.iterations
        session.reporter.begin(
            config.stage, total=total, unit="iterations", done=progress.iteration
        )
        if self._lacks_evaluation:
            self.evaluate()
        while not self.finished or self.rollout is not None:
            if self.rollout is None:
                self.rollout, self.targets = self.collect()
            self.improve(self.rollout, self.targets)
            if self.cut:  # more steps, asked for later, go on inside the iteration
                session.save(self._in_progress())
            self.close_iteration()
            done = self.finished
            logged = None
            if progress.iteration % config.log.every == 0 or done:
                row = progress.window.take()
                logged = session.log("train", row, iteration=progress.iteration)
                self.diagnose(logged)
            session.reporter.advance(progress.iteration, logged)
            evaluated = progress.iteration % config.evaluate.every == 0 or done
            if evaluated or progress.iteration == 1:
                self.show_samples()
            self.rollout = None
            if evaluated:
                self.evaluate()
            if progress.iteration % config.checkpoint.every == 0 and not done:
                session.save()
            if not done:
                session.stop_if_asked()

    @property
    def finished(self) -> bool:
        """Whether all iterations, or all steps, are done."""
        progress = self.session.progress
        if self.plan.iterations is None:
            return progress.step >= self.plan.total_steps
        return progress.iteration >= self.plan.iterations

    def collect(self) -> tuple[Rollout, Targets]:
        """Sample the iteration's answers and find what the minibatches aim at."""
        progress = self.session.progress
        asked = self._asked(progress.iteration)
        prompts = [self.prompts.train[n] for n in asked.records]
        items = [prompt for prompt in prompts for _ in range(self.config.per_prompt)]
        collected = self._collect(items, asked.keys, self.readers, learn=True)
        what = f"iteration {progress.iteration + 1}"
        sampled.require_scores(collected.rollout, what)
        estimated = self.method.estimate(collected.rollout, progress.stage)
        sampled.require_near(estimated.kl, self.config, what)
        # Not before the guards: a run that they stop meets this rollout again when it goes on.
        progress.stage |= {"kl": estimated.kl, **estimated.kept, "moments": collected.moments}
        progress.window.add(estimated.metrics)
        rollout, texts = collected.rollout, self.readers.texts
        progress.window.add(judges.figures(self.config.terms, rollout.terms, rollout.judged, texts))
        progress.window.add(
            {
                "time/rollout": collected.sampling_seconds,
                "time/score": collected.reading_seconds,
            }
        )
        return collected.rollout, estimated.targets

    def improve(self, rollout: Rollout, targets: Targets) -> None:
        """Epochs of minibatches on the rollout, each an optimiser step."""
        self.session.take_steps()
        progress, config = self.session.progress, self.config
        state, per_epoch = progress.stage, minibatches(config)
        while state["minibatch"] < config.epochs * per_epoch and not self._out_of_steps:
            started = time.perf_counter()
            rows = self._minibatch(*divmod(state["minibatch"], per_epoch))
            figures = self.method.step(rollout, targets, rows)
            if figures is None:
                state["stopped_early"] = 1.0
                break
            if state["minibatch"] == 0:
                figures["policy/ratio_first"] = figures["policy/ratio"]
                figures["policy/shift_first"] = math.sqrt(2 * figures["policy/approx_kl_k2"])
            progress.window.add(figures)
            progress.step += 1
            state["minibatch"] += 1
            seconds = time.perf_counter() - started
            state["train_seconds"] = state.get("train_seconds", 0.0) + seconds
            progress.train_seconds += seconds
            if not self._out_of_steps:
                self.session.stop_if_asked(self._in_progress())
        whole = state["minibatch"] == config.epochs * per_epoch
        self.cut = not whole and "stopped_early" not in state

    def close_iteration(self) -> None:
        """Count the iteration and move the KL coefficient for the next rollout."""
        progress, kl = self.session.progress, self.config.kl
        state, episodes = progress.stage, self.config.rollout.batch_size
        if isinstance(kl, Kl) and kl.controller == "adaptive":
            gain = episodes / kl.horizon if kl.gain is None else kl.gain
            state["kl_coef"] = next_kl_coef(
                state["kl_coef"], state["kl"], target=kl.target, gain=gain
            )
        progress.window.add({"time/train": state.pop("train_seconds", 0.0)})
        if self.method.may_stop_early:
            progress.window.add({"policy/stopped_early": state.pop("stopped_early", 0.0)})
        progress.iteration += 1
        progress.records += episodes
        state["minibatch"] = 0

    def evaluate(self) -> None:
        """Sample answers to the held-out prompts: score, KL and length, at fixed noise."""
        held_out = self.prompts.eval
        if held_out is None:
            return
        readers = replace(self.readers, critic=None)

        def answer(items: Sequence[PromptItem], keys: Sequence[Key]) -> Rollout:
            with modes_kept(*readers.networks):
                return self._collect(items, keys, readers, learn=False).rollout

        size = self.config.rollout.batch_size
        figures = sampled.held_out_figures(held_out, size, answer, self.config.terms)
        iteration = self.session.progress.iteration
        sampled.require_figures(figures, f"iteration {iteration}")
        row = self.session.log("eval", figures, iteration=iteration)
        self.session.progress.stage["evaluated"] = iteration
        self.session.reporter.advance(iteration, row)

    def show_samples(self) -> None:
        """The first answers of the rollout with their scores: a table, and samples.jsonl."""
        session, progress, config = self.session, self.session.progress, self.config
        assert self.rollout is not None
        if config.log.samples == 0 or not session.world.main:
            return
        chosen = self._asked(progress.iteration - 1).records

        def prompt(row: int) -> Any:
            return to_json(self.prompts.train[chosen[row // config.per_prompt]].prompt)

        samples = sampled.first_answers(
            self.rollout, config.log.samples, prompt, self.text.codec.decode, config.terms
        )
        when = {"step": progress.step, "iteration": progress.iteration}
        sampled.show(samples, when, session.folder / "samples.jsonl", session.reporter)

    def diagnose(self, row: dict[str, float]) -> None:
        """Warn of what a logged row, and those before it, show to go wrong."""
        progress = self.session.progress
        warnings, progress.stage["diagnosis"] = diagnosis.diagnose(
            row,
            progress.stage.get("diagnosis", {}),
            self.config,
            precision=precision_of(self.session.arithmetic),
            iteration=progress.iteration,
        )
        for text in warnings:
            self.session.reporter.warn(text)

    def _collect(
        self,
        items: Sequence[PromptItem],
        keys: Sequence[Key],
        readers: Readers,
        *,
        learn: bool,
    ) -> Collected:
        """Answers to prompts; ``learn``: whether they move the moments of normalised terms."""
        options = self.config.rollout
        sampling = Sampling(
            max_new_tokens=options.max_new_tokens,
            stop_ids=self.text.codec.stop_ids,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
        )
        moments = self.session.progress.stage.get("moments", {})
        return collect(
            readers,
            [item.ids for item in items],
            keys,
            sampling,
            seed=self.config.seed,
            budget=self.config.train.tokens_per_micro_batch,
            after_last=self.config.after_last,
            world=self.session.world,
            judge=judges.judge(
                self.config.terms, readers.texts, items, self.text.codec, moments, learn=learn
            ),
        )

    def _asked(self, iteration: int) -> Asked:
        """The prompts of an iteration's rollout, and the keys of their answers."""
        each, config = self.config.per_prompt, self.config
        count = config.rollout.batch_size // each
        first = iteration * count
        chosen = stream(len(self.prompts.train), config.seed, first, count)
        keys = [(first + n, sample) for n in range(count) for sample in range(each)]
        return Asked([int(n) for n in chosen], keys)

    def _minibatch(self, epoch: int, position: int) -> list[int]:
        """Rows of the rollout: all answers to a prompt that belong together, or none of them."""
        size, together = self.config.rollout.batch_size, self.config.together
        key = ("minibatches", self.session.progress.iteration, epoch)
        order = shuffled(size // together, self.config.seed, *key)
        count = max(1, min(self.config.train.batch_size, size) // together)
        chosen = order[position * count : (position + 1) * count].tolist()
        return [n * together + i for n in chosen for i in range(together)]

    def _in_progress(self) -> dict[str, dict[str, torch.Tensor]]:
        """The current rollout for a checkpoint written inside an iteration."""
        if self.rollout is None:
            return {}
        targets = {name: tensor.clone() for name, tensor in self.targets.items()}
        return {"rollout": self.rollout.to_tensors() | targets}  # no two share their memory

    @property
    def _lacks_evaluation(self) -> bool:
        """Whether the evaluation of this iteration is due: at the start, or where it failed."""
        progress = self.session.progress
        due = progress.iteration % self.config.evaluate.every == 0 or self.finished
        evaluated = progress.stage.get("evaluated")
        return self.rollout is None and due and evaluated != progress.iteration

    @property
    def _out_of_steps(self) -> bool:
        limit = self.config.train.max_steps
        return limit is not None and self.session.progress.step >= limit
