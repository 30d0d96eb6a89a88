"""The pages tell the truth: names, links, keys, options and command lines in them exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer

from rlhf_cli import config_file, gates
from rlhf_cli.app import app
from stages.config import STAGES, CriticlessConfig, OnlineConfig, PreferenceConfig, resolve
from stages.config.base import Section
from stages.config.presets import PRESETS
from stages.data.formats import convert
from stages.data.records import Demonstration, Prompt, Ranking, Row
from stages.functional.policy_gradient import PolicyDiagnostics
from stages.minibatch import per_token
from stages.runtime import resume, run_dir
from tests.test_layers import LAYERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FILE = r"\.(py|yaml|json|jsonl|md|sh|txt|safetensors|lock|gz)$"
GROUPS = gates.GROUPS
METRIC = re.compile(rf"({'|'.join(GROUPS)})/[a-z0-9_]+(<[A-Z]+>)?|score/<[A-Z]+>[a-z_]*")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(name), flags=re.DOTALL | re.MULTILINE)


def inline(name: str) -> list[str]:
    """The inline code of a page, its fenced blocks taken out."""
    prose = re.sub(r"^```.*?^```", "", read(name), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def first_cells(text: str) -> list[str]:
    """The code in the first column of the tables in a text."""
    cells = re.findall(r"^\| (`[^|]*`) \|", text, flags=re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def part(name: str, heading: str) -> str:
    """The text of a page from a heading to the next one of its level."""
    text = read(name)
    start = text.index(f"\n{heading}\n")
    level = heading.split()[0]
    end = text.find(f"\n{level} ", start + 1)
    return text[start:] if end < 0 else text[start:end]


# Links and files.


@pytest.mark.parametrize("name", NAMES)
def test_every_relative_link_leads_to_a_file(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", read(name)):
        if not target.startswith("http"):
            assert (ROOT / name).parent.joinpath(target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_every_named_file_of_the_project_exists(name: str) -> None:
    for code in inline(name):
        if re.match(r"(stages|rlhf_cli|tests|configs|docs)/", code) and "NAME" not in code:
            assert (ROOT / code.partition("::")[0]).exists(), code


@pytest.mark.parametrize("name", NAMES)
def test_every_make_target_exists(name: str) -> None:
    targets = re.findall(r"^([a-z]+):", read("Makefile"), flags=re.MULTILINE)
    code = [*inline(name), *"\n".join(blocks(name, "sh")).splitlines()]
    for target in (word for line in code for word in re.findall(r"^make ([a-z]+)", line)):
        assert target in targets


# Commands.


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line names, and its arguments."""
    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands"):
        assert words[0] in found.commands, f"no command {words[0]}"
        found, words = found.commands[words[0]], words[1:]
    return found, words


