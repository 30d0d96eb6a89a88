"""The sections that all stages share.

A **step** is an optimiser step in every stage; ppo also counts **iterations**, each one rollout and
the steps made on it. Relative paths mean the current directory.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from stages.config.base import (
    Count,
    Flag,
    NonNegative,
    Place,
    Positive,
    Section,
    Share,
    ShareBelowOne,
    Text,
    Whole,
    disagreement,
    dotted,
    kind,
    leaves,
)

LARGEST = 3.4028234e38  # of the numbers in fp32

Format = Literal[
    "auto",
    "labelled",
    "canonical",
    "messages",
    "sharegpt",
    "prompt_completion",
    "alpaca",
    "dolly",
    "text",
    "prompts",
    "nectar",
    "ultrafeedback",
    "oasst",
    "oasst_flat",
    "hh",
    "pairs",
    "summarize_from_feedback",
    "arena",
    "shp",
    "webgpt",
    "distilabel",
]

Sources = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[tuple[Text, ...], Tag("<list>")],
    Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message="expected a path, a glob, hub:org/name, or a list of them",
    ),
]

HeldOut = Annotated[
    Annotated[ShareBelowOne, Tag("<number>")] | Annotated[Text, Tag("<text>")],
    Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message="expected a share such as 0.05, a path, or null",
    ),
]


class PromptData(Section):
    """Which records a stage learns from and how they become tokens."""

    train: Sources
    """Records to learn from: a path, a glob, ``hub:org/name[:config][@split]``, or a list of
    them."""

    eval: HeldOut | None = 0.05
    """Held-out records: a share of ``data.train`` split off by prompt (the same prompt is never on
    both sides), a path, or null for none."""

    format: Format = "auto"
    """Format of the records; ``auto`` recognises it by the columns and says what it found."""

    columns: dict[str, Text] | None = None
    """Foreign column names and what they are called here, such as ``{question: prompt}``."""

    as_messages: Flag = False
    """Whether a prompt given as a plain string becomes one user turn of the chat template."""

    chat_template: Text | None = None
    """Chat template: null takes the tokenizer's, otherwise a built-in name (``chatml``) or a
    path."""

    max_prompt_tokens: Count = 512
    """Longest prompt in tokens."""

    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to a record over a limit: ``drop`` it, or ``truncate`` it (the oldest turns and
    prompt tokens go first; an answer that was cut gets no end token)."""

    max_dropped: Share = 0.5
    """Largest share of unusable records; more of them is an error."""

    limit: Count | None = None
    """Read only the first N records, for a trial; null reads all."""

    @model_validator(mode="after")
    def _names_a_file(self) -> PromptData:
        if self.train == ():
            raise disagreement("train", "an empty list: name at least one file")
        return self


class AnswerData(PromptData):
    """Which records a stage learns from, where the records hold answers."""

    max_response_tokens: Count = 512
    """Longest answer in tokens, its end token included."""


class Optimisation(Section):
    """The optimiser, its schedule and its limits."""

    max_steps: Count | None = None
    """Number of optimiser steps; null lets the passes over the data decide. It wins over them and
    runs past the last one where needed."""

    batch_size: Count = 32
    """Examples per optimiser step over all processes: demonstrations, prompts with all their
    answers, or (ppo) episodes of a minibatch."""

    tokens_per_micro_batch: Count = 8192
    """Tokens in one forward and backward pass. A knob for memory: without dropout the result is
    the same up to rounding."""

    learning_rate: NonNegative = 1.0e-5
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Learning rate after the warm-up. Cosine is what Ouyang et al. 2022, App. C.1 and C.2, use for
    the first two stages; linear ends at 0."""

    warmup_steps: Whole = 0
    """Warm-up over W optimiser steps s = 0…W−1 at peak·(0.1 + 0.9·s/(W−1)); W = 1 is 0.1·peak. The
    schedule starts after them. The shape, from a tenth of the peak, is that of Ouyang et al. 2022,
    App. C.4."""

    min_learning_rate_ratio: Share = 0.1
    """Where cosine ends, as a share of the peak; Ouyang et al. 2022, App. C.1: 10 %."""

    adam_betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment; Ouyang et al. 2022, App. C."""

    adam_eps: Positive = 1.0e-8
    """Adam's epsilon; Huang et al. 2024 (arXiv 2403.17031) use 1e-5."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (AdamW)."""

    max_grad_norm: Positive = 1.0
    """Gradients with a larger norm are scaled down to it."""

    ema_decay: ShareBelowOne | None = None
    """Decay of an exponential moving average of the weights, updated once per optimiser step and
    saved beside the model; null keeps none. Ouyang et al. 2022, App. C.4: 0.992 in ppo."""

    precision: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    """Arithmetic of the passes: ``auto`` is bf16 where the hardware has fast bf16, otherwise fp32;
    fp64 is slow and exact. Master weights are fp32 (fp64 with fp64)."""

    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: less memory, more time."""


class Evaluate(Section):
    """When held-out data are looked at; always at the end."""

    every: Count | None = None
    """Optimiser steps between evaluations; null evaluates after every epoch."""


class Checkpoint(Section):
    """When the training state is saved, besides at the end and at an interrupt."""

    every: Count = 500
    """Optimiser steps between checkpoints."""

    keep: Count = 2
    """How many checkpoints stay; the newest and the best are never deleted."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the saved weights."""


