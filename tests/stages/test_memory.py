"""Knobs for memory change how much is held, and no number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from stages import online, ppo, reward_model, sft
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project
from tests.stages.results import assert_equal, checkpoints, rows, weights

QUIET = SilentReporter()
RUNS: dict[str, Any] = {"sft": sft.run, "reward_model": reward_model.run, "ppo": ppo.run}
RUNS["grpo"] = online.run


@contextmanager
def products() -> Iterator[list[int]]:
    """Counts the matrix products of all layers, those that a backward pass repeats included."""
    count = [0]

    def hook(module: nn.Module, inputs: Any) -> None:
        count[0] += isinstance(module, nn.Linear)

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield count
    finally:
        handle.remove()


@pytest.mark.parametrize("stage", RUNS)
def test_gradient_checkpointing_repeats_layers_and_changes_no_number(
    project: Project, stage: str
) -> None:
    counts = {}
    # The first run also tries the architecture out.
    for name, on in (("first", False), ("plain", False), ("frugal", True)):
        config = project.config(stage, output=name, train__gradient_checkpointing=on)
        with products() as count:
            RUNS[stage](config, QUIET)
        counts[name] = count[0]
    assert counts["frugal"] > counts["plain"]
    assert_equal(rows("frugal"), rows("plain"), rtol=1e-10)
    assert_equal(weights("frugal/model"), weights("plain/model"), rtol=1e-10)


@pytest.mark.parametrize("stage", ["sft", "reward_model", "ppo"])
def test_models_may_be_saved_in_bf16_while_the_training_state_stays_whole(
    project: Project, stage: str
) -> None:
    config = project.config(stage, output="half", checkpoint__dtype="bfloat16")
    RUNS[stage](config, QUIET)
    found = weights("half/model")
    state = weights(checkpoints("half")[-1])
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in state.values()} == {torch.float64}
    assert_equal(found, {name: state[name].bfloat16() for name in found})
