"""A project of a few letters: tokenizer, tiny models, data and configs, and what a run left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from stages.config import STAGES, resolve
from stages.runtime.reporter import SilentReporter
from tests.families import save_tiny

PAD, END, TURN, TURN_END = "<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz .:\n"
END_ID = 1

DEMONSTRATIONS = [
    {"prompt": "ab:", "response": "cd"},
    {"prompt": "b:", "response": "dcba"},
    {"prompt": "cab:", "response": "e"},
    {"prompt": "a b c:", "response": "fg hi"},
    {"prompt": "d:", "response": "ab"},
]
RANKINGS = [
    {"prompt": "ab:", "responses": [("cd", 1), ("dcba", 2), ("e", 3)]},
    {"prompt": "b:", "responses": [("cde", 2), ("d", 1), ("ba", 2), ("eeee", 3)]},
    {"prompt": "cab:", "responses": [("e", 2), ("fg", 1)]},
    {"prompt": "d:", "responses": [("ab", 1), ("ba", 1), ("a", 4)]},
]
PROMPTS = [{"prompt": text} for text in ("ab:", "b:", "cab:", "a b c:", "d:", "ea:")]
DOCUMENTS = [{"text": text} for text in ("zabc zz", "z zyx", "zzzz zz z", "zed", "zoo zap z")]

DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {
        "model": "base",
        "data.train": "demonstrations.jsonl",
        "output": "runs/sft",
        "train.max_steps": 3,
        "train.batch_size": 4,
        "train.learning_rate": 1e-2,
    },
    "reward_model": {
        "model": "base",
        "data.train": "rankings.jsonl",
        "output": "runs/reward_model",
        "train.max_steps": 3,
        "train.batch_size": 4,
        "train.learning_rate": 1e-2,
    },
    "ppo": {
        "model": "base",
        "data.train": "prompts.jsonl",
        "output": "runs/ppo",
        "reward.path": "reward",
        "rollout.batch_size": 6,
        "rollout.max_new_tokens": 5,
        "train.batch_size": 3,
        "train.total_episodes": 12,
        "train.learning_rate": 1e-2,
        "log.samples": 6,
    },
}
METHODS = ("dpo", "odpo", "kto", "orpo", "simpo")
for _method in METHODS:
    DEFAULTS[_method] = {**DEFAULTS["reward_model"], "output": f"runs/{_method}"}
DEFAULTS["odpo"]["odpo.offset"] = "rank"
ONLINE = ("grpo", "rloo", "reinforce", "online_dpo")
for _method in ONLINE:
    DEFAULTS[_method] = {**DEFAULTS["ppo"], "output": f"runs/{_method}"}
    DEFAULTS[_method] |= {"rollout.batch_size": 8, "train.batch_size": 4}
    DEFAULTS[_method] |= {"train.total_episodes": 16}
DEFAULTS["grpo"]["grpo.group_size"] = 4
COMMON = {"data.eval": None, "train.precision": "fp64", "log.every": 1, "device": "cpu"}


def letter_tokenizer() -> PreTrainedTokenizerBase:
    """A token for each letter; token 0 pads, token 1 ends."""
    specials = [PAD, END, TURN, TURN_END]
    vocabulary = {token: n for n, token in enumerate([*specials, *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[TURN, TURN_END],
    )


TOKENIZER = letter_tokenizer()


def ids_of(text: str, *, end: bool = False) -> list[int]:
    """The ids of a text, its end token behind it where asked for."""
    return TOKENIZER(text, add_special_tokens=False)["input_ids"] + [END_ID] * end


@dataclass(frozen=True)
class Project:
    """A folder that is the current one, with models and data in it."""

    folder: Path

    def write(self, name: str, records: Iterable[Mapping[str, Any]]) -> str:
        """A JSON Lines file."""
        text = "".join(json.dumps(record) + "\n" for record in records)
        (self.folder / name).write_text(text, encoding="utf-8")
        return name

    def model(self, name: str, family: str = "llama", **options: Any) -> str:
        """A random model of a family in a folder of this project."""
        save_tiny(self.folder / name, family, TOKENIZER, **options)
        return name

    def config(self, stage: str, **changes: Any) -> Any:
        """The stage's config with dotted keys changed; ``__`` stands for a dot."""
        given = {key.replace("__", "."): value for key, value in changes.items()}
        flat = {**COMMON, **DEFAULTS[stage], **given}
        values: dict[str, Any] = {"stage": stage}
        for key, value in flat.items():
            *sections, last = key.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
        config = resolve(values)
        assert isinstance(config, STAGES[stage])
        return config


