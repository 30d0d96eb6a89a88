"""A file imports only from lower layers; the imports are read, nothing is run."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("stages", "rlhf_cli")
    for path in (ROOT / package).rglob("*.py")
)
STANDARD = {"__future__", *sys.stdlib_module_names}
TORCH, HF = {"torch", "numpy"}, {"torch", "numpy", "transformers", "tokenizers", "safetensors"}
TERMINAL = {"typer", "rich", "ruamel"}

LAYERS: tuple[tuple[str, int, set[str]], ...] = (
    # the part, its layer, the packages that it may use besides the standard library
    ("stages/__init__.py", 0, set()),
    ("stages/errors.py", 0, set()),
    ("stages/seeds.py", 0, set()),
    ("stages/config/", 0, {"pydantic", "pydantic_core"}),
    ("stages/functional/", 1, {"torch"}),
    ("stages/batch.py", 1, TORCH),
    ("stages/data/", 2, HF | {"pyarrow", "datasets", "jinja2", "xxhash"}),
    ("stages/models/", 2, HF | {"huggingface_hub", "xxhash", "peft"}),
    ("stages/runtime/", 3, HF | {"accelerate", "xxhash", "urllib3"}),
    ("stages/methods.py", 4, TORCH),
    ("stages/terms.py", 4, set()),
    ("stages/inputs.py", 4, HF),
    ("stages/roles.py", 4, HF),
    ("stages/show.py", 4, TORCH),
    ("stages/budget.py", 4, HF),
    ("stages/footprint.py", 4, HF),
    ("stages/normaliser.py", 4, TORCH),
    ("stages/groups.py", 4, TORCH),
    ("stages/pairs.py", 4, TORCH),
    ("stages/references.py", 4, TORCH),
    ("stages/moments.py", 4, TORCH),
    ("stages/judges.py", 4, TORCH),
    ("stages/rollout.py", 4, TORCH),
    ("stages/diagnosis.py", 4, set()),
    ("stages/rollout_method.py", 4, set()),
    ("stages/sampled.py", 4, TORCH),
    ("stages/iterations.py", 4, TORCH),
    ("stages/minibatch.py", 4, TORCH),
    ("stages/advantage.py", 4, TORCH),
    ("stages/update.py", 4, TORCH),
    ("stages/criticless.py", 4, TORCH),
    ("stages/actors.py", 4, HF),
    ("stages/sample_file.py", 4, set()),
    ("stages/answers.py", 4, set()),
    ("stages/answer_figures.py", 4, TORCH),
    ("stages/scored.py", 4, TORCH),
    ("stages/text_reward.py", 4, TORCH),
    ("stages/comparison.py", 4, TORCH),
    ("stages/conversation.py", 4, set()),
    ("stages/sft.py", 5, HF),
    ("stages/reward_model.py", 5, HF),
    ("stages/ppo.py", 5, HF),
    ("stages/preference.py", 5, HF),
    ("stages/online.py", 5, HF),
    ("stages/sample.py", 5, HF),
    ("stages/evaluate.py", 5, TORCH),
    ("stages/chat.py", 5, TORCH),
    ("stages/score.py", 5, TORCH),
    ("stages/check.py", 5, HF),
    ("rlhf_cli/", 6, TERMINAL | {"typing_extensions"}),
)
WITHIN = {"stages/config/", "stages/functional/", "stages/data/", "stages/models/",
          "stages/runtime/", "rlhf_cli/"}  # fmt: skip
STEPS = (
    "stages/show.py",
    "stages/methods.py",
    "stages/terms.py",
    "stages/roles.py",
    "stages/inputs.py",
    "stages/budget.py",
    "stages/footprint.py",
    "stages/normaliser.py",
    "stages/groups.py",
    "stages/pairs.py",
    "stages/references.py",
    "stages/moments.py",
    "stages/judges.py",
    "stages/rollout.py",
    "stages/diagnosis.py",
    "stages/rollout_method.py",
    "stages/sampled.py",
    "stages/iterations.py",
    "stages/minibatch.py",
    "stages/advantage.py",
    "stages/update.py",
    "stages/criticless.py",
    "stages/actors.py",
    "stages/sample_file.py",
    "stages/answers.py",
    "stages/answer_figures.py",
    "stages/scored.py",
    "stages/text_reward.py",
    "stages/comparison.py",
    "stages/conversation.py",
)
"""The parts of layer 4, each of which may use those before it."""
EXTRA = {
    ("stages/config/", "stages/errors.py"),
    ("stages/models/forward.py", "stages/functional/"),
}
"""What a part or a single file may use besides."""
NO_FORMULAS = ("stages/data/", "stages/models/")


def part_of(path: str) -> tuple[str, int, set[str]]:
    """The part that a file, or a folder ending in a slash, belongs to.

    Raises:
        AssertionError: it is in none.
    """
    found = [part for part in LAYERS if path == part[0] or (part[0][-1] == "/" and part[0] in path)]
    assert len(found) == 1, f"{path} belongs to no layer"
    return found[0]


def imported(root: Path, path: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def file_of(root: Path, name: str) -> str:
    """The file of a module of ours, from the name of the module or of something in it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        stem = "/".join(parts[:length])
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if (root / path).is_file():
                return path
    raise AssertionError(f"no file holds {name}")


