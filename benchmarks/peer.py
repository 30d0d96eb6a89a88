"""One job by a peer, in its own environment: ``python -m benchmarks.peer JOB.json``.

TRL's ``SFTTrainer`` and ``RewardTrainer``, the ``PPOTrainer`` of its last release that has one, and
``generate`` of transformers. Prints one JSON line. Timed is ``train()``, or ``generate`` with the
decoding to text; loading, tokenising and saving are outside.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import load_dataset
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    TrainerCallback,
)

from benchmarks.watch import Watch
from benchmarks.works import Job, read_job

LONGEST = 1024  # tokens; no text of a comparison is cut
EVALUATED = 8  # prompts that PPOTrainer wants for evaluation and does not use here


class FirstStep(TrainerCallback):
    """Tells when the first optimiser step is done."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            print("first step", file=sys.stderr, flush=True)


def load(kind: Any, folder: str) -> Any:
    """A model with fp32 weights."""
    return kind.from_pretrained(folder, dtype=torch.float32)


def settings(job: Job) -> dict[str, Any]:
    """What all trainers are told."""
    work = job.work
    return {
        "output_dir": f"{job.output}-trainer",
        "per_device_train_batch_size": work.micro,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "bf16": job.precision == "bf16",
        "seed": job.seed,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def sft(job: Job) -> Any:
    """TRL's trainer of demonstrations."""
    from trl import SFTConfig, SFTTrainer

    data = load_dataset("json", data_files=job.data, split="train")
    config = SFTConfig(
        gradient_accumulation_steps=job.work.batch // job.work.micro,
        num_train_epochs=job.work.epochs,
        max_length=LONGEST,
        completion_only_loss=True,
        **settings(job),
    )
    return SFTTrainer(
        model=load(LlamaForCausalLM, job.model),
        args=config,
        train_dataset=data.rename_column("response", "completion"),
        processing_class=AutoTokenizer.from_pretrained(job.model),
    )


def reward_model(job: Job) -> Any:
    """TRL's trainer of pairs: as many steps, each with all pairs of as many rankings."""
    from trl import RewardConfig, RewardTrainer

    pairs = job.work.batch * job.work.k * (job.work.k - 1) // 2
    config = RewardConfig(
        gradient_accumulation_steps=pairs // job.work.micro,
        num_train_epochs=job.work.epochs,
        max_length=LONGEST,
        **settings(job),
    )
    return RewardTrainer(
        model=load(LlamaForSequenceClassification, job.reward),
        args=config,
        train_dataset=load_dataset("json", data_files=job.pairs, split="train"),
        processing_class=AutoTokenizer.from_pretrained(job.reward),
    )


def ppo(job: Job) -> Any:
    """TRL's PPO trainer, each rollout one minibatch."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    work = job.work
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    data = load_dataset("json", data_files=job.data, split="train")
    data = data.map(
        lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]},
        remove_columns=data.column_names,
    )
    config = PPOConfig(
        gradient_accumulation_steps=work.batch // work.micro,
        num_mini_batches=1,
        num_ppo_epochs=work.epochs,
        total_episodes=work.batch * work.iterations,
        response_length=work.new_tokens,
        local_rollout_forward_batch_size=work.batch,
        num_sample_generations=0,
        stop_token="eos",
        temperature=1.0,
        kl_coef=work.kl_coef,
        **settings(job),
    )
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=load(LlamaForCausalLM, job.model),
        ref_model=load(LlamaForCausalLM, job.model),
        reward_model=load(LlamaForSequenceClassification, job.reward),
        value_model=load(LlamaForSequenceClassification, job.reward),
        train_dataset=data,
        eval_dataset=data.select(range(min(EVALUATED, len(data)))),
    )


def train(job: Job, watch: Watch) -> dict[str, Any]:
    """Train once, and save where that is asked for; the optimiser's steps are counted."""
    trainer = {"sft": sft, "reward_model": reward_model, "ppo": ppo}[job.work.stage](job)
    if job.work.stage == "sft":
        trainer.add_callback(FirstStep())
    steps: Counter[str] = Counter()
    register_optimizer_step_post_hook(lambda *_: steps.update(["steps"]))
    watch.start()
    out = trainer.train()
    watch.stop()
    if job.save:
        trainer.save_model(f"{job.output}/model")
        trainer.processing_class.save_pretrained(f"{job.output}/model")
    if job.work.stage != "ppo":
        return {"steps": steps["steps"], "learned": {"loss": out.training_loss}}
    rows = [row for row in trainer.state.log_history if "objective/scores" in row]
    names = {"score": "objective/scores", "kl": "objective/kl"}
    found = {short: rows[-1][name] for short, name in names.items()} if rows else {}
    return {"steps": steps["steps"], "learned": found}


def sample(job: Job, watch: Watch) -> dict[str, Any]:
    """All rows in one call of ``generate``, then their text."""
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    model = load(LlamaForCausalLM, job.model).eval()
    lines = Path(job.data).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    torch.manual_seed(job.seed)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16")
    watch.start()
    with torch.no_grad(), autocast:
        out = model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=job.work.new_tokens,
            num_return_sequences=job.work.k,
        )
    answers = out[:, batch["input_ids"].shape[1] :]
    tokenizer.batch_decode(answers, skip_special_tokens=True)
    watch.stop()
    lengths = (answers != tokenizer.pad_token_id).sum(dim=1).float()
    return {"learned": {"length": float(lengths.mean())}}


def main(path: str) -> None:
    """Do a job and print what there is to say about it."""
    job = read_job(path)
    transformers.utils.logging.set_verbosity_error()
    if job.work.stage in ("sft", "reward_model"):
        import trl  # noqa: F401  # counts as an import, not as work
    watch = Watch()
    done = sample(job, watch) if job.work.stage == "sample" else train(job, watch)
    print(json.dumps({**watch.figures(), **done}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
