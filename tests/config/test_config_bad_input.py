"""Every mistake in a config file is named with its place, its value and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_cli.config_file import load
from stages.errors import ConfigError

SFT = "stage: sft\nmodel: m\noutput: o\ndata:\n  train: d.jsonl\n"
REWARD = SFT.replace("sft", "reward_model")
PPO = SFT.replace("sft", "ppo") + "reward:\n  path: r\n"

# config, place as line:column, key, parts of the message
CASES = {
    # unknown keys: at the key
    "mistyped key in a section": (
        SFT + "train:\n  learnin_rate: 1e-5\n",
        "7:3",
        "train.learnin_rate",
        ["unknown key", "did you mean learning_rate?"],
    ),
    "mistyped key at the top": (SFT + "trian: {}\n", "6:1", "trian", ["did you mean train?"]),
    "key outside of its section": (
        SFT + "learning_rate: 1e-5\n",
        "6:1",
        "learning_rate",
        ["did you mean train.learning_rate?"],
    ),
    "top key inside a section": (
        SFT + "train: {seed: 1}\n",
        "6:9",
        "train.seed",
        ["did you mean seed outside of any section?"],
    ),
    "key unlike any other": (
        SFT + "log: {colour: red}\n",
        "6:7",
        "log.colour",
        ["unknown key", "known here: every, samples, trackers"],
    ),
    "key of another stage": (SFT + "rollout: {}\n", "6:1", "rollout", ["unknown key"]),
    "answer limit in ppo": (
        PPO + "train: {max_response_tokens: 9}\n",
        "8:9",
        "train.max_response_tokens",
        ["unknown key"],
    ),
    "answer limit among ppo's data": (
        PPO.replace("d.jsonl\n", "d.jsonl\n  max_response_tokens: 9\n"),
        "6:3",
        "data.max_response_tokens",
        ["unknown key"],
    ),
    "epochs in ppo's train": (
        PPO + "train: {epochs: 2}\n",
        "8:9",
        "train.epochs",
        ["one of sft, reward_model, ", " configs only; did you mean ppo.epochs?"],
    ),
    "dropout in ppo": (
        PPO + "train: {dropout: 0}\n",
        "8:9",
        "train.dropout",
        ["unknown key (one of sft configs only)"],
    ),
    "a key of another section that is like one of this": (
        PPO + "kl: {target_kl: 6.0}\n",
        "8:6",
        "kl.target_kl",
        ["did you mean target?"],
    ),
    "key three levels down": (
        SFT + "sft:\n  pretrain:\n    shares: 0.1\n",
        "8:5",
        "sft.pretrain.shares",
        ["did you mean share?"],
    ),
    "key in a margin": (
        REWARD + "ranking:\n  margin:\n    per_rnk: 1\n",
        "8:5",
        "ranking.margin.per_rnk",
        ["did you mean per_rank?"],
    ),
    "number as a key": (SFT + "1: 2\n", "6:1", "1", ["unknown key"]),
    "mistyped required key": (
        SFT.replace("model", "modle"),
        "2:1",
        "modle",
        ["unknown key", "did you mean model?"],
    ),
    "adapters of no rank": (SFT + "lora: {rank: 0}\n", "6:14", "lora.rank", ["at least 1, got 0"]),
    "adapters by a word": (SFT + "lora: true\n", "6:7", "lora", ["a section of keys", "got true"]),
    "adapted layers by another word": (
        SFT + "lora: {targets: linear}\n",
        "6:17",
        "lora.targets",
        ["expected all-linear", "linear"],
    ),
    "no adapted layers": (SFT + "lora: {targets: []}\n", "6:17", "lora.targets", ["list"]),
    "adapted layers by a number": (
        SFT + "lora: {targets: 3}\n",
        "6:17",
        "lora.targets",
        ["[q_proj, v_proj]", "got 3"],
    ),
    "dropout of adapters in ppo": (
        PPO + "lora: {dropout: 0.1}\n",
        "8:17",
        "lora.dropout",
        ["must be 0 in ppo, got 0.1"],
    ),
    # missing keys: at the section
    "no model": (SFT.replace("model: m\n", ""), "1:1", "model", ["missing key", "start from"]),
    "no output": (SFT.replace("output: o\n", ""), "1:1", "output", ["missing key", "run folder"]),
    "no data": (SFT[: SFT.index("data:")], "1:1", "data", ["missing key"]),
    "no training data": (
        SFT.replace("  train: d.jsonl", "  eval: 0.1"),
        "4:1",
        "data.train",
        ["missing key"],
    ),
    "no reward": (PPO[: PPO.index("reward:")], "1:1", "reward", ["missing key", "scores"]),
    "no reward path": (
        PPO.replace("  path: r", "  type: model"),
        "6:1",
        "reward.path",
        ["missing key", "reward model"],
    ),
    "no stage": (SFT.replace("stage: sft\n", ""), "1:1", "stage", ["missing key", "reward_model"]),
    # the stage word
    "unknown stage": (SFT.replace("sft", "sfft"), "1:8", "stage", ['"sfft"', "did you mean sft?"]),
    "stage is a number": (SFT.replace("sft", "3"), "1:8", "stage", ["sft, reward_model, ppo", "3"]),
    "stage is a list": (SFT.replace("sft", "[sft]"), "1:8", "stage", ["got a list"]),
    "stage left empty": (SFT.replace(" sft", ""), "1:1", "stage", ["got null"]),
    # wrong kinds: at the value
    "truth value for a number": (
        SFT + "train: {learning_rate: true}\n",
        "6:24",
        "train.learning_rate",
        ["expected a number", "got true"],
    ),
    "truth value for a whole number": (
        SFT + "seed: false\n",
        "6:7",
        "seed",
        ["expected a whole number", "got false"],
    ),
    "quoted number": (
        SFT + 'train: {learning_rate: "1e-5"}\n',
        "6:24",
        "train.learning_rate",
        ['got "1e-5"', "without quotes"],
    ),
    "thousands with a comma": (
        SFT + "train: {max_steps: '1,000'}\n",
        "6:20",
        "train.max_steps",
        ['got "1,000"', "commas"],
    ),
    "word for a number": (
        SFT + "train: {epochs: two}\n",
        "6:17",
        "train.epochs",
        ["expected a whole number", 'got "two"'],
    ),
    "fraction for a whole number": (
        SFT + "train: {batch_size: 1.5}\n",
        "6:21",
        "train.batch_size",
        ["expected a whole number", "got 1.5"],
    ),
    "null for a number": (
        SFT + "train:\n  batch_size: null\n",
        "7:15",
        "train.batch_size",
        ["expected a whole number", "got null"],
    ),
    "value left out": (
        SFT + "train:\n  batch_size:\n  epochs: 3\n",
        "7:3",
        "train.batch_size",
        ["got null"],
    ),
    "number for text": (
        SFT.replace("model: m", "model: 123"),
        "2:8",
        "model",
        ["expected text", "got 123", '"123"'],
    ),
    "list for text": (SFT.replace("model: m", "model: [a]"), "2:8", "model", ["got a list"]),
    "empty text": (SFT.replace("output: o", "output: ''"), "3:9", "output", ["empty"]),
    "NUL in a path": (SFT.replace("output: o", 'output: "a\\0b"'), "3:9", "output", ["NUL"]),
    "half a character": (
        SFT.replace("output: o", 'output: "\\ud800"'),
        "3:9",
        "output",
        ["whole characters", '"\\ud800"'],
    ),
    "on for a truth value": (
        SFT + "trust_remote_code: on\n",
        "6:20",
        "trust_remote_code",
        ["true or false", 'got "on"', "write true"],
    ),
    "number for a truth value": (
        SFT + "trust_remote_code: 1\n",
        "6:20",
        "trust_remote_code",
        ["true or false", "got 1"],
    ),
    "number for a section": (SFT + "train: 3\n", "6:8", "train", ["section of keys", "got 3"]),
    "empty section": (SFT + "train:\n", "6:1", "train", ["section of keys", "got null"]),
    "list for a section": (SFT + "log: [every]\n", "6:6", "log", ["section", "got a list"]),
    "number as data": (
        SFT.replace("d.jsonl", "5"),
        "5:10",
        "data.train",
        ["a path", "hub:org/name", "got 5"],
    ),
    "no file among data": (SFT.replace("d.jsonl", "[]"), "5:10", "data.train", ["empty list"]),
    "number in a list of files": (
        SFT.replace("d.jsonl", "[a, 5]"),
        "5:14",
        "data.train.1",
        ["expected text", "got 5"],
    ),
    "truth value for held-out data": (
        SFT + "  eval: true\n",
        "6:9",
        "data.eval",
        ["share", "path", "got true"],
    ),
    "columns that are a list": (
        SFT + "  columns: [prompt]\n",
        "6:12",
        "data.columns",
        ["names", "got a list"],
    ),
    "column renamed to a number": (
        SFT + "  columns: {q: 3}\n",
        "6:16",
        "data.columns.q",
        ["expected text", "got 3"],
    ),
    "text for a list": (
        SFT + "log: {trackers: wandb}\n",
        "6:17",
        "log.trackers",
        ["expected a list", '"wandb"'],
    ),
    "margin of a wrong kind": (
        REWARD + "ranking: {margin: [1]}\n",
        "6:19",
        "ranking.margin",
        ["a number", "{per_rank: x}", "data", "got a list"],
    ),
    "margin of a wrong word": (
        REWARD + "ranking: {margin: score}\n",
        "6:19",
        "ranking.margin",
        ["expected data", '"score"'],
    ),
    "margin per rank that is text": (
        REWARD + "ranking: {margin: {per_rank: big}}\n",
        "6:30",
        "ranking.margin.per_rank",
        ["expected a number", '"big"'],
    ),
    "one beta": (
        SFT + "train: {adam_betas: [0.9]}\n",
        "6:21",
        "train.adam_betas",
        ["more than 1"],
    ),
    "three betas": (
        SFT + "train: {adam_betas: [0.9, 0.9, 0.9]}\n",
        "6:21",
        "train.adam_betas",
        ["list of 2", "got 3"],
    ),
    # out of range: at the value
    "negative learning rate": (
        SFT + "train: {learning_rate: -1e-5}\n",
        "6:24",
        "train.learning_rate",
        ["at least 0", "got -1e-05"],
    ),
    "infinite learning rate": (
        SFT + "train: {learning_rate: .inf}\n",
        "6:24",
        "train.learning_rate",
        ["finite", "got .inf"],
    ),
    "overflowing number": (
        SFT + "train: {learning_rate: 1e999}\n",
        "6:24",
        "train.learning_rate",
        ["finite", ".inf"],
    ),
    "not a number": (SFT + "train: {adam_eps: .nan}\n", "6:19", "train.adam_eps", ["finite"]),
    "infinite whole number": (SFT + "seed: .inf\n", "6:7", "seed", ["whole number", ".inf"]),
    "enormous whole number": (SFT + "seed: 1e300\n", "6:7", "seed", ["at most"]),
    "negative seed": (SFT + "seed: -1\n", "6:7", "seed", ["at least 0", "got -1"]),
    "no epochs": (SFT + "train: {epochs: 0}\n", "6:17", "train.epochs", ["at least 1", "got 0"]),
    "no batch": (SFT + "train: {batch_size: 0}\n", "6:21", "train.batch_size", ["at least 1"]),
    "EMA that never moves": (
        SFT + "train: {ema_decay: 1.0}\n",
        "6:20",
        "train.ema_decay",
        ["below 1", "got 1.0"],
    ),
    "beta of one": (
        SFT + "train: {adam_betas: [0.9, 1]}\n",
        "6:27",
        "train.adam_betas.1",
        ["below 1"],
    ),
    "gradient norm of zero": (
        SFT + "train: {max_grad_norm: 0}\n",
        "6:24",
        "train.max_grad_norm",
        ["above 0"],
    ),
    "negative warm-up": (
        SFT + "train: {warmup_steps: -1}\n",
        "6:23",
        "train.warmup_steps",
        ["at least 0"],
    ),
    "dropout of one": (SFT + "train: {dropout: 1}\n", "6:18", "train.dropout", ["below 1"]),
    "everything held out": (SFT + "  eval: 1.0\n", "6:9", "data.eval", ["below 1", "got 1.0"]),
    "more than all dropped": (
        SFT + "  max_dropped: 1.5\n",
        "6:16",
        "data.max_dropped",
        ["at most 1"],
    ),
    "limit of zero": (SFT + "  limit: 0\n", "6:10", "data.limit", ["at least 1"]),
    "only pretraining": (
        SFT + "sft: {pretrain: {share: 1}}\n",
        "6:25",
        "sft.pretrain.share",
        ["below 1"],
    ),
    "one sample for a deviation": (
        REWARD + "normalise: {samples: 1}\n",
        "6:22",
        "normalise.samples",
        ["at least 2"],
    ),
    "temperature of zero": (
        PPO + "rollout: {temperature: 0}\n",
        "8:24",
        "rollout.temperature",
        ["above 0"],
    ),
    "top-p of zero": (PPO + "rollout: {top_p: 0}\n", "8:18", "rollout.top_p", ["above 0"]),
    "top-p above one": (PPO + "rollout: {top_p: 1.1}\n", "8:18", "rollout.top_p", ["at most 1"]),
    "negative KL weight": (PPO + "kl: {coef: -0.1}\n", "8:12", "kl.coef", ["at least 0"]),
    "KL target of zero": (PPO + "kl: {target: 0}\n", "8:14", "kl.target", ["above 0"]),
    "KL horizon of zero": (PPO + "kl: {horizon: 0}\n", "8:15", "kl.horizon", ["at least 1"]),
    "KL gain of zero": (PPO + "kl: {gain: 0}\n", "8:12", "kl.gain", ["above 0"]),
    "clip range of zero": (PPO + "ppo: {clip_range: 0}\n", "8:19", "ppo.clip_range", ["above 0"]),
    "discount above one": (PPO + "ppo: {gamma: 1.01}\n", "8:14", "ppo.gamma", ["at most 1"]),
    "negative penalty": (
        PPO + "score: {missing_eos: {subtract: -1}}\n",
        "8:33",
        "score.missing_eos.subtract",
        ["at least 0", "got -1"],
    ),
    # wrong words: at the value
    "mistyped word": (
        SFT + "train: {schedule: cosin}\n",
        "6:19",
        "train.schedule",
        ["constant, linear or cosine", '"cosin"', "did you mean cosine?"],
    ),
    "unknown device": (SFT + "device: gpu\n", "6:9", "device", ["cuda", '"gpu"']),
    "unknown format": (
        SFT + "  format: alpacca\n",
        "6:11",
        "data.format",
        ["did you mean alpaca?"],
    ),
    "unknown preset": (SFT + "preset: walkthrough\n", "6:9", "preset", ["instructgpt"]),
    "preset that is a list": (SFT + "preset: [a]\n", "6:9", "preset", ["got a list"]),
    "unknown reward": (
        PPO.replace("path: r", "path: r\n  type: pyton"),
        "8:9",
        "reward.type",
        ["expected model, python, http or rule", '"pyton"', "did you mean python?"],
    ),
    "half of a surrogate pair": (
        PPO.replace("path: r", 'path: r\n  type: "\\ud800"'),
        "8:9",
        "reward.type",
        ["expected model, python, http or rule", "\\ud800"],
    ),
    "ties as a truth value": (
        REWARD + "ranking: {ties: false}\n",
        "6:17",
        "ranking.ties",
        ["drop"],
    ),
    # keys that exclude or need each other
    "two rules for a missing end": (
        PPO + "score:\n  missing_eos:\n    subtract: 1\n    replace: -1\n",
        "11:14",
        "score.missing_eos.replace",
        ["at most one"],
    ),
    "ptx weight without data": (
        PPO + "ptx:\n  coef: 27.8\n",
        "8:1",
        "ptx.data",
        ["27.8", "file of pretraining text"],
    ),
    "ptx data without weight": (
        PPO + "ptx:\n  data: p.txt\n  coef: 0\n",
        "10:9",
        "ptx.coef",
        ["p.txt", "never be read"],
    ),
    "adaptive KL from zero": (
        PPO + "kl: {coef: 0, controller: adaptive}\n",
        "8:12",
        "kl.coef",
        ["above 0"],
    ),
    "preset without its ptx file": (
        PPO + "preset: instructgpt\n",
        "1:1",
        "ptx.data",
        ["27.8", "file of pretraining text"],
    ),
    "preset without its pretraining file": (
        SFT + "preset: instructgpt-ppo-init\n",
        "1:1",
        "sft.pretrain.data",
        ["instructgpt-ppo-init", "name a file"],
    ),
    "output over the model": (
        SFT.replace("output: o", "output: ./m/"),
        "3:9",
        "output",
        ["model to start from"],
    ),
}


def failure(text: str, folder: Path, *overrides: str, stage: str | None = None) -> ConfigError:
    file = folder / "c.yaml"
    file.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load(str(file), list(overrides), stage=stage)
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_place_and_what_would_be_right(name, tmp_path):
    text, place, key, parts = CASES[name]
    error = failure(text, tmp_path)
    assert error.where == f"{tmp_path}/c.yaml:{place}: {key}"
    assert "\n" not in error.what
    for part in parts:
        assert part in error.what
    assert error.exit_code == 2
    assert error.do


@pytest.mark.parametrize("name", CASES)
def test_no_message_speaks_the_language_of_the_validator(name, tmp_path):
    message = str(failure(CASES[name][0], tmp_path))
    for jargon in ("Input should", "pydantic", "validation error", "Extra inputs", "<number>"):
        assert jargon not in message


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    text = (
        "stage: sft\nmodel: 3\ndata:\n  train: d\n  evl: 0.1\n"
        "train:\n  epochs: -1\n  schedule: cosin\nlog: 5\n"
    )
    error = failure(text, tmp_path, "train.sede=1", "kl", stage="sft")
    places = [line.removeprefix(f"{tmp_path}/").split(": ")[0] for line in str(error).split("\n")]
    assert places == [
        "c.yaml:1:1",
        "c.yaml:2:8",
        "c.yaml:5:3",
        "c.yaml:7:11",
        "c.yaml:8:13",
        "c.yaml:9:6",
        "override kl",
        "override train.sede",
    ]


def test_without_a_stage_the_rest_is_checked_as_the_command_reads_it(tmp_path):
    error = failure("model: m\noutput: o\ndata: {train: d}\nsed: 1\n", tmp_path, stage="sft")
    assert "1:1: stage: missing key" in str(error)
    assert "4:1: sed: unknown key (did you mean seed?)" in str(error)


@pytest.mark.parametrize(
    ("text", "stage", "sentence"),
    [
        (PPO, "sft", "this is a ppo config; run rlhf ppo "),
        (REWARD, "ppo", "this is a reward_model config; run rlhf train-rm "),
        (SFT, "reward_model", "this is an sft config; run rlhf sft "),
        (PPO + "nonsense: 3\n", "sft", "this is a ppo config; run rlhf ppo "),
    ],
)
def test_another_stage_s_config_is_one_sentence(text, stage, sentence, tmp_path):
    error = failure(text, tmp_path, stage=stage)
    assert error.what == f"{sentence}{tmp_path}/c.yaml"
    assert error.where == f"{tmp_path}/c.yaml:1:8: stage"


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("", "1:1", "empty"),
        ("# nothing\n", "1:1", "empty"),
        ("~\n", "1:1", "empty"),
        ("- stage: sft\n", "1:1", "not a mapping"),
        ("just text\n", "1:1", "not a mapping"),
        ("stage: sft\nmodel: m\nstage: ppo\n", "3:1", "given twice, first in line 1"),
        ("train:\n  epochs: 1\n  epochs: 2\n", "3:3", "epochs: given twice, first in line 2"),
        ("stage: sft\ntrain:\n\tepochs: 1\n", "3:1", "not valid YAML"),
        ("a: [1, 2\nb: 3\n", "2:2", "not valid YAML"),
        ("a: b: c\n", "1:5", "not valid YAML"),
        ("a: 'x\n", "2:1", "not valid YAML"),
        ("a: *nowhere\n", "1:4", "undefined alias"),
        ("a: 1\n---\nb: 2\n", "2:1", "another document"),
        ("a: 1\nb: \x01\n", "2:4", "control character"),
        ("a: !!python/object:os.system x\n", "1:4", "tag"),
        ("a: !mine [1]\n", "1:4", "tag"),
        ("a: {<<: {b: 1}}\n", "1:5", "<<: merge keys are not taken"),
        ("a: &x [*x]\n", "1:4", "contains itself"),
        ("? [1, 2]\n: 3\n", "1:3", "not a word"),
        ("a: " + "[" * 5000 + "\n", "1:35", "nested too deeply"),
    ],
)
def test_text_that_is_no_config_is_refused_with_its_place(text, place, part, tmp_path):
    error = failure(text, tmp_path)
    assert error.where == f"{tmp_path}/c.yaml:{place}"
    assert part in error.what


def test_aliases_that_ask_for_billions_of_values_are_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert "10,000 values" in failure("\n".join(lines), tmp_path).what


def test_undecodable_bytes_are_refused_with_their_place(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes("stage: sft\nmodel: ü".encode() + b"\xff\n")
    with pytest.raises(ConfigError, match="byte 0xff is not UTF-8") as caught:
        load(str(file), stage=None)
    assert caught.value.where == f"{file}:2:9"


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file") as caught:
        load(str(tmp_path / "none.yaml"), stage="sft")
    assert caught.value.where == str(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load(str(tmp_path), stage="sft")
    with pytest.raises(ConfigError, match="cannot be read"):
        load("a\0b.yaml", stage="sft")


def test_values_in_messages_are_shortened_and_cannot_control_the_terminal(tmp_path):
    error = failure(SFT + 'device: "\\e[31m' + "x" * 500 + '"\n', tmp_path)
    assert "\x1b" not in str(error)
    assert len(error.what) < 200
