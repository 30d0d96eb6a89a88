"""The shipped configs, what is written from a config, its schema, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlhf_cli.app import main
from rlhf_cli.config_file import load
from rlhf_cli.yaml_source import read_yaml
from stages.config import STAGES, OnlineConfig, resolve, to_yaml
from stages.config.base import dotted, leaves
from stages.config.presets import PRESETS

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.glob("**/*.yaml"))
REQUIRED = {
    "sft": {"stage", "model", "output", "data.train"},
    "reward_model": {"stage", "model", "output", "data.train"},
    **{
        stage: {"stage", "model", "output", "data.train", "reward.path"}
        for stage in ("ppo", "grpo", "rloo", "reinforce", "online_dpo")
    },
    **{
        stage: {"stage", "model", "output", "data.train"}
        for stage in ("dpo", "odpo", "kto", "orpo", "simpo")
    },
}


def minimal(stage, **more):
    values = {"stage": stage, "model": "m", "output": "o", "data": {"train": "d"}, **more}
    return (
        {**values, "reward": {"path": "r"}} if issubclass(STAGES[stage], OnlineConfig) else values
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads_and_survives_being_written(name, tmp_path):
    loaded = load(str(CONFIGS / name), stage=Path(name).stem)
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(loaded.config), encoding="utf-8")
    again = load(str(written), stage=None)
    assert again.config == loaded.config
    assert to_yaml(again.config) == to_yaml(loaded.config)


@pytest.mark.parametrize("stage", STAGES)
def test_the_shipped_config_of_a_stage_shows_every_key_with_its_default(stage):
    loaded = load(str(CONFIGS / f"{stage}.yaml"), stage=stage)
    assert not [key for key, origin in loaded.origins.items() if origin == "default"]
    defaults = {dotted(path): value for path, value in leaves(resolve(minimal(stage)))}
    shown = {dotted(path): value for path, value in leaves(loaded.config)}
    assert {key for key in defaults if defaults[key] != shown[key]} <= REQUIRED[stage]


@pytest.mark.parametrize(("stage", "preset"), PRESETS)
def test_every_preset_resolves_and_survives_being_written(stage, preset):
    more = {"sft": {"sft": {"pretrain": {"data": "p"}}}, "ppo": {"ptx": {"data": "p"}}}
    values = minimal(stage, preset=preset, **more.get(stage, {}))
    if preset == "walkthrough":
        del values["ptx"]
    config = resolve(values)
    assert resolve(read_yaml(to_yaml(config)).value) == config


TEXT = st.text(min_size=1, max_size=20).filter(
    lambda text: "\0" not in text and text.isprintable() | (text != "o") and _encodes(text)
)


def _encodes(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@settings(deadline=None)
@given(
    text=TEXT,
    names=st.dictionaries(TEXT, TEXT, max_size=3),
    files=st.lists(TEXT, min_size=1, max_size=3),
    rate=st.floats(min_value=0, max_value=1e38, allow_infinity=False, allow_nan=False),
    seed=st.integers(min_value=0, max_value=2**53),
)
def test_any_config_reads_back_as_it_was_written(text, names, files, rate, seed):
    values = minimal("sft", seed=seed, train={"learning_rate": rate})
    values["data"] = {"train": files, "columns": names, "chat_template": text}
    config = resolve(values)
    assert resolve(read_yaml(to_yaml(config)).value) == config


@pytest.mark.parametrize(
    "word",
    ["true", "no", "On", "~", "null", "1e-5", "010", "a b", "", "-", "#", "é", "\u2028", "x:"],
)
def test_text_that_looks_like_something_else_is_quoted(word):
    written = to_yaml(resolve(minimal("sft", log={"trackers": [f"{word}x", word or "y"]})))
    assert resolve(read_yaml(written).value).log.trackers == (f"{word}x", word or "y")


def test_a_margin_of_each_kind_survives_being_written():
    for margin in (0.5, {"per_rank": 0.1}, "data"):
        config = resolve(minimal("reward_model", ranking={"margin": margin}))
        assert resolve(read_yaml(to_yaml(config)).value) == config


def documented(schema):
    """Name and schema of every key in a JSON Schema, its sections included."""
    for section in (schema, *schema.get("$defs", {}).values()):
        yield from section.get("properties", {}).items()


@pytest.mark.parametrize("stage", STAGES)
def test_the_schema_describes_every_key_and_admits_no_other(stage, capsys):
    assert main(["config", "schema", stage]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert not [name for name, key in documented(schema) if not key.get("description")]
    assert all(part.get("additionalProperties") is False for part in schema["$defs"].values())
    assert set(schema["required"]) == {"model", "output", "data"} | (
        {"reward"} if issubclass(STAGES[stage], OnlineConfig) else set()
    )
    assert schema["properties"]["stage"]["const"] == stage


def sections(model):
    for value in (getattr(model, name) for name in type(model).model_fields):
        if isinstance(value, BaseModel):
            yield type(value)
            yield from sections(value)


@pytest.mark.parametrize("stage", STAGES)
def test_every_section_admits_no_other_key_and_no_infinite_number(stage):
    for section in sections(resolve(minimal(stage))):
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"]
        assert not section.model_config["allow_inf_nan"]
        assert section.__doc__


def test_the_schema_answers_to_the_name_of_the_command_too(capsys):
    assert main(["config", "schema", "reward_model"]) == 0
    by_word = capsys.readouterr().out
    assert main(["config", "schema", "train-rm"]) == 0
    assert capsys.readouterr().out == by_word


def test_the_schema_of_an_unknown_stage_is_a_usage_error(capsys):
    assert main(["config", "schema", "reward-model"]) == 2
    assert "did you mean reward_model?" in capsys.readouterr().err


def test_show_prints_a_config_that_loads_with_the_origin_of_each_value(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("stage: sft\nmodel: m\noutput: o\ndata: {train: d}\n")
    assert main(["config", "show", str(file), "seed=3", "preset=instructgpt"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert f"model: m  # {file}:2:8" in lines
    assert "seed: 3  # override" in lines
    assert "  epochs: 16  # preset instructgpt" in lines
    assert "device: auto  # default" in lines
    assert resolve(read_yaml(out).value).train.epochs == 16


def test_show_as_json_is_one_object(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("stage: sft\nmodel: m\noutput: o\ndata: {train: d}\n")
    assert main(["config", "show", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"config", "origins"}
    assert resolve(shown["config"]).model == "m"
    assert shown["origins"]["data.eval"] == "default"


def test_show_of_a_broken_config_exits_2_with_every_place(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("stage: sft\nmodel: m\noutput: o\ndata: {train: d}\ntrain: {learnin_rate: 1}\n")
    assert main(["config", "show", str(file), "seed=x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{file}:5:9: train.learnin_rate: unknown key (did you mean learning_rate?)" in (
        captured.err
    )
    assert 'override seed: expected a whole number, got "x"' in captured.err


def test_the_config_is_importable_without_torch_and_transformers():
    code = (
        "import sys, stages.config, rlhf_cli.config_file;"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'accelerate'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CONFIGS.parent)