def rlhf_lines(name: str) -> Iterator[list[str]]:
    """The arguments of every shell line that starts with ``rlhf``."""
    for block in blocks(name, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for piece in line.split("&&"):
                words = shlex.split(piece.partition(" > ")[0], comments=True)
                if words[:1] == ["rlhf"]:
                    yield words[1:]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_line_is_one_that_the_tool_accepts(name: str) -> None:
    for words in rlhf_lines(name):
        command, arguments = command_of(words)
        context = command.make_context(words[0], list(arguments))
        config = context.params.get("config")
        if config is not None:
            overrides = context.params.get("overrides") or []
            stage = {"sft": "sft", "train-rm": "reward_model", "ppo": "ppo"}.get(words[0])
            config_file.load(str(ROOT / config), overrides, stage=stage)
        for bound in context.params.get("require") or []:
            if words[0] == "evaluate":
                figures = first_cells(part("docs/commands.md", "## `rlhf evaluate`"))
                assert gates.parse_figure(bound, figures)
            else:
                assert gates.parse(bound).metric in documented()


def test_the_readme_shows_the_three_stages() -> None:
    assert {words[0] for words in rlhf_lines("README.md")} >= {"sft", "sample", "train-rm", "ppo"}


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_option_in_the_prose_exists(name: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    leaves = [c for top in commands.values() for c in getattr(top, "commands", {0: top}).values()]
    options = {option for leaf in leaves for p in leaf.params for option in p.opts}
    options |= {"--help", "--version", "--install-completion"}
    for code in inline(name):
        words = code.split()
        if words[0] == "rlhf" and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in commands, code
        if words[0] == "rlhf" or words[0].startswith("-"):
            for option in re.findall(r"--[a-z][a-z-]*", code):
                assert option in options, code


# Configs.


def keys_of(section: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key below a section class, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


KEYS = {key for config in STAGES.values() for key in keys_of(config)}
TOP = {key.partition(".")[0] for key in KEYS}


def test_the_keys_are_those_of_a_resolved_config() -> None:
    assert {"train.learning_rate", "score.missing_eos.subtract", "sft.pretrain.data"} <= KEYS
    assert "train.learnin_rate" not in KEYS


@pytest.mark.parametrize("name", NAMES)
def test_every_config_key_exists(name: str) -> None:
    for code in inline(name):
        key = re.split(r"[:=]", code)[0].strip()
        if not re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", key) or re.search(FILE, key):
            continue
        if key.partition(".")[0] in TOP:
            assert re.sub(r"\.\d+\.", ".", key) in KEYS, code


def test_every_preset_is_on_the_page_and_no_other() -> None:
    page = part("docs/pipeline.md", "## Defaults and their sources")
    rows = re.findall(r"^\| `([a-z-]+)` \| ([a-z_]+) \|", page, flags=re.MULTILINE)
    assert {(stage, preset) for preset, stage in rows} == set(PRESETS)


@pytest.mark.parametrize("stage", STAGES)
def test_documented_defaults_are_the_defaults(stage: str) -> None:
    values = resolve({**_required(), "stage": stage, "data": {"train": "x"}} | _reward(stage))
    page = part("docs/pipeline.md", "## Defaults and their sources")
    for key, number in re.findall(r"^\| `([a-z_.]+)` \| ([0-9.e-]+)[ ,|]", page, re.MULTILINE):
        found: Any = values
        for name in key.split("."):
            found = getattr(found, name, None)
        if isinstance(found, int | float):
            assert found == float(number), key


def _required() -> dict[str, Any]:
    return {"model": "base", "output": "out"}


def _reward(stage: str) -> dict[str, Any]:
    return {"reward": {"path": "reward"}} if issubclass(STAGES[stage], OnlineConfig) else {}


def test_the_keys_that_may_change_on_resume_are_those_of_the_code() -> None:
    leaves = {key for key in KEYS if not any(other.startswith(f"{key}.") for other in KEYS)}
    harmless = {key for key in leaves if key.startswith(resume.HARMLESS)}
    assert set(first_cells(part("docs/checkpoints.md", "## Resume"))) == harmless


# Metrics.


def documented() -> set[str]:
    """Every metric name on the page; what stands for a part of one is called K here."""
    names = {name for name in first_cells(read("docs/metrics.md")) if METRIC.fullmatch(name)}
    return {name.replace("<NAME>", "<K>") for name in names}


def written() -> set[str]:
    """Every metric name in the code of the stages, as constants and as pieces of f-strings."""
    names = {name for path in (ROOT / "stages").rglob("*.py") for name in _names(path)}
    diagnostics = PolicyDiagnostics(*[torch.zeros(())] * len(PolicyDiagnostics._fields))
    return names | set(per_token(diagnostics, 1.0))


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "<K>" for v in node.values]
            name = "".join(map(str, parts))
        else:
            continue
        # The constant part of eval/accuracy_k<K> is no name of its own.
        if METRIC.fullmatch(name) and not name.endswith(("_k", "/score_")):
            yield name


def test_every_metric_in_the_code_is_documented_and_no_other() -> None:
    assert documented() == written()


def test_every_metric_has_definition_unit_range_and_stage() -> None:
    rows = [line for line in read("docs/metrics.md").splitlines() if METRIC.match(line[3:])]
    assert len(rows) == len(documented())
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        assert all(cells), row
        words = {*config_file.COMMANDS.values(), "preferences", "online", "all"}
        assert set(cells[4].split(", ")) <= words, row


# Layers, pipeline, run folder, data.


def test_the_layers_on_the_page_are_those_that_the_imports_are_held_to() -> None:
    rows = re.findall(r"^\| (\d) \| ([^|]*) \|", read("CONTRIBUTING.md"), re.MULTILINE)
    told = {(part, int(layer)) for layer, parts in rows for part in re.findall("`(.*?)`", parts)}
    assert told == {(part, layer) for part, layer, _ in LAYERS if part != "stages/__init__.py"}


@pytest.mark.parametrize("stage", STAGES)
def test_the_sections_of_the_pipeline_are_the_numbered_comments_of_the_loop(stage: str) -> None:
    command = config_file.COMMANDS[stage]
    heading = re.search(
        rf"^## [^`]*(?:`rlhf [a-z-]+`, )*`rlhf {command}`.*$",
        read("docs/pipeline.md"),
        re.MULTILINE,
    )
    assert heading
    told = re.findall(r"^### (\d)\. (.+)$", part("docs/pipeline.md", heading[0]), re.MULTILINE)
    shared = {PreferenceConfig: "preference", CriticlessConfig: "online"}
    module = next((m for kind, m in shared.items() if issubclass(STAGES[stage], kind)), stage)
    code = re.findall(r"^    # (\d)\. ([^;.]+)", read(f"stages/{module}.py"), re.MULTILINE)
    assert told == code


def test_the_run_folder_on_the_page_is_what_the_tool_writes() -> None:
    tree = blocks("docs/checkpoints.md", "")[0]
    listed = {name.split("/")[0] for name in re.findall(r"^  ([a-z_.]\S*)", tree, re.MULTILINE)}
    assert listed == {*run_dir.FILES, *run_dir.FOLDERS}


def test_the_three_lines_of_the_readme_are_canonical_records() -> None:
    lines = blocks("README.md", "json")[0].splitlines()
    rows = [Row(json.loads(line), f"line {n}") for n, line in enumerate(lines)]
    records = [next(convert(iter([row]), "auto", False)[1]) for row in rows]
    assert [type(record) for record in records] == [Demonstration, Ranking, Prompt]