def faults(root: Path, path: str) -> list[str]:
    """Every import of a file that its layer does not allow."""
    found = []
    for line, name in imported(root, path):
        package = name.split(".")[0]
        if package not in ("stages", "rlhf_cli"):
            if package not in STANDARD and package not in part_of(path)[2]:
                found.append(f"{path}:{line} uses {package}")
        elif reason := forbidden(path, file_of(root, name)):
            found.append(f"{path}:{line} imports {name}: {reason}")
    return found


def forbidden(path: str, target: str) -> str:
    """Why a file may not import another one of ours; empty where it may."""
    (own, layer, _), (other, below, _) = part_of(path), part_of(target)
    if own == other and own in WITHIN:
        return ""
    if {(own, other), (path, other)} & EXTRA:
        return ""
    if own in STEPS and other in STEPS:
        return "" if STEPS.index(other) < STEPS.index(own) else "a later step"
    if own in NO_FORMULAS and other == "stages/functional/":
        return "data and models see no formulas"
    return "" if below < layer else f"layer {below} from layer {layer}"


@pytest.mark.parametrize("path", SOURCES)
def test_each_file_imports_only_from_lower_layers(path):
    assert faults(ROOT, path) == []


def test_every_source_file_belongs_to_exactly_one_layer():
    assert len(SOURCES) > 50
    for path in SOURCES:
        part_of(path)


def test_no_module_is_named_for_being_left_over():
    names = {Path(path).stem for path in SOURCES}
    assert names.isdisjoint({"utils", "util", "helpers", "helper", "common", "misc", "manager"})


@pytest.mark.parametrize(
    ("path", "line", "expected"),
    [
        ("stages/functional/value.py", "from stages.batch import pack", "layer 1 from layer 1"),
        ("stages/functional/value.py", "import numpy", "uses numpy"),
        ("stages/functional/value.py", "from stages.config import PpoConfig", ""),
        ("stages/seeds.py", "import torch", "uses torch"),
        ("stages/errors.py", "from stages import batch", "layer 1 from layer 0"),
        ("stages/data/plan.py", "from stages.models.forward import logits", "layer 2 from layer 2"),
        ("stages/data/plan.py", "from stages.functional.value import value_loss", "no formulas"),
        ("stages/models/load.py", "from stages.data import store", "layer 2 from layer 2"),
        ("stages/models/load.py", "from stages.functional.masking import whiten", "no formulas"),
        ("stages/models/load.py", "import stages.runtime.optim", "layer 3 from layer 2"),
        ("stages/runtime/optim.py", "from stages.rollout import collect", "layer 4 from layer 3"),
        ("stages/rollout.py", "from stages.update import Update", "a later step"),
        ("stages/sft.py", "from stages.ppo import run", "layer 5 from layer 5"),
        ("stages/sft.py", "def late():\n    import rich.table", "uses rich"),
        ("stages/ppo.py", "from rlhf_cli.console import Console", "layer 6 from layer 5"),
        ("stages/runtime/session.py", "from ruamel.yaml import YAML", "uses ruamel"),
    ],
)
def test_a_bad_import_is_caught(path, line, expected, tmp_path):
    for package in ("stages", "rlhf_cli"):
        shutil.copytree(ROOT / package, tmp_path / package)
    with (tmp_path / path).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    found = [fault for fault in faults(tmp_path, path) if expected in fault]
    assert bool(found) == bool(expected)


def test_a_new_file_outside_of_every_layer_is_caught():
    with pytest.raises(AssertionError, match="no layer"):
        part_of("stages/extras.py")