def enter(folder: Path, patch: pytest.MonkeyPatch) -> Project:
    """A project with data and no models in a folder, which is the current one from now on."""
    patch.chdir(folder)
    patch.setenv("RLHF_CACHE", str(folder / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RLHF_LAUNCHED"):
        patch.delenv(name, raising=False)
    project = Project(folder)
    project.write("demonstrations.jsonl", DEMONSTRATIONS)
    project.write("rankings.jsonl", rankings())
    project.write("prompts.jsonl", PROMPTS)
    project.write("documents.jsonl", DOCUMENTS)
    return project


def make_models(project: Project) -> None:
    """A Llama as base model, and a random reward model of the same vocabulary."""
    project.model("base", dtype=torch.float64)
    project.model("reward", kind="reward", dtype=torch.float64, seed=1)


def rankings(records: Iterable[Mapping[str, Any]] = RANKINGS) -> list[dict[str, Any]]:
    """Rankings of (text, rank) pairs as canonical lines."""
    return [
        {"prompt": r["prompt"], "responses": [{"text": t, "rank": k} for t, k in r["responses"]]}
        for r in records
    ]


def many_answers() -> list[dict[str, Any]]:
    """K = 2 … 9, with ties among the ranks; no answer comes twice."""
    letters = "abcdefghijklm"
    return [
        {
            "prompt": "abc:"[n % 3 :],
            "responses": [(letters[k : k + 1 + (n + k) % 5], 1 + k // 2) for k in range(n)],
        }
        for n in range(3, 10)
    ] + [{"prompt": "d:", "responses": [("ab", 2), ("c", 1)]}]


def still(project: Project, **changes: Any) -> Any:
    """One step at learning rate 0, so that the published model is the one the loss was taken of."""
    values = {"train.learning_rate": 0.0, "train.max_steps": 1, "normalise.on": "none"}
    return project.config("reward_model", **values | changes)


def score_token(project: Project, name: str, token: int, *, score: float = 1.0) -> str:
    """A reward model that gives ``score`` to an answer whose last token is ``token``, else 0.

    Its layers add nothing to the embedding, which is one unit vector for the token and another for
    all others.
    """
    folder = project.folder / project.model(name, kind="reward", dtype=torch.float64)
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for key, weight in module.named_parameters():
            weight.fill_(1.0 if "norm" in key else 0.0)
        embedding = module.get_input_embeddings().weight
        embedding[:, 1] = 1.0
        embedding[token, 0], embedding[token, 1] = 1.0, 0.0
        # The last norm turns a unit vector of width H into one of length √H.
        module.score.weight[0, 0] = score / embedding.shape[1] ** 0.5
    module.save_pretrained(folder)
    return name


class Listener(SilentReporter):
    """Keeps what is said; at a given count it asks the process to stop."""

    def __init__(self, *, stop_at: int | None = None, by: signal.Signals = signal.SIGTERM) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.tables: list[Any] = []
        self.stop_at = stop_at
        self.by = by
        self.phases: list[str] = []

    def begin(self, what: str, **_: Any) -> None:
        self.phases.append(what)

    def end(self) -> None:
        self.phases.pop()

    @property
    def trains(self) -> bool:
        """Whether the count is one of steps or prompts, not of records that are read."""
        return bool(self.phases) and self.phases[-1] in (*STAGES, "sample", "evaluate")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def table(self, title: str, columns: Any, rows: Any) -> None:
        self.tables.append((title, columns, rows))

    def advance(self, done: int, metrics: Mapping[str, float] | None = None) -> None:
        if self.trains and done == self.stop_at:
            self.stop_at = None
            os.kill(os.getpid(), self.by)
