"""``KEY=VALUE`` beside the file, presets under it, and where each value comes from."""

from __future__ import annotations

import pytest

from rlhf_cli.config_file import load
from stages.config import (
    STAGES,
    OnlineConfig,
    PpoConfig,
    RewardModelConfig,
    SftConfig,
    preset_values,
    resolve,
)
from stages.errors import ConfigError

SFT = """\
stage: sft
model: m
output: o
data:
  train: [a.jsonl, b.jsonl]
train:
  epochs: 3
"""
PPO = """\
stage: ppo
model: m
output: o
data: {train: p.txt}
reward: {path: r}
"""


@pytest.fixture
def sft(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(SFT)
    return str(file)


@pytest.fixture
def ppo(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text(PPO)
    return str(file)


def test_a_tilde_is_the_home_folder_in_every_place_of_a_model_or_run(ppo, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = ("model", "output", "reference", "reward.path", "critic.init")
    config = load(ppo, [f"{key}=~/{key}" for key in keys], stage="ppo").config
    found = (config.model, config.output, config.reference, config.reward.path, config.critic.init)
    assert found == tuple(f"{tmp_path}/{key}" for key in keys)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.learning_rate=1e-5", lambda c: c.train.learning_rate, 1e-5),
        ("train.epochs=1e1", lambda c: c.train.epochs, 10),
        ("train.ema_decay=null", lambda c: c.train.ema_decay, None),
        ("train.ema_decay=", lambda c: c.train.ema_decay, None),
        ("model=org/name", lambda c: c.model, "org/name"),
        ("model=a=b", lambda c: c.model, "a=b"),
        ("model='5'", lambda c: c.model, "5"),
        ("output=2024-01-01", lambda c: c.output, "2024-01-01"),
        ("data.train=data/*.jsonl", lambda c: c.data.train, "data/*.jsonl"),
        ("data.train=[x, y]", lambda c: c.data.train, ("x", "y")),
        ("data.train.1=x", lambda c: c.data.train, ("a.jsonl", "x")),
        ("data.train=hub:org/name:config@split", lambda c: c.data.train[:4], "hub:"),
        ("data.columns={question: prompt}", lambda c: c.data.columns, {"question": "prompt"}),
        ("data.columns.question=prompt", lambda c: c.data.columns, {"question": "prompt"}),
        ("sft.pretrain.share=0.2", lambda c: c.sft.pretrain.share, 0.2),
        ("train={batch_size: 4}", lambda c: (c.train.batch_size, c.train.epochs), (4, 2)),
        ("log.trackers=[tensorboard]", lambda c: c.log.trackers, ("tensorboard",)),
        ("data.as_messages=true", lambda c: c.data.as_messages, True),
    ],
)
def test_an_override_wins_over_the_file_and_is_read_as_yaml(override, read, value, sft):
    assert read(load(sft, [override], stage="sft").config) == value


def test_of_two_overrides_the_last_wins(sft):
    assert load(sft, ["seed=1", "seed=2"], stage="sft").config.seed == 2


@pytest.mark.parametrize(
    ("override", "where", "part"),
    [
        ("train.learnin_rate=1", "override train.learnin_rate", "did you mean learning_rate?"),
        ("learning_rate=1", "override learning_rate", "did you mean train.learning_rate?"),
        ("nothing.like.it=1", "override nothing.like.it: nothing", "unknown key"),
        ("train.epochs=two", "override train.epochs", 'expected a whole number, got "two"'),
        ("train.epochs='2'", "override train.epochs", "without quotes"),
        ("train.epochs.deep=2", "override train.epochs.deep", "epochs holds a value"),
        ("train={epoch: 2}", "override train: train.epoch", "did you mean epochs?"),
        ("data.train=*.jsonl", "override data.train", "in quotes"),
        ("data.train=[a", "override data.train", "not valid YAML"),
        ("data.train.2=x", "override data.train.2", "the list has 2 items"),
        ("data.train.x=x", "override data.train.x", "the list has 2 items"),
        ("train", "override train", "expected KEY=VALUE"),
        ("=3", "override =3", "expected KEY=VALUE"),
        ("train..epochs=3", "override train..epochs=3", "expected KEY=VALUE"),
        ("stage=sfft", "override stage", "did you mean sft?"),
        ("output=m", "override output", "model to start from"),
        ("train={epochs: 1, epochs: 2}", "override train", "given twice"),
    ],
)
def test_a_wrong_override_is_named(override, where, part, sft):
    with pytest.raises(ConfigError) as caught:
        load(sft, [override], stage="sft")
    assert caught.value.where == where
    assert part in caught.value.what


def test_a_missing_key_in_a_section_that_an_override_opened_points_at_the_override(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text(PPO[: PPO.index("reward")])
    with pytest.raises(ConfigError) as caught:
        load(str(file), ["reward.type=model"], stage="ppo")
    assert caught.value.where == "override reward.type: reward.path"


def test_every_value_knows_where_it_comes_from(sft):
    loaded = load(sft, ["seed=7", "preset=instructgpt"], stage="sft")
    assert loaded.origins["train.epochs"] == f"{sft}:7:11"
    assert loaded.origins["data.train"] == f"{sft}:5:10"
    assert loaded.origins["seed"] == "override"
    assert loaded.origins["train.learning_rate"] == "preset instructgpt"
    assert loaded.origins["train.dropout"] == "preset instructgpt"
    assert loaded.origins["train.weight_decay"] == "default"
    assert loaded.config.train.epochs == 3
    assert loaded.config.train.learning_rate == 9.65e-6


def base(stage, **more):
    values = {"stage": stage, "model": "m", "output": "o", "data": {"train": "d"}, **more}
    return (
        {**values, "reward": {"path": "r"}} if issubclass(STAGES[stage], OnlineConfig) else values
    )


def test_preset_instructgpt_of_sft_holds_the_numbers_of_appendix_c_1():
    config = resolve(base("sft", preset="instructgpt"))
    train = config.train
    assert (train.epochs, train.batch_size, train.learning_rate) == (16, 32, 9.65e-6)
    assert (train.schedule, train.min_learning_rate_ratio, train.warmup_steps) == ("cosine", 0.1, 0)
    assert (train.dropout, train.adam_betas) == (0.2, (0.9, 0.95))
    assert (config.data.max_prompt_tokens, config.data.max_response_tokens) == (1024, 1024)


def test_preset_instructgpt_ppo_init_holds_the_numbers_of_appendix_c_3():
    pretrain = {"pretrain": {"data": "p.txt"}}
    config = resolve(base("sft", preset="instructgpt-ppo-init", sft=pretrain))
    train = config.train
    assert (train.epochs, train.batch_size, train.learning_rate) == (2, 32, 5e-6)
    assert (train.schedule, train.min_learning_rate_ratio) == ("cosine", 0.1)
    assert (config.sft.pretrain.share, config.sft.pretrain.data) == (0.1, "p.txt")


def test_preset_instructgpt_of_the_reward_model_holds_the_numbers_of_appendix_c_2():
    train = resolve(base("reward_model", preset="instructgpt")).train
    assert (train.epochs, train.batch_size, train.learning_rate) == (1, 64, 9e-6)
    assert (train.schedule, train.min_learning_rate_ratio) == ("cosine", 0.1)


def test_preset_instructgpt_of_ppo_holds_the_numbers_of_appendix_c_4():
    config = resolve(base("ppo", preset="instructgpt", ptx={"data": "p.txt"}))
    train = config.train
    assert (config.kl.coef, config.kl.controller, config.score.clip) == (0.02, "fixed", None)
    assert (config.ppo.gamma, config.ppo.lam, config.ppo.clip_range) == (1.0, 0.95, 0.2)
    assert (config.rollout.batch_size, train.batch_size, config.ppo.epochs) == (512, 64, 1)
    assert (train.schedule, train.warmup_steps, train.ema_decay) == ("constant", 80, 0.992)
    assert (config.ptx.coef, config.ptx.ratio, config.rollout.temperature) == (27.8, 8, 1.0)
    assert (config.critic.init, config.critic.learning_rate) == ("reward", 9e-6)
    assert config.score.missing_eos.subtract is None
    assert config.score.position == "last"


def test_preset_walkthrough_holds_the_constants_of_its_code():
    config = resolve(base("ppo", preset="walkthrough"))
    assert (config.kl.coef, config.score.clip, config.score.position) == (0.1, 5.0, "after_last")
    assert (config.ppo.whiten_advantages, config.ppo.whiten_rewards) == (False, False)
    assert (config.rollout.batch_size, config.train.batch_size, config.ppo.epochs) == (4, 4, 1)
    assert (config.train.schedule, config.ptx.coef) == ("constant", 0.0)


def test_a_key_beside_the_preset_wins_and_its_neighbours_stay(ppo):
    config = load(ppo, ["preset=instructgpt", "ptx.coef=0", "kl.coef=0.1"], stage="ppo").config
    assert (config.ptx.coef, config.ptx.ratio, config.kl.coef) == (0.0, 8, 0.1)
    assert config.train.ema_decay == 0.992


def test_a_preset_s_pretraining_can_be_switched_off():
    sft = {"pretrain": {"share": 0.0}}
    assert resolve(base("sft", preset="instructgpt-ppo-init", sft=sft)).sft.pretrain.data is None


def test_preset_values_are_a_copy_and_empty_without_a_preset():
    preset_values("sft", "instructgpt")["train"]["dropout"] = 0.9
    assert preset_values("sft", "instructgpt")["train"]["dropout"] == 0.2
    assert preset_values("sft", None) == {}
    assert preset_values("ppo", "instructgpt-ppo-init") == {}


@pytest.mark.parametrize(
    ("stage", "kind", "epochs", "batch_size", "evaluate", "checkpoint", "log"),
    [
        ("sft", SftConfig, 2, 32, None, 500, 10),
        ("reward_model", RewardModelConfig, 1, 64, None, 500, 10),
        ("ppo", PpoConfig, None, 64, 10, 10, 1),
    ],
)
def test_defaults_that_differ_by_stage(stage, kind, epochs, batch_size, evaluate, checkpoint, log):
    config = resolve(base(stage))
    assert type(config) is kind
    assert getattr(config.train, "epochs", None) == epochs
    assert config.train.batch_size == batch_size
    assert config.evaluate.every == evaluate
    assert config.checkpoint.every == checkpoint
    assert config.log.every == log
    assert hasattr(config.data, "max_response_tokens") is (stage != "ppo")


def test_null_evaluates_ppo_every_ten_iterations():
    assert resolve(base("ppo", evaluate={"every": None})).evaluate.every == 10


def test_a_config_does_not_change_after_it_was_read():
    config = resolve(base("sft"))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValueError, match="frozen"):
        config.train.epochs = 3


def test_the_papers_of_the_methods_without_a_critic():
    grpo = resolve(base("grpo", preset="paper"))
    assert (grpo.grpo.group_size, grpo.grpo.beta, grpo.grpo.epochs) == (64, 0.04, 1)
    assert (grpo.rollout.batch_size, grpo.train.batch_size) == (1024, 1024)
    rloo, plain = (resolve(base(stage, preset="paper")) for stage in ("rloo", "reinforce"))
    assert (rloo.rloo.group_size, rloo.kl.coef, plain.kl.coef) == (4, 0.03, 0.03)
    assert plain.reinforce.baseline == "moving_average"
    assert {c.train.learning_rate for c in (grpo, rloo, plain)} == {1e-6}
    online = resolve(base("online_dpo", preset="paper"))
    assert (online.online_dpo.beta, online.train.learning_rate) == (0.1, 5e-7)
