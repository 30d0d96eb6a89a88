"""More of what a user can get wrong: adapters, configs, files, folders, resumes, data commands.

As in ``tests/cli/bad_input.py``, each case spoils a project of tiny models in one place.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlhf_cli.app import main
from stages.models import manifest
from tests.cli.bad_input import (
    GOOD_LINE,
    Bad,
    Spoil,
    both,
    holding,
    lines,
    one_label_to_many,
    other_words,
    own_identity,
    rewrite,
    without,
)
from tests.stages.project import DEMONSTRATIONS

SFT, RM, PPO = "sft sft.yaml", "train-rm rm.yaml", "ppo ppo.yaml"


def written(name: str, data: bytes) -> Spoil:
    """A file of these bytes."""
    return lambda folder: (folder / name).write_bytes(data)


def in_json(name: str, **values: Any) -> Spoil:
    """Other values in a JSON file."""

    def spoil(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**found, **values}))

    return spoil


def weights(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Other weights in a model folder."""

    def spoil(folder: Path) -> None:
        file = folder / name / "model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return spoil


def linked(name: str, target: str) -> Spoil:
    """A symbolic link."""

    def spoil(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def flipped(name: str) -> Spoil:
    """The last byte of a file is another one."""

    def spoil(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return spoil


def with_manifest(folder: Path) -> None:
    manifest.write(folder / "base")


def finished(folder: Path) -> None:
    """A run of sft is there, done at step 3."""
    assert main([*SFT.split(), "--quiet"]) == 0


CONFIG = [
    Bad(
        "adapters on a layer that is none",
        f"{SFT} lora.targets=[nope]",
        2,
        "lora.targets",
        ("'nope' is no linear layer inside a llama model",),
        "q_proj",
    ),
    Bad(
        "adapters of rank 0",
        f"{SFT} lora.rank=0",
        2,
        "override lora.rank",
        ("must be at least 1, got 0",),
        "rlhf config schema sft",
    ),
    Bad(
        "adapters of a higher rank than the matrices they adapt",
        f"{SFT} lora.rank=100000",
        2,
        "lora.rank",
        ("100000 is above 8, the smaller side of model.layers.0.self_attn.k_proj (8 x 16)",),
        "set lora.rank to 8 or less, or leave that layer out of lora.targets",
    ),
    Bad(
        "adapters of a higher rank than the matrices of the critic",
        f"{PPO} lora.rank=17",
        2,
        "lora.rank",
        ("17 is above",),
        "or less",
    ),
    Bad(
        "adapters without a layer",
        f"{RM} lora.targets=[]",
        2,
        "override lora.targets",
        ("a list of at least 1 values, got 0",),
        "rlhf config schema reward_model",
    ),
    Bad(
        "adapters with a scale of 0",
        f"{SFT} lora.alpha=0",
        2,
        "override lora.alpha",
        ("must be above 0, got 0",),
        "rlhf config schema sft",
    ),
    Bad(
        "dropout in the adapters of ppo",
        f"{PPO} lora.dropout=0.1",
        2,
        "lora.dropout",
        ("must be 0 in ppo, got 0.1",),
        "rlhf config schema ppo",
    ),
    Bad(
        "a mistyped key of the adapters",
        f"{SFT} lora.rang=4",
        2,
        "override lora.rang",
        ("unknown key", "did you mean rank?"),
        "rlhf config schema sft",
    ),
    Bad(
        "a learning rate that fp32 does not hold",
        f"{SFT} train.learning_rate=1e39",
        2,
        "override train.learning_rate",
        ("must be at most 3.4e+38 in fp32, got 1e+39",),
        "rlhf config schema sft",
    ),
    Bad(
        "a learning rate of the critic that fp32 does not hold",
        f"{PPO} critic.learning_rate=1e300",
        2,
        "override critic.learning_rate",
        ("must be at most 3.4e+38 in fp32",),
        "rlhf config schema ppo",
    ),
    Bad(
        "a weight that is not a number",
        f"{PPO} kl.coef=.nan",
        2,
        "override kl.coef",
        ("finite number, got .nan",),
        "rlhf config schema ppo",
    ),
    Bad(
        "an infinite temperature",
        f"{PPO} rollout.temperature=.inf",
        2,
        "override rollout.temperature",
        ("finite number, got .inf",),
        "rlhf config schema ppo",
    ),
    Bad(
        "a temperature of 0",
        f"{PPO} rollout.temperature=0",
        2,
        "override rollout.temperature",
        ("must be above 0, got 0",),
        "rlhf config schema ppo",
    ),
    Bad(
        "an adaptive coefficient that starts at 0",
        f"{PPO} kl.controller=adaptive kl.coef=0",
        2,
        "kl.coef",
        ("must start above 0",),
        "rlhf config schema ppo",
    ),
    Bad(
        "a KL to aim at that is negative",
        f"{PPO} kl.target=-1",
        2,
        "override kl.target",
        ("must be above 0, got -1",),
        "rlhf config schema ppo",
    ),
    Bad(
        "two rules for answers that are cut off",
        f"{PPO} score.missing_eos.subtract=1 score.missing_eos.replace=0",
        2,
        "score.missing_eos",
        ("at most one of the two",),
        "rlhf config schema ppo",
    ),
    Bad(
        "a ptx file that would never be read",
        f"{PPO} ptx.data=documents.jsonl",
        2,
        "ptx",
        ("would never be read",),
        "rlhf config schema ppo",
    ),
    Bad(
        "half of a pair of numbers",
        f"{SFT} train.adam_betas=[0.9]",
        2,
        "override train.adam_betas",
        ("needs more than 1",),
        "rlhf config schema sft",
    ),
    Bad(
        "an override without a value",
        f"{SFT} train.batch_size",
        2,
        "override train.batch_size",
        ("expected KEY=VALUE",),
        "rlhf config schema sft",
    ),
    Bad(
        "an override that is no YAML",
        f"{SFT} model=[",
        2,
        "override model",
        ("not valid YAML", "in quotes"),
        "rlhf config schema sft",
    ),
    Bad(
        "an override below a value",
        f"{SFT} model.path=x",
        2,
        "override model.path",
        ("model holds a value",),
        "rlhf config schema sft",
    ),
    Bad(
        "a key given twice",
        SFT,
        2,
        "sft.yaml:",
        ("seed: given twice",),
        "correct the file",
        lambda folder: rewrite(folder / "sft.yaml", "stage: sft", "stage: sft\nseed: 1\nseed: 2"),
    ),
    Bad(
        "a config that is a list",
        SFT,
        2,
        "sft.yaml:1:1",
        ("not a mapping of keys",),
        "begin it with stage:",
        holding("sft.yaml", "- sft\n"),
    ),
    Bad(
        "an empty config",
        SFT,
        2,
        "sft.yaml:1:1",
        ("the file is empty",),
        "begin it with stage:",
        holding("sft.yaml", ""),
    ),
    Bad(
        "a config that is indented with tabs",
        SFT,
        2,
        "sft.yaml:2:1",
        ("not valid YAML",),
        "correct the file",
        holding("sft.yaml", "data:\n\ttrain: d.jsonl\n"),
    ),
    Bad(
        "a config in another encoding",
        SFT,
        2,
        "sft.yaml:1:8",
        ("byte 0xe9 is not UTF-8",),
        "save the file as UTF-8",
        written("sft.yaml", b"model: \xe9\n"),
    ),
    Bad(
        "a config nested without end",
        SFT,
        2,
        "sft.yaml:1:35",
        ("nested too deeply",),
        "correct the file",
        holding("sft.yaml", "a: " + "[" * 2_000),
    ),
    Bad("a folder as config", "sft base", 2, "base", ("is a folder",), "name the YAML file in it"),
    Bad(
        "a stage that there is not",
        "check sft.yaml stage=sfd",
        2,
        "stage",
        ('got "sfd"', "did you mean sft?"),
        "rlhf config schema STAGE",
        as_check=False,
    ),
    Bad(
        "no process at all",
        f"{SFT} --num-processes 0",
        2,
        "command line: --num-processes",
        ("cannot start 0 processes",),
        "give 1 or more",
        as_check=False,
    ),
    Bad(
        "several processes that read one standard input",
        "sft - --num-processes 2",
        2,
        "command line: --num-processes",
        ("cannot read one standard input",),
        "put the config into a file",
        as_check=False,
    ),
    Bad(
        "a requirement of a metric that there is not",
        f"{SFT} --require evl/loss<=1".replace("<", "'<'"),
        2,
        "command line: --require",
        ("evl/loss is not a metric",),
        "write eval/loss",
        as_check=False,
    ),
    Bad(
        "the schema of a stage that there is not",
        "config schema reward",
        2,
        "command line: STAGE",
        ("no stage is called reward", "did you mean reward_model?"),
        "name one of sft, reward_model, ppo",
        as_check=False,
    ),
    Bad(
        "a project where there is one",
        "init .",
        2,
        "README.md",
        ("exists already",),
        "name a new folder",
        holding("README.md", "mine"),
        as_check=False,
    ),
    Bad(
        "a dump onto the data",
        "check sft.yaml --dump ./demonstrations.jsonl",
        2,
        "--dump ./demonstrations.jsonl",
        ("is one of the data files",),
        "another file",
        as_check=False,
    ),
]

DEEP = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "response": "a"}'
DATA = [
    Bad(
        "a record nested without end",
        f"{SFT} data.train=deep.jsonl",
        3,
        "deep.jsonl:2",
        ("too deeply nested",),
        "flatten this record",
        lines("deep.jsonl", GOOD_LINE, DEEP),
    ),
    Bad(
        "a line of half a megabyte",
        f"{SFT} data.train=huge.jsonl",
        3,
        "huge.jsonl",
        ("all 1 records are left out",),
        "data.overlong: truncate",
        lines("huge.jsonl", {"prompt": "a" * 500_000, "response": "b"}),
    ),
    Bad(
        "an infinite score",
        f"{RM} data.train=inf.jsonl",
        3,
        "inf.jsonl:1",
        ("-Infinity is not a finite number",),
        "finite numbers",
        lines("inf.jsonl", '{"prompt": "a", "responses": [{"text": "b", "score": -Infinity}]}'),
    ),
    Bad(
        "a score beyond all numbers",
        f"{RM} data.train=large.jsonl",
        3,
        "large.jsonl:1",
        ("1e999 is not a finite number",),
        "finite numbers",
        lines("large.jsonl", '{"prompt": "a", "responses": [{"text": "b", "score": 1e999}]}'),
    ),
    Bad(
        "a number of five thousand digits",
        f"{RM} data.train=digits.jsonl",
        3,
        "digits.jsonl:1",
        ("digits",),
        "finite numbers",
        lines("digits.jsonl", '{"prompt": "a", "responses": [{"score": ' + "9" * 5000 + "}]}"),
    ),
    Bad(
        "half of a character",
        f"{SFT} data.train=half.jsonl",
        3,
        "half.jsonl:1:response",
        ("half of a surrogate pair",),
        "correct this field",
        lines("half.jsonl", '{"prompt": "a", "response": "\\ud800"}'),
    ),
    Bad(
        "a file in UTF-16",
        f"{SFT} data.train=wide.jsonl",
        3,
        "wide.jsonl:1",
        ("not UTF-8",),
        "save the file as UTF-8",
        written("wide.jsonl", json.dumps(GOOD_LINE).encode("utf-16")),
    ),
    Bad(
        "bytes that are no text within an array",
        f"{SFT} data.train=latin.json",
        3,
        "latin.json:2",
        ("byte 0xe9 is not UTF-8",),
        "save the file as UTF-8",
        written("latin.json", b'[{"prompt": "a", "response": "b"},\n{"prompt": "\xe9"}]'),
    ),
    Bad(
        "an array that does not end",
        f"{SFT} data.train=open.json",
        3,
        "open.json:",
        ("missing",),
        "repair the JSON of this file",
        written("open.json", b'[{"prompt": "a", "response": "b"}'),
    ),
    Bad(
        "an array with text behind it",
        f"{SFT} data.train=more.json",
        3,
        "more.json:",
        ("text follows the closing bracket",),
        "repair the JSON of this file",
        written("more.json", b'[{"prompt": "a", "response": "b"}] x'),
    ),
    Bad(
        "two records on a line",
        f"{SFT} data.train=two.jsonl",
        3,
        "two.jsonl:1",
        ("more text follows the object",),
        "one JSON object per line",
        lines("two.jsonl", f"{json.dumps(GOOD_LINE)} {json.dumps(GOOD_LINE)}"),
    ),
    Bad(
        "a record spread over lines",
        f"{SFT} data.train=spread.jsonl",
        3,
        "spread.jsonl:1",
        ("broken JSON",),
        "each record on one line",
        lines("spread.jsonl", "{", '"prompt": "a"', "}"),
    ),
    Bad(
        "a record that is a number",
        f"{SFT} data.train=number.jsonl",
        3,
        "number.jsonl:2",
        ("a record must be an object, not int",),
        "one JSON object per line",
        lines("number.jsonl", GOOD_LINE, "7"),
    ),
    Bad(
        "a damaged compressed file",
        f"{SFT} data.train=cut.jsonl.gz",
        3,
        "cut.jsonl.gz",
        ("the compressed file is damaged",),
        "compress it again",
        written("cut.jsonl.gz", gzip.compress(json.dumps(GOOD_LINE).encode() * 99)[:-20]),
    ),
    Bad(
        "a Parquet file that is none",
        f"{SFT} data.train=text.parquet",
        3,
        "text.parquet",
        ("not a readable Parquet file",),
        "write the file again",
        written("text.parquet", b"PAR1 and nothing else"),
    ),
    Bad(
        "a Parquet file under another name",
        f"{SFT} data.train=table.jsonl",
        3,
        "table.jsonl",
        ("this is a Parquet file",),
        "the ending .parquet",
        written("table.jsonl", b"PAR1xxxx"),
    ),
    Bad(
        "a table with a cell too many",
        f"{SFT} data.train=cells.csv",
        3,
        "cells.csv:3",
        ("3 cells where the header has 2",),
        "quote cells",
        written("cells.csv", b"prompt,response\na,b\nc,d,e\n"),
    ),
    Bad(
        "a table with an open quote",
        f"{SFT} data.train=quote.csv",
        3,
        "quote.csv:",
        ("broken CSV",),
        "repair this line",
        written("quote.csv", b'prompt,response\na,"b\n'),
    ),
    Bad(
        "a renamed column that there is not",
        f"{SFT} 'data.columns={{question: prompt}}'",
        3,
        "demonstrations.jsonl:1",
        ("there is no column 'question'", "prompt, response"),
        "{theirs: ours}",
    ),
    Bad(
        "a format that there is not",
        f"{SFT} data.format=alpacca",
        2,
        "override data.format",
        ('got "alpacca"', "did you mean alpaca?"),
        "rlhf config schema sft",
    ),
    Bad(
        "labels of single steps",
        f"{RM} data.train=steps.jsonl",
        3,
        "steps.jsonl:1",
        ("labels of single steps",),
        "rank whole answers",
        lines("steps.jsonl", {"prompt": "a", "completions": ["b"], "labels": [True]}),
    ),
    Bad(
        "true or false labels of single answers",
        f"{RM} data.train=labels.jsonl",
        3,
        "labels.jsonl:1",
        ("an answer with a label, true or false", "where rankings are needed"),
        "labelled answers train kto",
        lines("labels.jsonl", {"prompt": "a", "completion": "b", "label": True}),
    ),
    Bad(
        "a data set of the hub while it may not be asked",
        f"{SFT} data.train=hub:nobody/nothing",
        3,
        "hub:nobody/nothing",
        ("cannot load the data set",),
        "check name, configuration, split and network",
    ),
    Bad(
        "held-out prompts of another kind",
        f"{RM} data.eval=demonstrations.jsonl",
        3,
        "demonstrations.jsonl:1",
        ("a demonstration", "rankings are needed"),
        "two or more ranked responses",
    ),
]

MODELS = [
    Bad(
        "a pickle under the name of safetensors",
        SFT,
        4,
        "base",
        ("model.safetensors is damaged or cut off",),
        "copy the folder anew",
        written("base/model.safetensors", pickle.dumps({"weight": [1.0]})),
    ),
    Bad(
        "safetensors with a header that lies",
        SFT,
        4,
        "base",
        ("model.safetensors is damaged or cut off",),
        "copy the folder anew",
        written("base/model.safetensors", (2**40).to_bytes(8, "little") + b"{}"),
    ),
    Bad(
        "an empty file of weights",
        SFT,
        4,
        "base",
        ("model.safetensors is damaged or cut off",),
        "copy the folder anew",
        written("base/model.safetensors", b""),
    ),
    Bad(
        "an index that names a part that is not there",
        SFT,
        4,
        "base",
        ("lacks a part of its weights, part-2.safetensors",),
        "copy the folder anew",
        both(
            without("base/model.safetensors"),
            holding(
                "base/model.safetensors.index.json",
                '{"metadata": {}, "weight_map": {"lm_head.weight": "part-2.safetensors"}}',
            ),
        ),
    ),
    Bad(
        "an index that cannot be read",
        SFT,
        4,
        "base",
        ("model.safetensors.index.json cannot be read",),
        "copy the folder anew",
        holding("base/model.safetensors.index.json", "[1]"),
    ),
    Bad(
        "weights of another shape",
        SFT,
        4,
        "base",
        ("1 of another shape (model.norm.weight)",),
        "copy the folder anew",
        weights("base", lambda w: w.update({"model.norm.weight": torch.ones(3)})),
        as_check=False,
    ),
    Bad(
        "infinite weights of a reward model",
        PPO,
        4,
        "reward",
        ("score.weight holds numbers that are not finite",),
        "an earlier checkpoint",
        weights("reward", lambda w: w["score.weight"].fill_(float("inf"))),
        as_check=False,
    ),
    Bad(
        "weights that have changed since they were written",
        SFT,
        4,
        "base/model.safetensors",
        ("is not what was written: its hash is another",),
        "delete manifest.json",
        both(with_manifest, flipped("base/model.safetensors")),
    ),
    Bad(
        "a manifest that cannot be read",
        SFT,
        4,
        "base/manifest.json",
        ("cannot be read",),
        "copy the folder anew",
        holding("base/manifest.json", "{"),
    ),
    Bad(
        "a config of a model that is a list",
        SFT,
        4,
        "base/config.json",
        ("is not a JSON object",),
        "model folder",
        holding("base/config.json", "[]"),
    ),
    Bad(
        "a model of a type that there is not",
        SFT,
        4,
        "base",
        ("no model can be read from it",),
        "name a run folder",
        in_json("base/config.json", model_type="lama"),
    ),
    Bad(
        "a model that reads and does not write",
        SFT,
        4,
        "base",
        ("models of type vit are no causal language models",),
        "llama",
        holding("base/config.json", '{"model_type": "vit"}'),
    ),
    Bad(
        "a broken tokenizer",
        SFT,
        4,
        "base",
        ("no tokenizer can be loaded",),
        "tokenizer.json",
        holding("base/tokenizer.json", "{"),
    ),
    Bad(
        "a description of a later version",
        SFT,
        4,
        "base/rlhf.json",
        ("was written in layout 99",),
        "a newer version",
        both(lambda folder: own_identity(folder / "base"), in_json("base/rlhf.json", version=99)),
    ),
    Bad(
        "a description that is a list",
        SFT,
        4,
        "base/rlhf.json",
        ("cannot be read as the description of a model",),
        "run the stage that made this folder again",
        holding("base/rlhf.json", "[]"),
    ),
    Bad(
        "scores without a scale",
        PPO,
        4,
        "reward",
        ("std must be positive",),
        "config.json",
        one_label_to_many,
        as_check=False,
    ),
    Bad(
        "a critic of another vocabulary",
        f"{PPO} critic.init=other",
        4,
        "other",
        ("its vocabulary is not that of base",),
        "the same base model",
        other_words("other", "reward"),
    ),
    Bad(
        "a file as model",
        f"{SFT} model=rm.yaml",
        4,
        "rm.yaml",
        ("is a file, not a model folder",),
        "model folder",
    ),
    Bad(
        "a model of the hub while it may not be asked",
        f"{SFT} model=nobody/nothing",
        4,
        "nobody/nothing",
        ("HF_HUB_OFFLINE is set",),
        "unset HF_HUB_OFFLINE",
    ),
    Bad(
        "a broken template beside the tokenizer",
        f"{SFT} data.train=chat.jsonl",
        2,
        "data.chat_template",
        ("the chat template fails",),
        "correct the template",
        both(
            holding("base/chat_template.jinja", "{{ messages["),
            lines("chat.jsonl", {"messages": [{"role": "user", "content": "a"}]}),
        ),
    ),
]

PLACE = [
    Bad(
        "an output behind a link that leads nowhere",
        f"{SFT} output=gone/run",
        2,
        "output: gone/run",
        ("cannot be written",),
        "may write",
        linked("gone", "/nowhere/at/all"),
    ),
    Bad(
        "a folder that is no run and holds what a run would write over",
        f"{SFT} --overwrite",
        2,
        "output: runs/sft",
        ("metrics.jsonl in it would be written over", "no run of rlhf"),
        "another folder",
        holding("runs/sft/metrics.jsonl", "mine"),
        as_check=False,
    ),
    Bad(
        "a run whose folder of checkpoints is a link",
        f"{SFT} --overwrite",
        2,
        "output: runs/sft",
        ("checkpoints in it is a link",),
        "put the folder or file itself there",
        both(holding("runs/sft/run.json", "{}"), linked("runs/sft/checkpoints", "../..")),
        as_check=False,
    ),
    Bad(
        "the reference as output",
        f"{PPO} reference=other output=other --overwrite",
        2,
        "output: other",
        ("is the folder of reference (other)",),
        "another folder",
        other_words("other", "policy"),
        as_check=False,
    ),
]

STEP_3 = "runs/sft/checkpoints/step-000003"
RESUME = [
    Bad(
        "a resume with another model",
        f"{SFT} --resume model=./base",
        4,
        "runs/sft: model",
        ('was "base"', 'is "./base" now'),
        "--overwrite",
        finished,
    ),
    Bad(
        "a resume with another seed",
        f"{SFT} --resume seed=1 train.max_steps=5",
        4,
        "runs/sft: seed",
        ("was 0", "is 1 now"),
        "set seed back",
        finished,
    ),
    Bad(
        "a resume with adapters",
        f"{SFT} --resume lora.rank=2 train.max_steps=5",
        4,
        "runs/sft: lora",
        ("was null",),
        "--overwrite",
        finished,
    ),
    Bad(
        "a resume on other data",
        f"{SFT} --resume train.max_steps=5",
        4,
        "demonstrations.jsonl",
        ("this data file has changed",),
        "put the earlier data back",
        both(finished, lines("demonstrations.jsonl", *DEMONSTRATIONS[1:])),
    ),
    Bad(
        "a resume from other weights",
        f"{SFT} --resume train.max_steps=5",
        4,
        "base",
        ("the weights of the model have changed",),
        "put the earlier weights back",
        both(finished, weights("base", lambda w: w["model.norm.weight"].mul_(2))),
    ),
    Bad(
        "a resume of a run that cannot be read",
        f"{SFT} --resume",
        4,
        "runs/sft/run.json",
        ("cannot be read",),
        "--overwrite",
        both(finished, holding("runs/sft/run.json", "{")),
    ),
    *(
        Bad(
            f"a resume from a checkpoint {how}",
            f"{SFT} --resume train.max_steps=5",
            4,
            f"step-000003{where}",
            what,
            "delete this checkpoint folder",
            both(finished, spoil),
        )
        for how, where, what, spoil in (
            (
                "whose state has changed",
                "/state.json",
                ("is not what was written",),
                flipped(f"{STEP_3}/state.json"),
            ),
            (
                "whose manifest is broken",
                "/manifest.json",
                ("cannot be read",),
                holding(f"{STEP_3}/manifest.json", "{"),
            ),
            (
                "with foreign weights in it",
                "/critic.safetensors",
                ("is no part of this checkpoint",),
                holding(f"{STEP_3}/critic.safetensors", ""),
            ),
            (
                "that lacks its manifest",
                "/manifest.json",
                ("cannot be read",),
                without(f"{STEP_3}/manifest.json"),
            ),
        )
    ),
    Bad(
        "a resume without the checkpoints of a finished run",
        f"{SFT} --resume train.max_steps=5",
        4,
        "checkpoints",
        ("no checkpoint left to go on from",),
        "another folder",
        both(finished, without("runs/sft/checkpoints")),
    ),
    Bad(
        "a resume without its data",
        f"{SFT} --resume train.max_steps=5",
        3,
        "demonstrations.jsonl",
        ("does not exist",),
        "check the path",
        both(finished, without("demonstrations.jsonl")),
    ),
    Bad(
        "a resume without its model",
        f"{SFT} --resume train.max_steps=5",
        4,
        "base",
        ("no such folder",),
        "mend the path",
        both(finished, without("base")),
    ),
    Bad(
        "a resume from a checkpoint that has changed",
        f"{SFT} --resume train.max_steps=5",
        4,
        "step-000003/model.safetensors",
        ("is not what was written",),
        "delete this checkpoint folder",
        both(finished, flipped("runs/sft/checkpoints/step-000003/model.safetensors")),
    ),
    Bad(
        "a resume from a checkpoint that lacks a file",
        f"{SFT} --resume train.max_steps=5",
        4,
        "step-000003/optimizer_model.safetensors",
        ("is missing or truncated",),
        "delete this checkpoint folder",
        both(finished, without("runs/sft/checkpoints/step-000003/optimizer_model.safetensors")),
    ),
    Bad(
        "a resume of a finished run without a checkpoint",
        f"{SFT} --resume train.max_steps=5",
        4,
        "runs/sft/checkpoints",
        ("has no checkpoint left",),
        "--overwrite",
        both(finished, without("runs/sft/checkpoints/step-000003/COMPLETE")),
    ),
    Bad(
        "a resume of another stage's run",
        f"{RM} --resume output=runs/sft",
        4,
        "runs/sft",
        ('was "sft"', 'is "reward_model" now'),
        "--overwrite",
        finished,
    ),
]
RESUME = [replace(case, as_check=False) for case in RESUME]

INSPECT, CONVERT = "data inspect", "data convert"
TOOLS = [
    Bad(
        "inspect: a file that is not there",
        f"{INSPECT} no.jsonl",
        3,
        "no.jsonl",
        ("does not exist",),
        "check the path",
    ),
    Bad(
        "inspect: a folder",
        f"{INSPECT} base",
        3,
        "base",
        ("a folder, not a data file",),
        "*.jsonl",
    ),
    Bad(
        "inspect: an empty file",
        f"{INSPECT} empty.jsonl",
        3,
        "empty.jsonl",
        ("holds no record",),
        "at least one record",
        lines("empty.jsonl"),
    ),
    Bad(
        "inspect: columns of no format",
        f"{INSPECT} odd.jsonl",
        3,
        "odd.jsonl:1",
        ("no known format has the columns question, reply",),
        "question: prompt",
        lines("odd.jsonl", {"question": "a", "reply": "b"}),
    ),
    Bad(
        "inspect: a broken line",
        f"{INSPECT} broken.jsonl",
        3,
        "broken.jsonl:2",
        ("broken JSON",),
        "repair or delete this line",
        lines("broken.jsonl", GOOD_LINE, "{'prompt'}"),
    ),
    Bad(
        "inspect: a renaming that names nothing",
        f"{INSPECT} demonstrations.jsonl --column prompt",
        2,
        "command line: --column",
        ("'prompt' renames nothing",),
        "question=prompt",
    ),
    Bad(
        "inspect: a template without a tokenizer",
        f"{INSPECT} demonstrations.jsonl --chat-template chatml",
        2,
        "command line: --chat-template",
        ("needs a tokenizer",),
        "add --model",
    ),
    Bad(
        "inspect: a tokenizer that is not there",
        f"{INSPECT} demonstrations.jsonl --model ./missing",
        4,
        "./missing",
        ("no such folder",),
        "run the stage that makes it first",
    ),
    Bad(
        "convert: a form that there is not",
        f"{CONVERT} demonstrations.jsonl --to alpaca --output out.jsonl",
        2,
        "command line: --to",
        ("no form is called 'alpaca'",),
        "name one of canonical",
    ),
    Bad(
        "convert: no form at all",
        f"{CONVERT} demonstrations.jsonl --output out.jsonl",
        2,
        "command line",
        ("missing option", "--to"),
        "see rlhf data convert --help",
    ),
    Bad(
        "convert: onto the file that is read",
        f"{CONVERT} demonstrations.jsonl --to trl --output ./demonstrations.jsonl --force",
        2,
        "--output",
        ("is a file that is read",),
        "another name",
    ),
    Bad(
        "convert: onto a file that is there",
        f"{CONVERT} demonstrations.jsonl --to trl --output prompts.jsonl",
        2,
        "--output prompts.jsonl",
        ("is there already",),
        "--force",
    ),
    Bad(
        "convert: into a folder that is not there",
        f"{CONVERT} demonstrations.jsonl --to trl --output no/out.jsonl",
        2,
        "--output no/out.jsonl",
        ("cannot be written",),
        "a folder that exists",
    ),
    Bad(
        "convert: a broken record, of which no file is left",
        f"{CONVERT} broken.jsonl --to trl --output out.jsonl",
        3,
        "broken.jsonl:2:response",
        ("must be a string, not a number",),
        "correct this field",
        lines("broken.jsonl", GOOD_LINE, {"prompt": "a", "response": 5}),
    ),
    Bad(
        "convert: several files at once",
        f"{CONVERT} '*.jsonl' --to trl --output out.jsonl",
        2,
        "FILE *.jsonl",
        ("names 4 files",),
        "one after the other",
    ),
    Bad(
        "convert: an object beside the lines",
        f"{CONVERT} demonstrations.jsonl --to trl --output -",
        2,
        "command line: --json",
        ("--json needs the lines in a file",),
        "--output FILE",
    ),
    Bad(
        "sample: prompts of the wrong type",
        "sample base wrong.jsonl --output answers.jsonl",
        3,
        "wrong.jsonl:2:prompt",
        ("must be a list, not a number",),
        "correct this field",
        lines("wrong.jsonl", {"prompt": "a"}, {"prompt": 5}),
    ),
    Bad(
        "sample: a limit of no prompt",
        "sample base prompts.jsonl --output answers.jsonl --limit 0",
        2,
        "--limit",
        ("0 is out of range",),
        "give 1 or more",
    ),
]
TOOLS = [replace(case, as_check=False) for case in TOOLS]

PLACES = [*CONFIG, *DATA, *MODELS, *PLACE, *RESUME, *TOOLS]
