"""Everything a user can get wrong, as command lines with what they must be told.

Each case stands alone: a project of tiny models and good data, spoilt in one place.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, GraniteForCausalLM

from stages.models.folder import Identity, write_identity
from stages.models.tiny import make_tokenizer
from tests.families import save_tiny
from tests.stages.project import (
    DEMONSTRATIONS,
    DOCUMENTS,
    PROMPTS,
    RANKINGS,
    TOKENIZER,
    Project,
    rankings,
)

SETTINGS = "device: cpu\nlog: {every: 1}\n"
CONFIGS = {
    "sft.yaml": "stage: sft\nmodel: base\noutput: runs/sft\n"
    "data: {train: demonstrations.jsonl, eval: null}\n"
    "train: {max_steps: 3, batch_size: 4}\n",
    "rm.yaml": "stage: reward_model\nmodel: base\noutput: runs/rm\n"
    "data: {train: rankings.jsonl, eval: null}\n"
    "train: {max_steps: 2, batch_size: 4}\n",
    "ppo.yaml": "stage: ppo\nmodel: base\noutput: runs/ppo\n"
    "data: {train: prompts.jsonl, eval: null}\nreward: {path: reward}\n"
    "rollout: {batch_size: 4, max_new_tokens: 4}\n"
    "train: {total_episodes: 4, batch_size: 4}\n",
}

Spoil = Callable[[Path], object]


def make_project(folder: Path) -> None:
    """Good data, good configs, a policy and a reward model."""
    project = Project(folder)
    project.write("demonstrations.jsonl", DEMONSTRATIONS)
    project.write("rankings.jsonl", rankings())
    project.write("prompts.jsonl", PROMPTS)
    project.write("documents.jsonl", DOCUMENTS)
    project.model("base")
    project.model("reward", kind="reward", seed=1)
    for name, text in CONFIGS.items():
        (folder / name).write_text(text + SETTINGS, encoding="utf-8")


@dataclass(frozen=True)
class Bad:
    """A mistake and what becomes of it.

    Attributes:
        name: of the test.
        argv: the command line.
        exit: its exit code.
        where: what the place of the error contains.
        what: words of the sentence that says what is wrong.
        do: words of the sentence that says what to do.
        spoil: what it does to the project's folder first.
        as_check: whether ``rlhf check`` refuses the same config with the same words.
    """

    name: str
    argv: str
    exit: int
    where: str
    what: tuple[str, ...]
    do: str
    spoil: Spoil = lambda folder: None
    as_check: bool = True


KIND = {2: "config", 3: "data", 4: "checkpoint", 7: "gate"}


# Ways to spoil a project.


def lines(name: str, *records: object) -> Spoil:
    """A file of these records; a string is a line as it stands."""

    def spoil(folder: Path) -> None:
        texts = [r if isinstance(r, str) else json.dumps(r) for r in records]
        (folder / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    return spoil


def holding(name: str, text: str) -> Spoil:
    """A file in a folder that is made for it."""

    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    return spoil


def without(name: str) -> Spoil:
    """A file or folder of the project goes away."""

    def spoil(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


def without_tokenizer(folder: Path) -> None:
    for path in (folder / "base").glob("tokenizer*"):
        path.unlink()


def cut_weights(folder: Path) -> None:
    file = folder / "base" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pickled_weights(folder: Path) -> None:
    file = folder / "base" / "model.safetensors"
    torch.save(load_file(file), folder / "base" / "pytorch_model.bin")
    file.unlink()


def nan_weights(folder: Path) -> None:
    file = folder / "base" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})


def one_weight_less(folder: Path) -> None:
    file = folder / "base" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def granite(folder: Path) -> None:
    """A family that transformers has no sequence classification form of."""
    config = GraniteConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    GraniteForCausalLM(config).save_pretrained(folder / "granite")
    TOKENIZER.save_pretrained(folder / "granite")


def other_words(name: str, kind: str) -> Spoil:
    """A model whose tokenizer has other tokens."""

    def spoil(folder: Path) -> None:
        tokenizer = make_tokenizer(["abc abc"], vocabulary=260)
        save_tiny(folder / name, "llama", tokenizer, kind=kind)  # type: ignore[arg-type]

    return spoil


def identified(name: str, kind: str, *, template: str = "t") -> Spoil:
    """A folder that says it was made with another template and vocabulary."""

    def spoil(folder: Path) -> None:
        identity = Identity(kind, "sft", template, "v", False, (1,), 0)  # type: ignore[arg-type]
        write_identity(folder / name, identity)

    return spoil


def several_labels(folder: Path) -> None:
    file = folder / "reward" / "config.json"
    config = json.loads(file.read_text())
    config["id2label"] = {"0": "bad", "1": "good"}
    config["label2id"] = {"bad": 0, "good": 1}
    file.write_text(json.dumps(config))


def one_label_to_many(folder: Path) -> None:
    file = folder / "reward" / "config.json"
    config = json.loads(file.read_text())
    config["mean"], config["std"] = 0.0, 0.0
    file.write_text(json.dumps(config))


def locked(folder: Path) -> object:
    """Another run holds the output folder; returned, so that it is held as long as the test."""
    (folder / "runs" / "sft").mkdir(parents=True)
    lock = (folder / "runs" / "sft" / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def both(*spoils: Spoil) -> Spoil:
    """One after the other."""

    def spoil(folder: Path) -> None:
        for each in spoils:
            each(folder)

    return spoil


LONG = "a" * 300
GOOD_LINE = DEMONSTRATIONS[0]
CHAT = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}

CONFIG = [
    Bad(
        "an unknown key",
        "sft sft.yaml colour=red",
        2,
        "override colour",
        ("unknown key",),
        "rlhf config schema sft",
    ),
    Bad(
        "a mistyped key, which is suggested",
        "sft sft.yaml",
        2,
        "sft.yaml:5:9: train.max_stepz",
        ("unknown key", "did you mean max_steps?"),
        "rlhf config schema sft",
        lambda folder: rewrite(folder / "sft.yaml", "max_steps", "max_stepz"),
    ),
    Bad(
        "a value of the wrong type",
        "sft sft.yaml train.batch_size=many",
        2,
        "override train.batch_size",
        ("many",),
        "rlhf config schema sft",
    ),
    Bad(
        "a value out of range",
        "train-rm rm.yaml train.learning_rate=-1",
        2,
        "override train.learning_rate",
        ("-1",),
        "rlhf config schema reward_model",
    ),
    Bad(
        "the config of another stage",
        "sft ppo.yaml",
        2,
        "ppo.yaml:1:8: stage",
        ("this is a ppo config; run rlhf ppo ppo.yaml",),
        "a config with stage: sft",
        as_check=False,
    ),
    Bad("a config that is not there", "sft no.yaml", 2, "no.yaml", ("no such file",), "rlhf init"),
    Bad(
        "an unknown tracker",
        "sft sft.yaml log.trackers=[tensorbored]",
        2,
        "log.trackers",
        ("tensorbored",),
        "tensorboard",
    ),
    Bad(
        "a tracker whose package is missing",
        "sft sft.yaml log.trackers=[aim]",
        2,
        "log.trackers",
        ("the package of tracker 'aim' is not installed",),
        "pip install aim",
    ),
    Bad(
        "a model that brings its own code",
        "sft sft.yaml",
        2,
        "trust_remote_code",
        ("base brings Python code of its own",),
        "trust_remote_code: true",
        lambda folder: own_code(folder / "base" / "config.json"),
    ),
    Bad(
        "a stop text of several tokens",
        "ppo ppo.yaml rollout.stop=[ab]",
        2,
        "rollout.stop",
        ("'ab' is 2 tokens",),
        "one token",
    ),
    Bad(
        "ptx without a file",
        "ppo ppo.yaml ptx.coef=1",
        2,
        "ptx",
        ("needs a file of pretraining text",),
        "rlhf config schema ppo",
    ),
    Bad(
        "dropout for a family that has none",
        "sft sft.yaml train.dropout=0.1",
        2,
        "train.dropout",
        ("llama", "no residual dropout"),
        "null",
    ),
    Bad(
        "a chat template that is not there",
        "sft sft.yaml data.chat_template=no.jinja",
        2,
        "data.chat_template: no.jinja",
        ("cannot read the chat template: No such file or directory",),
        "chatml",
    ),
    Bad(
        "a chat template that is broken",
        "sft sft.yaml data.chat_template=t.jinja",
        2,
        "data.chat_template",
        ("the chat template fails",),
        "correct the template",
        holding("t.jinja", "{% for %}"),
    ),
    Bad(
        "messages without a chat template",
        "sft sft.yaml data.train=chat.jsonl",
        2,
        "chat.jsonl:1",
        ("messages", "no chat template"),
        "data.chat_template",
        lines("chat.jsonl", CHAT),
    ),
    Bad(
        "as_messages without a chat template",
        "ppo ppo.yaml data.as_messages=true",
        2,
        "data.chat_template",
        ("data.as_messages needs a chat template",),
        "chatml",
    ),
    Bad(
        "a requirement that is none",
        "sft sft.yaml --require loss",
        2,
        "command line: --require",
        ("not of the form metric>=number",),
        "eval/accuracy>=0.7",
        as_check=False,
    ),
    Bad(
        "resume and overwrite at once",
        "sft sft.yaml --resume --overwrite",
        2,
        "command line",
        ("exclude each other",),
        "keep one",
        as_check=False,
    ),
]

PLACE = [
    Bad(
        "an output folder that is not empty",
        "sft sft.yaml",
        2,
        "output: runs/sft",
        ("not empty",),
        "--overwrite",
        holding("runs/sft/notes.txt", "mine"),
        as_check=False,
    ),
    Bad(
        "an output that is a file",
        "sft sft.yaml output=rm.yaml",
        2,
        "output: rm.yaml",
        ("is a file",),
        "a folder",
    ),
    Bad(
        "an output below a file",
        "sft sft.yaml output=rm.yaml/run",
        2,
        "output: rm.yaml/run",
        ("cannot be written",),
        "may write",
    ),
    Bad(
        "the model as output",
        "sft sft.yaml output=./base/ --overwrite",
        2,
        "override output",
        ("also the model to start from",),
        "rlhf config schema sft",
        as_check=False,
    ),
    Bad(
        "an output inside the model",
        "sft sft.yaml output=base/run",
        2,
        "output: base/run",
        ("lies in the folder of model (base)",),
        "another folder",
    ),
    Bad(
        "an output that holds the model",
        "sft sft.yaml output=. --overwrite",
        2,
        "output: .",
        ("holds the folder of model (base)",),
        "another folder",
        as_check=False,
    ),
    Bad(
        "the reward model as output",
        "ppo ppo.yaml output=reward --overwrite",
        2,
        "output: reward",
        ("is the folder of reward.path (reward)",),
        "another folder",
        as_check=False,
    ),
    Bad(
        "an output that another run is writing",
        "sft sft.yaml",
        2,
        "output: runs/sft",
        ("another run is writing",),
        "wait",
        locked,
    ),
]

DATA = [
    Bad(
        "a data file that is not there",
        "sft sft.yaml data.train=no.jsonl",
        3,
        "no.jsonl",
        ("does not exist",),
        "check the path",
    ),
    Bad(
        "a pattern that no file matches",
        "sft sft.yaml 'data.train=shards/*.jsonl'",
        3,
        "shards/*.jsonl",
        ("no file matches",),
        "check the path",
    ),
    Bad(
        "a folder as data file",
        "sft sft.yaml data.train=base",
        3,
        "base",
        ("a folder, not a data file",),
        "*.jsonl",
    ),
    Bad(
        "an empty data file",
        "sft sft.yaml data.train=empty.jsonl",
        3,
        "empty.jsonl",
        ("holds no record",),
        "at least one record",
        lines("empty.jsonl"),
    ),
    Bad(
        "an empty file of prompts",
        "ppo ppo.yaml data.train=empty.txt",
        3,
        "empty.txt",
        ("holds no record",),
        "at least one record",
        lines("empty.txt"),
    ),
    Bad(
        "a broken line in the middle",
        "sft sft.yaml data.train=broken.jsonl",
        3,
        "broken.jsonl:3",
        ("column", "broken JSON"),
        "repair or delete this line",
        lines("broken.jsonl", GOOD_LINE, GOOD_LINE, '{"prompt": "a", "response"', GOOD_LINE),
    ),
    Bad(
        "a number that is none",
        "train-rm rm.yaml data.train=nan.jsonl",
        3,
        "nan.jsonl:1",
        ("NaN is not a finite number",),
        "finite numbers",
        lines("nan.jsonl", '{"prompt": "a", "responses": [{"text": "b", "score": NaN}]}'),
    ),
    Bad(
        "a field of the wrong kind",
        "sft sft.yaml data.train=wrong.jsonl",
        3,
        "wrong.jsonl:2:response",
        ("must be a string, not a number",),
        "correct this field",
        lines("wrong.jsonl", GOOD_LINE, {"prompt": "ab:", "response": 7}),
    ),
    Bad(
        "columns of no format",
        "sft sft.yaml data.train=odd.jsonl",
        3,
        "odd.jsonl:1",
        ("no known format has the columns question, reply",),
        "data.columns",
        lines("odd.jsonl", {"question": "a", "reply": "b"}),
    ),
    Bad(
        "demonstrations where rankings are needed",
        "train-rm rm.yaml data.train=demonstrations.jsonl",
        3,
        "demonstrations.jsonl:1",
        ("a demonstration", "rankings are needed"),
        "two or more ranked responses",
    ),
    Bad(
        "bytes that are no text",
        "sft sft.yaml data.train=latin.jsonl",
        3,
        "latin.jsonl:1",
        ("not UTF-8",),
        "UTF-8",
        lambda folder: (folder / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "response": "a"}'),
    ),
    Bad(
        "rankings of which none is left, each dropped for its reason",
        "train-rm rm.yaml data.train=useless.jsonl data.max_response_tokens=8",
        3,
        "useless.jsonl",
        (
            "nothing is left to learn from: all 4 records are left out",
            "2 × fewer than two ranked answers (first: useless.jsonl:1)",
            "1 × no strict pair (first: useless.jsonl:2)",
            "1 × answer over max_response_tokens (first: useless.jsonl:3)",
        ),
        "answers of unlike rank; set ranking.ties: half for ties, or rank them; raise "
        "data.max_response_tokens",
        lines(
            "useless.jsonl",
            *rankings(
                [
                    {"prompt": "a", "responses": [("b", 1)]},
                    {"prompt": "b", "responses": [("b", 1), ("c", 1)]},
                    {"prompt": "c", "responses": [("b", 1), (LONG, 2)]},
                    {"prompt": "d", "responses": [("b", 1), ("c", None)]},
                ]
            ),
        ),
    ),
    Bad(
        "more useless records than are allowed",
        "train-rm rm.yaml data.train=half.jsonl data.max_dropped=0.1",
        3,
        "half.jsonl",
        ("1 of 5 records cannot be used", "data.max_dropped = 0.1", "no strict pair"),
        "raise data.max_dropped",
        lines(
            "half.jsonl",
            *rankings([*RANKINGS, {"prompt": "b", "responses": [("b", 1), ("c", 1)]}]),
        ),
    ),
    Bad(
        "demonstrations that are all too long",
        "sft sft.yaml data.train=long.jsonl",
        3,
        "long.jsonl",
        ("all 1 records are left out", "1 × prompt and answer over the model's positions"),
        "data.overlong: truncate",
        lines("long.jsonl", {"prompt": LONG, "response": "b"}),
    ),
    Bad(
        "prompts that leave no room for an answer",
        "ppo ppo.yaml data.train=long.jsonl",
        3,
        "long.jsonl",
        ("1 × prompt and answer over the model's positions",),
        "data.overlong: truncate",
        lines("long.jsonl", {"prompt": LONG}),
    ),
    Bad(
        "a held-out file that is not there",
        "sft sft.yaml data.eval=no.jsonl",
        3,
        "no.jsonl",
        ("does not exist",),
        "check the path",
    ),
    Bad(
        "a ptx file that is not there",
        "ppo ppo.yaml ptx.data=no.jsonl ptx.coef=1",
        3,
        "no.jsonl",
        ("does not exist",),
        "check the path",
    ),
    Bad(
        "a file of demonstrations to normalise on that is not there",
        "train-rm rm.yaml normalise.demonstrations=no.jsonl",
        3,
        "no.jsonl",
        ("does not exist",),
        "check the path",
    ),
]

MODELS = [
    Bad(
        "a model folder that is not there",
        "sft sft.yaml model=./missing",
        4,
        "./missing",
        ("no such folder",),
        "run the stage that makes it first",
    ),
    Bad(
        "a run that has not made its model yet",
        "train-rm rm.yaml model=runs/sft",
        4,
        "runs/sft",
        ("has not made a model yet",),
        "--resume",
        holding("runs/sft/run.json", "{}"),
    ),
    Bad(
        "a model folder without its config",
        "sft sft.yaml",
        4,
        "base/config.json",
        ("is missing",),
        "model folder",
        without("base/config.json"),
    ),
    Bad(
        "a model folder with a broken config",
        "sft sft.yaml",
        4,
        "base/config.json",
        ("cannot be read",),
        "model folder",
        holding("base/config.json", "{"),
    ),
    Bad(
        "a model folder without weights",
        "sft sft.yaml",
        4,
        "base",
        ("holds no weights",),
        "copy the folder anew",
        without("base/model.safetensors"),
    ),
    Bad(
        "a model folder without a tokenizer",
        "sft sft.yaml",
        4,
        "base",
        ("no tokenizer can be loaded (the folder holds no tokenizer file)",),
        "tokenizer.json",
        without_tokenizer,
    ),
    Bad(
        "weights that are cut off",
        "sft sft.yaml",
        4,
        "base",
        ("model.safetensors is damaged or cut off",),
        "copy the folder anew",
        cut_weights,
    ),
    Bad(
        "weights of which one is missing",
        "sft sft.yaml",
        4,
        "base",
        ("1 weights are missing", "model.norm.weight"),
        "copy the folder anew",
        one_weight_less,
        as_check=False,
    ),
    Bad(
        "pickled weights",
        "sft sft.yaml",
        4,
        "base",
        ("pickled weights",),
        "safetensors",
        pickled_weights,
    ),
    Bad(
        "weights that are not finite",
        "sft sft.yaml",
        4,
        "base",
        ("model.norm.weight holds numbers that are not finite",),
        "an earlier checkpoint",
        nan_weights,
        as_check=False,
    ),
    Bad(
        "a policy as reward model",
        "ppo ppo.yaml reward.path=base",
        4,
        "base",
        ("no reward head",),
        "rlhf train-rm",
    ),
    Bad(
        "a reward model as policy",
        "sft sft.yaml model=reward",
        4,
        "reward",
        ("is a reward model, and a policy is needed",),
        "rlhf sft",
    ),
    Bad(
        "a reward model as the policy of ppo",
        "ppo ppo.yaml model=reward",
        4,
        "reward",
        ("is a reward model, and a policy is needed",),
        "rlhf sft",
    ),
    Bad(
        "a reward model as reference",
        "ppo ppo.yaml reference=reward",
        4,
        "reward",
        ("is a reward model, and a policy is needed",),
        "rlhf sft",
    ),
    Bad(
        "a policy as critic",
        "ppo ppo.yaml critic.init=base",
        4,
        "base",
        ("no reward head",),
        "rlhf train-rm",
    ),
    Bad(
        "a reward model as the policy to normalise on",
        "train-rm rm.yaml normalise.on=reference normalise.policy=reward",
        4,
        "reward",
        ("is a reward model, and a policy is needed",),
        "rlhf sft",
    ),
    Bad(
        "a family without a reward head",
        "train-rm rm.yaml model=granite",
        4,
        "granite",
        ("granite", "no sequence classification form"),
        "llama",
        granite,
    ),
    Bad(
        "a reward model of several labels",
        "ppo ppo.yaml",
        4,
        "reward",
        ("has 2 labels",),
        "num_labels 1",
        several_labels,
    ),
    Bad(
        "a critic from a reward model of another vocabulary",
        "ppo ppo.yaml reward.path=other",
        2,
        "critic.init: reward",
        ("no term of the reward is a model with the vocabulary of base",),
        "critic.init: policy",
        other_words("other", "reward"),
    ),
    Bad(
        "a reference of another vocabulary",
        "ppo ppo.yaml reference=other",
        4,
        "other",
        ("its vocabulary is not that of base",),
        "the same base model",
        other_words("other", "policy"),
    ),
    Bad(
        "a critic from a reward model that says it has another vocabulary",
        "ppo ppo.yaml",
        2,
        "critic.init: reward",
        ("no term of the reward is a model with the vocabulary of base",),
        "critic.init: policy",
        identified("reward", "reward"),
    ),
    Bad(
        "another template than the model was made with",
        "train-rm rm.yaml data.chat_template=chatml",
        4,
        "base",
        ("it was made with another chat template than the config asks for",),
        "data.chat_template",
        lambda folder: own_identity(folder / "base"),
    ),
    Bad(
        "a description that cannot be read",
        "sft sft.yaml",
        4,
        "base/rlhf.json",
        ("cannot be read as the description of a model (it lacks as_messages",),
        "run the stage that made this folder again",
        holding("base/rlhf.json", '{"kind": "policy"}'),
    ),
]

SAMPLE = [
    Bad(f"sample: {words}", f"sample base prompts.jsonl --output answers.jsonl {argv}", 2, *rest)
    for words, argv, *rest in (
        ("no answers", "--k 0", "--k", ("0 is out of range",), "1 or more"),
        ("a negative temperature", "--temperature=-1", "--temperature", ("-1.0",), "above 0"),
        ("more than all probability", "--top-p 2", "--top-p", ("2.0",), "at most 1"),
        ("a word for a number", "--k many", "command line", ("'--k'",), "rlhf sample --help"),
        (
            "no room for a prompt",
            "--max-new-tokens 256",
            "--max-new-tokens",
            ("256 leaves no room for a prompt in 256 positions",),
            "less than 256",
        ),
    )
]
SAMPLE += [
    Bad(
        "sample: a policy that is not there",
        "sample ./missing prompts.jsonl --output new/answers.jsonl",
        4,
        "./missing",
        ("no such folder",),
        "run the stage that makes it first",
    ),
    Bad(
        "sample: a reward model",
        "sample reward prompts.jsonl --output answers.jsonl",
        4,
        "reward",
        ("is a reward model",),
        "rlhf sft",
    ),
    Bad(
        "sample: prompts that are not there",
        "sample base no.jsonl --output answers.jsonl",
        3,
        "no.jsonl",
        ("does not exist",),
        "check the path",
    ),
    Bad(
        "sample: an output that exists",
        "sample base prompts.jsonl --output answers.jsonl",
        2,
        "--output answers.jsonl",
        ("not empty",),
        "--resume",
        lines("answers.jsonl", {"prompt": "mine"}),
    ),
    Bad(
        "sample: prompts longer than the positions",
        "sample base long.jsonl --output answers.jsonl",
        3,
        "long.jsonl",
        ("all 1 records are left out", "over the model's positions"),
        "shorten these records",
        lines("long.jsonl", {"prompt": LONG}),
    ),
    Bad(
        "sample: an output that cannot be written",
        "sample base prompts.jsonl --output sft.yaml/answers.jsonl",
        2,
        "--output sft.yaml/answers.jsonl",
        ("cannot be written",),
        "may write",
    ),
    Bad(
        "sample: an object on stdout beside the answers",
        "sample base prompts.jsonl",
        2,
        "command line: --json",
        ("--json needs the answers in a file",),
        "--output FILE",
    ),
]
SAMPLE = [replace(case, as_check=False) for case in SAMPLE]

CASES = [*CONFIG, *PLACE, *DATA, *MODELS, *SAMPLE]


def rewrite(file: Path, old: str, new: str) -> None:
    """Replace a word of a text file."""
    file.write_text(file.read_text().replace(old, new))


def own_code(file: Path) -> None:
    """A config of a type that transformers does not know, with code beside it."""
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    file.write_text(json.dumps({"model_type": "strange", "auto_map": own}))
    (file.parent / "own.py").write_text("raise SystemExit('this code has run')\n")


def own_identity(folder: Path) -> None:
    """A model folder that says, truly, that it was made without a template."""
    from stages.data.templates import make_codec

    codec = make_codec(TOKENIZER, chat_template=None, as_messages=False)
    known = (codec.template_hash, codec.vocabulary_hash, False, codec.stop_ids, 0)
    write_identity(folder, Identity("policy", "sft", *known))
