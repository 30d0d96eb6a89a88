"""Stage 3, ``rlhf ppo``: PPO against the reward model, tied to the SFT model by a KL penalty.

    maximise  E[ R(x, y) - β·log(π(y|x) / π_ref(y|x)) ] + γ·E_pretrain[ log π(x) ]

(Ouyang et al. 2022, §3.5, Eq. 2). One iteration: a rollout, rewards, advantages, then epochs of
minibatches on it. Policy and critic are separate networks with an optimiser each.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages import actors, budget, diagnosis, inputs
from stages.advantage import Targets, estimate
from stages.batch import Example
from stages.config import PpoConfig
from stages.data import store
from stages.data.plan import shuffled, steps_per_epoch, stream
from stages.data.records import to_json
from stages.data.store import Store
from stages.errors import TrainingError
from stages.functional.control import next_kl_coef
from stages.functional.divergence import kl_estimate
from stages.functional.masking import masked, masked_sum
from stages.models.generate import Sampling
from stages.rollout import Collected, Key, Readers, Rollout, collect, from_tensors
from stages.runtime import metrics, start
from stages.runtime.loop import Plan, modes_kept, require_finite
from stages.runtime.opening import begin, opened, require_parents
from stages.runtime.optim import trainee
from stages.runtime.reporter import Reporter
from stages.runtime.run_dir import Result
from stages.runtime.session import Session, precision_of
from stages.update import Update


def run(
    config: PpoConfig, reporter: Reporter, *, resume: bool = False, overwrite: bool = False
) -> Result:
    """Train a policy against a reward model and write the run folder.

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


def _train(session: Session, config: PpoConfig) -> Result:
    # 1. Text, prompts and the four models; everything that can be refused is refused here.
    text = start.text_of(config, stop=config.rollout.stop)
    models = inputs.models(session, config, text)
    read = inputs.prompts(session, config, text)
    budget.require_disk(session, config, models, read)
    readers = actors.load(session, config, text)
    assert readers.critic is not None
    require_parents(session, actors.parents(config))
    begin(session)

    # 2. Iterations: rollout, advantages, minibatches.
    policy = trainee(readers.policy, config.train)
    critic = trainee(readers.critic, config.train, with_average=False)
    plan = Plan.of(config, len(read.records.train))
    update = Update(config, policy, critic, session.world, plan.total_steps)
    loop = Loop(session, config, text, read.records, read.second, readers, update, plan)
    loop.restore()
    loop.run()

    # 3. Policy, critic and averaged policy as plain model folders; the last, not the best.
    loop.publish()
    policy = shlex.quote(config.output)
    return session.finish(f"rlhf sample {policy} prompts.jsonl --output answers.jsonl")