class Log(Section):
    """What is told while the run works."""

    every: Count = 10
    """Optimiser steps between logged rows."""

    samples: Whole = 4
    """Sampled answers shown and written at intervals, where the stage samples."""

    trackers: tuple[Text, ...] = ()
    """Experiment trackers that accelerate knows, such as tensorboard or wandb."""


LoraTargets = Annotated[
    Annotated[Literal["all-linear"], Tag("<text>")]
    | Annotated[tuple[Text, ...], Field(min_length=1), Tag("<list>")],
    Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message="expected all-linear, or a list of names such as [q_proj, v_proj]",
    ),
]


class Lora(Section):
    """Low-rank adapters: W + (alpha/rank)·B·A in place of W (Hu et al. 2022, arXiv 2106.09685).

    Only A and B are trained, and the scalar head of a reward model or critic.
    """

    rank: Count = 16
    """r, the rows of A and columns of B of each adapted layer; Hu et al. 2022, §4.1."""

    alpha: Positive = 16.0
    """The adapters are multiplied by alpha/rank (Hu et al. 2022, §4.1): with alpha fixed, the
    learning rate that suits one rank about suits another."""

    dropout: ShareBelowOne = 0.0
    """Dropout on the input of the adapters; 0 in ppo. Hu et al. 2022, App. D: 0.1 for GPT-2."""

    targets: LoraTargets = "all-linear"
    """Which layers are adapted: ``all-linear``, or names such as ``[q_proj, v_proj]``; never the
    output layer. Hu et al. 2022, §4.2, adapt attention only; §7.1 compares."""


class StageConfig(Section):
    """What every stage is told."""

    stage: str
    """Which stage this config is for."""

    preset: str | None = None
    """A named set of defaults from a paper; a key given beside it wins."""

    model: Place
    """Model to start from: a run folder, a model folder or a hub id."""

    data: PromptData
    """The records."""

    output: Place
    """Run folder that the stage writes."""

    train: Optimisation = Optimisation()
    """Optimiser, schedule and limits."""

    lora: Lora | None = None
    """Train low-rank adapters in place of all weights (Hu et al. 2022, arXiv 2106.09685); null
    trains all."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; ``auto`` takes the best one that is there."""

    trust_remote_code: Flag = False
    """Whether a model may bring its own Python code, which then runs on this machine."""

    seed: Whole = 0
    """Seed of every random choice of the run."""

    evaluate: Evaluate = Evaluate()
    """When held-out data are looked at."""

    checkpoint: Checkpoint = Checkpoint()
    """When the training state is saved."""

    log: Log = Log()
    """What is told, how often and to whom."""

    @model_validator(mode="after")
    def _keeps_the_input_model(self) -> StageConfig:
        if os.path.normpath(self.output) == os.path.normpath(self.model):
            raise disagreement("output", "is also the model to start from; name another folder")
        return self

    @model_validator(mode="after")
    def _fits_the_number_format(self) -> StageConfig:
        if self.train.precision != "fp64":
            for path, value in leaves(self):
                if isinstance(value, float) and abs(value) > LARGEST:
                    raise disagreement(
                        dotted(path), f"must be at most {LARGEST:.3g} in fp32, got {value:g}"
                    )
        return self
