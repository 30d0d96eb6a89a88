"""Kernels are pure: they import torch alone, read no single number out, and change no argument."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from stages import functional

NAMES = sorted(module.name for module in pkgutil.iter_modules(functional.__path__))
MODULES = [import_module(f"{functional.__name__}.{name}") for name in NAMES]
MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)

OPTIONS: dict[str, Any] = {
    "aggregation": "seq_mean",
    "denominator": torch.tensor(2.0),
    "fixed_length": 4,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "clip_range": 0.2,
    "clip": 0.5,
    "subtract": 1.0,
    "kl_coef": 0.1,
    "estimator": "k3",
    "position": "after_last",
    "gamma": 0.9,
    "lam": 0.9,
    "temperature": 0.7,
    "shift_mean": False,
    "center_coef": 0.1,
    "per_rank": 0.1,
    "ties": "half",
    "pair_denominator": "choose2",
    "reduction": "prompt_mean",
    "margin": torch.zeros(3, 4, 4),
    "decay": 0.9,
    "vf_coef": 0.1,
    "ent_coef": 0.1,
    "ptx_coef": 1.0,
    "loss": "ipo",
    "beta": 0.1,
    "label_smoothing": 0.1,
    "alpha": 0.5,
    "scale": "log",
    "n": 2,
    "desirable_weight": 1.0,
    "undesirable_weight": 1.3,
}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def kernels() -> list[Callable[..., Any]]:
    """Every public function of tensors; the guard of their shapes takes them by any name."""
    return [
        function
        for module in MODULES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and any(
            p.annotation == "Tensor" and p.kind is p.POSITIONAL_OR_KEYWORD
            for p in parameters_of(function)
        )
        and name != "require_same_shape"
    ]


def arguments(kernel: Callable[..., Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors of fitting shape for the positional parameters, and options by their names."""
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str) -> Tensor:
        if name in ("mask", "desirable"):
            return MASK.clone()
        if name == "ended":
            return torch.tensor([True, False, True])
        if name in ("ranks", "labels"):
            return torch.randint(1, 4, MASK.shape, generator=generator)
        if name.startswith("logits"):
            return torch.randn(*MASK.shape, 5, generator=generator)
        if name == "advantages" and kernel.__name__ in ("grpo_loss", "reinforce_loss"):
            return torch.randn(len(MASK), generator=generator)
        if name in ("reference", "mismatched_sum", "count"):
            return torch.tensor(0.5)
        if name == "losses" and "ranks" in positional:
            return torch.randn(*MASK.shape, MASK.shape[1], generator=generator)
        if name == "diffs" or (name == "scores" and "ranks" not in positional):
            return torch.randn(3, generator=generator)
        return torch.randn(MASK.shape, generator=generator)

    positional = [p.name for p in parameters_of(kernel) if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters_of(kernel) if p.kind is p.KEYWORD_ONLY]
    return [tensor(n) for n in positional], {n: OPTIONS[n] for n in named if n in OPTIONS}


def identifier(kernel: Callable[..., Any]) -> str:
    return kernel.__name__


@pytest.mark.parametrize("kernel", kernels(), ids=identifier)
def test_kernel_changes_no_argument(kernel: Callable[..., Any]) -> None:
    given, options = arguments(kernel)
    tensors = given + [value for value in options.values() if isinstance(value, Tensor)]
    before = [(x.clone(), x._version) for x in tensors]
    kernel(*given, **options)
    for now, (copy, version) in zip(tensors, before, strict=True):
        assert now._version == version
        assert torch.equal(now, copy)


@pytest.mark.parametrize("kernel", kernels(), ids=identifier)
def test_hyperparameters_are_given_by_name_and_a_mask_has_no_default(
    kernel: Callable[..., Any],
) -> None:
    for parameter in parameters_of(kernel):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert parameter.annotation == "Tensor", parameter
            assert parameter.default is parameter.empty, parameter


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_module_imports_torch_and_the_standard_library_alone(module: ModuleType) -> None:
    allowed = {"torch", "stages.functional", *sys.stdlib_module_names}
    for node in ast.walk(_tree(module)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        for name in names:
            assert any(name == root or name.startswith(f"{root}.") for root in allowed), name


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_module_reads_no_number_out_of_a_tensor_and_draws_none(module: ModuleType) -> None:
    forbidden = {"item", "tolist", "numpy", "cpu", "rand", "randn", "manual_seed", "print"}
    for node in ast.walk(_tree(module)):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        assert name not in forbidden, f"{module.__name__}: {name}"


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
