"""Values mean what YAML 1.2 says, and numbers are taken as people write them."""

from __future__ import annotations

import io
import math
import time

import pytest

from rlhf_cli.config_file import load
from rlhf_cli.yaml_source import Mark, Place, read_yaml
from stages.errors import ConfigError

SFT = "stage: sft\nmodel: m\noutput: o\ndata: {train: d.jsonl}\n"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1E+2", 100.0),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", 1000),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("no", "no"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("2020-01-01T10:00:00Z", "2020-01-01T10:00:00Z"),
        ("1e", "1e"),
        ("<<", "<<"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'5'", "5"),
        ('"true"', "true"),
        ("!!str 5", "5"),
        ("!!int x", "x"),
        ("[0.9, [a]]", [0.9, ["a"]]),
        (r'"\ud83d\ude00 \u2028"', "\U0001f600 \u2028"),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("hub:org/name:config@split", "hub:org/name:config@split"),
    ],
)
def test_a_scalar_is_what_yaml_1_2_says(written, value):
    read = read_yaml(f"a: {written}\n").value["a"]
    assert read == value
    assert type(read) is type(value)


def test_the_rules_of_yaml_1_1_stay_off_even_where_a_file_asks_for_them():
    read = read_yaml("%YAML 1.1\n---\na: on\nb: 12:30\nc: 1e-5\nd: 010\n").value
    assert read["a"] == "on"
    assert read["b"] == "12:30"
    assert read["d"] in (10, "010")


def test_every_key_value_and_item_has_its_place():
    places = read_yaml("a:\n  b: [1, {c: 2}]\n").places
    assert places == {
        ("a",): Place(Mark(1, 1), Mark(2, 3)),
        ("a", "b"): Place(Mark(2, 3), Mark(2, 6)),
        ("a", "b", 0): Place(Mark(2, 7), Mark(2, 7)),
        ("a", "b", 1): Place(Mark(2, 10), Mark(2, 10)),
        ("a", "b", 1, "c"): Place(Mark(2, 11), Mark(2, 14)),
    }


def test_an_alias_repeats_its_values():
    assert read_yaml("a: &x {b: 1}\nc: *x\n").value == {"a": {"b": 1}, "c": {"b": 1}}


def test_numbers_are_taken_as_people_write_them(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(SFT + "train: {learning_rate: 1e-5, max_steps: 1e2, weight_decay: 0}\n")
    train = load(str(file), stage="sft").config.train
    assert train.learning_rate == 0.00001
    assert train.max_steps == 100
    assert type(train.max_steps) is int
    assert train.weight_decay == 0.0
    assert type(train.weight_decay) is float


def test_a_learning_rate_of_zero_is_allowed(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(SFT + "train: {learning_rate: 0}\n")
    assert load(str(file), stage="sft").config.train.learning_rate == 0


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbf" + SFT.encode(), SFT.replace("\n", "\r\n").encode()]
)
def test_a_byte_order_mark_and_crlf_are_accepted(data, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes(data)
    assert load(str(file), stage="sft").config.output == "o"


def test_lines_are_counted_the_same_with_crlf(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_bytes((SFT + "sed: 1\n").replace("\n", "\r\n").encode())
    with pytest.raises(ConfigError) as caught:
        load(str(file), stage="sft")
    assert caught.value.where == f"{file}:5:1: sed"


def test_a_dash_reads_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BytesIO((SFT + "sed: 1\n").encode())

    monkeypatch.setattr("sys.stdin", Stdin)
    with pytest.raises(ConfigError) as caught:
        load("-", stage="sft")
    assert caught.value.where == "stdin:5:1: sed"


def test_no_variable_of_the_environment_is_put_in(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "elsewhere")
    file = tmp_path / "c.yaml"
    file.write_text(SFT.replace("output: o", "output: $HOME/o"))
    assert load(str(file), stage="sft").config.output == "$HOME/o"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (SFT + "x: " + "[" * 100_000, "5:35", "nested too deeply"),
        (SFT + "x: " + "{a: " * 100_000, "5:125", "nested too deeply"),
        (SFT + "x:\n" + "".join(" " * n + "a:\n" for n in range(1, 800)), "36:32", "nested too"),
        (SFT + "x:\n" + "- 1\n" * 200_000, "", "more than 10,000 values"),
        (SFT + "".join(f"k{n}: 1\n" for n in range(90_000)), "", "more than 10,000 values"),
        (SFT + "# " + "x" * 1_000_000, "", "more than 1,000,000 bytes"),
        (SFT + "# comment\n" * 1_000_000, "", "more than 1,000,000 bytes"),
    ],
)
def test_what_is_far_too_large_for_a_config_is_refused_before_it_costs_time(
    text, where, what, tmp_path
):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError, match=what) as caught:
        load(str(path), stage="sft")
    assert time.process_time() - started < 5, "10 MB would take minutes"
    assert caught.value.exit_code == 2
    assert where in caught.value.where


def test_a_config_that_never_ends_is_not_read_to_its_end():
    with pytest.raises(ConfigError, match="more than 1,000,000 bytes"):
        load("/dev/zero", stage="sft")


def test_an_override_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(SFT)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(str(path), ["data.columns=" + "[" * 5000], stage="sft")