@dataclass
class Loop:
    """The iterations of a run; what must survive a stop is in the session's progress.

    ``cut``: whether ``train.max_steps`` ended the iteration before its last minibatch.
    """

    session: Session
    config: PpoConfig
    text: start.Text
    prompts: store.Splits
    documents: Store | None
    readers: Readers
    update: Update
    plan: Plan
    rollout: Rollout | None = None
    targets: Targets | None = None
    cut: bool = False

    def restore(self) -> None:
        """Continue where the newest checkpoint was written, within an iteration too."""
        extra = self.session.restore(model=self.update.policy, critic=self.update.critic)
        state = self.session.progress.stage
        state.setdefault("kl_coef", self.config.kl.coef)
        state.setdefault("minibatch", 0)
        state.setdefault("documents", 0)
        if "rollout" in extra:
            tensors = extra["rollout"]
            self.targets = Targets(*(tensors.pop(name) for name in Targets._fields))
            self.rollout = from_tensors(tensors)
        known = len(self.prompts.train)
        self.session.tell_length(lambda asked: Plan.of(asked, known).total_steps)

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
        session.reporter.begin("ppo", total=total, unit="iterations", done=progress.iteration)
        if session.resume_from is None:
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
            self.rollout = self.targets = None
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
        """Sample the iteration's answers and estimate rewards and advantages."""
        progress, size = self.session.progress, self.config.rollout.batch_size
        first = progress.iteration * size
        chosen = stream(len(self.prompts.train), self.config.seed, first, size)
        items = [self.prompts.train[int(n)] for n in chosen]
        keys = [(first + n, 0) for n in range(size)]
        collected = self._collect([item.ids for item in items], keys, self.readers)
        require_scores(collected.rollout, f"iteration {progress.iteration + 1}")
        estimated = estimate(collected.rollout, self.config, kl_coef=progress.stage["kl_coef"])
        self.guard_kl(estimated.kl)
        progress.stage["kl"] = estimated.kl
        progress.window.add(estimated.metrics)
        progress.window.add(
            {
                "time/rollout": collected.sampling_seconds,
                "time/score": collected.reading_seconds,
            }
        )
        return collected.rollout, estimated.targets

    def improve(self, rollout: Rollout, targets: Targets) -> None:
        """Epochs of minibatches on the rollout, each one optimiser step of policy and critic."""
        progress, config = self.session.progress, self.config
        state, size = progress.stage, min(config.train.batch_size, len(rollout))
        per_epoch = steps_per_epoch(len(rollout), size)
        while state["minibatch"] < config.ppo.epochs * per_epoch and not self._out_of_steps:
            started = time.perf_counter()
            epoch, position = divmod(state["minibatch"], per_epoch)
            key = ("minibatches", progress.iteration, epoch)
            order = shuffled(len(rollout), config.seed, *key)
            rows = order[position * size : (position + 1) * size].tolist()
            documents = self._documents(len(rows))
            figures = self.update.step(rollout, targets, rows, documents, progress.step)
            if figures is None:
                state["stopped_early"] = 1.0
                break
            if state["minibatch"] == 0:
                figures["policy/ratio_first"] = figures["policy/ratio"]
                figures["policy/shift_first"] = math.sqrt(2 * figures["policy/approx_kl_k2"])
            progress.window.add(figures)
            progress.step += 1
            state["minibatch"] += 1
            state["documents"] += len(documents)
            seconds = time.perf_counter() - started
            state["train_seconds"] = state.get("train_seconds", 0.0) + seconds
            progress.train_seconds += seconds
            if not self._out_of_steps:
                self.session.stop_if_asked(self._in_progress())
        whole = state["minibatch"] == config.ppo.epochs * per_epoch
        self.cut = not whole and "stopped_early" not in state

    def close_iteration(self) -> None:
        """Count the iteration and move the KL coefficient for the next rollout."""
        progress, kl = self.session.progress, self.config.kl
        state, episodes = progress.stage, self.config.rollout.batch_size
        if kl.controller == "adaptive":
            gain = episodes / kl.horizon if kl.gain is None else kl.gain
            state["kl_coef"] = next_kl_coef(
                state["kl_coef"], state["kl"], target=kl.target, gain=gain
            )
        progress.window.add({"time/train": state.pop("train_seconds", 0.0)})
        if self.config.ppo.target_kl is not None:
            progress.window.add({"policy/stopped_early": state.pop("stopped_early", 0.0)})
        progress.iteration += 1
        progress.records += episodes
        state["minibatch"] = 0

    def evaluate(self) -> None:
        """Sample answers to the held-out prompts: score, KL and length, at fixed noise."""
        held_out = self.prompts.eval
        if held_out is None:
            return
        readers = Readers(self.readers.policy, self.readers.reference, self.readers.reward, None)
        size, sums = self.config.rollout.batch_size, np.zeros(3)
        for first in range(0, len(held_out), size):
            places = range(first, min(first + size, len(held_out)))
            keys = [(-1 - n, 0) for n in places]
            with modes_kept(readers.policy, readers.reference, readers.reward):
                rollout = self._collect([held_out[n].ids for n in places], keys, readers).rollout
            kl = kl_estimate(rollout.logp_old, rollout.logp_ref, estimator="k1")
            sums += [rollout.scores.sum(), masked_sum(kl, rollout.mask), rollout.mask.sum()]
        score, kl_mean, length = sums / len(held_out)
        figures = {"eval/score": score, "eval/kl": kl_mean, "eval/response_length_mean": length}
        iteration = self.session.progress.iteration
        for name, value in figures.items():
            require_finite(float(value), what=f"iteration {iteration}, {name}")
        row = self.session.log("eval", figures, iteration=iteration)
        self.session.reporter.advance(iteration, row)

    def show_samples(self) -> None:
        """The first answers of the rollout with their scores: a table, and samples.jsonl."""
        count, rollout, progress = self.config.log.samples, self.rollout, self.session.progress
        assert rollout is not None
        if count == 0 or not self.session.world.main:
            return
        size = self.config.rollout.batch_size
        chosen = stream(len(self.prompts.train), self.config.seed, progress.records - size, size)
        kl = masked(
            kl_estimate(rollout.logp_old, rollout.logp_ref, estimator="k1"), rollout.mask
        ).sum(dim=1)
        samples = [
            {
                "step": progress.step,
                "iteration": progress.iteration,
                "prompt": to_json(self.prompts.train[int(chosen[n])].prompt),
                "response": self.text.codec.decode(rollout.answers[n]),
                "response_ids": rollout.answers[n].tolist(),
                "ended": bool(rollout.ended[n]),
                "score": float(rollout.scores[n]),
                "kl": float(kl[n]),
            }
            for n in range(min(count, len(rollout)))
        ]
        for sample in samples:
            metrics.append(self.session.folder / "samples.jsonl", sample)
        rows = [_sample_row(sample) for sample in samples]
        title = f"answers of iteration {progress.iteration}"
        self.session.reporter.table(title, ("prompt", "answer", "score", "kl"), rows)

    def publish(self) -> None:
        """Policy, critic and, where it is kept, the averaged policy."""
        session, update, model = self.session, self.update, self.config.model
        critic, base = update.critic.network, inputs.critic_source(self.config)
        policy = start.identity_of(session, self.text, "policy")
        valued = start.identity_of(session, self.text, "critic", mean=critic.mean, std=critic.std)
        start.publish(session, self.text, update.policy.network, "model", policy, base=model)
        start.publish(session, self.text, critic, "critic", valued, base=base)
        if (average := update.policy.average) is not None:
            network = update.policy.network
            start.publish(
                session, self.text, network, "model_ema", policy, base=model, weights=average
            )
        session.progress.selected = {"step": session.progress.step, "by": "last", "value": None}

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

    def guard_kl(self, kl: float) -> None:
        """Stop where the policy has left the reference too far behind.

        Raises:
            TrainingError: the KL is above ``kl.stop_above``.
        """
        limit = self.config.kl.stop_above
        if limit is not None and kl > limit:
            raise TrainingError(
                f"iteration {self.session.progress.iteration + 1}: the KL to the reference is "
                f"{kl:.3g} nats per answer, above kl.stop_above {limit:g}",
                do="raise kl.coef or lower train.learning_rate; the state before is saved",
            )

    def _collect(
        self, prompts: Sequence[np.ndarray], keys: Sequence[Key], readers: Readers
    ) -> Collected:
        options = self.config.rollout
        sampling = Sampling(
            max_new_tokens=options.max_new_tokens,
            stop_ids=self.text.codec.stop_ids,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
        )
        return collect(
            readers,
            prompts,
            keys,
            sampling,
            seed=self.config.seed,
            budget=self.config.train.tokens_per_micro_batch,
            after_last=self.config.score.position == "after_last",
            world=self.session.world,
        )

    def _documents(self, episodes: int) -> list[Example]:
        """``ptx.ratio`` pretraining texts for each episode of a minibatch."""
        if self.documents is None:
            return []
        first, count = self.session.progress.stage["documents"], episodes * self.config.ptx.ratio
        chosen = stream(len(self.documents), self.config.seed, first, count, name="ptx order")
        return [self.documents[int(n)] for n in chosen]

    def _in_progress(self) -> dict[str, dict[str, torch.Tensor]]:
        """The current rollout for a checkpoint written inside an iteration."""
        if self.rollout is None or self.targets is None:
            return {}
        targets = {name: tensor.clone() for name, tensor in self.targets._asdict().items()}
        return {"rollout": self.rollout.to_tensors() | targets}  # no two share their memory

    @property
    def _out_of_steps(self) -> bool:
        limit = self.config.train.max_steps
        return limit is not None and self.session.progress.step >= limit


def require_scores(rollout: Rollout, what: str) -> None:
    """A guard: no broken score reaches the advantages.

    Raises:
        TrainingError: a score is not finite.
    """
    for value in rollout.scores.tolist():
        require_finite(value, what=f"{what}, score")


def _sample_row(sample: dict[str, Any]) -> list[str]:
    prompt = sample["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return [text, sample["response"], f"{sample['score']:.3f}", f"{sample['kl']:.3f}"]
