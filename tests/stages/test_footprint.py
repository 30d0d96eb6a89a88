"""The estimate of a run's memory against the memory that a run takes."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from stages import check
from stages.config.shared import Lora
from stages.footprint import BESIDE
from stages.models.precision import choose
from stages.runtime.estimate import MIB, Load, activations, holes, shape_of
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project

STAGES = ("sft", "reward_model", "ppo", "grpo")
QUIET = SilentReporter()


def memory_of(project: Project, stage: str, **changes: Any) -> dict[str, Any]:
    return check.run(project.config(stage, **changes), QUIET)["memory"]


def resident(name: str) -> float:
    """A figure of this process in MiB, as Linux keeps it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def taken(config: Any) -> float:
    """MiB that a run takes at its fullest, in a process that has the imports done."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            module = {"grpo": "online"}.get(config.stage, config.stage)
            importlib.import_module(f"stages.{module}").run(config, QUIET)
            os.write(write, json.dumps(resident("VmHWM") - before).encode())
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(write)
    with os.fdopen(read) as pipe:
        return float(pipe.read())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory as Linux counts it")
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_estimate_for_a_tiny_model_is_within_200_mib(
    stage: str, adapters: bool, project: Project
) -> None:
    changes = {"lora.rank": 2} if adapters else {}
    config = project.config(stage, **changes)
    told = check.run(config, QUIET)["memory"]["peak"]
    assert abs(told - taken(config)) <= 200


def test_the_peak_is_what_stands_and_the_largest_moment(project: Project) -> None:
    memory = memory_of(project, "ppo")
    roles = ("policy", "reference", "reward", "critic", "rollout")
    standing = sum(
        size for role in roles for name, size in memory[role].items() if name != "gradients"
    )
    moments = memory["one_at_a_time"]
    assert moments.keys() == {"policy_step", "critic_step", "sampling", "saving"}
    assert memory["peak"] == pytest.approx(standing + max(moments.values()) + BESIDE / MIB)


def test_frozen_models_hold_their_matrices_in_the_format_of_the_passes(project: Project) -> None:
    wide = memory_of(project, "ppo", train__precision="fp32")
    narrow = memory_of(project, "ppo", train__precision="bf16")
    assert narrow["policy"] == wide["policy"], "what is trained is held in fp32"
    for role in ("reference", "reward"):
        assert 0.5 < narrow[role]["weights"] / wide[role]["weights"] < 0.95


def test_with_adapters_policy_and_reference_are_one_copy(project: Project) -> None:
    memory = memory_of(project, "ppo", **{"lora.rank": 2})
    assert memory["reference"] == memory["reward"] == {}
    assert memory["policy"]["gradients"] < memory["policy"]["weights"]
    assert memory["one_at_a_time"]["saving"] > 0, "a merged copy is written"


@pytest.mark.parametrize(
    ("stage", "key", "less"),
    [
        ("sft", "train__tokens_per_micro_batch", 12),
        ("sft", "train__gradient_checkpointing", True),
    ],
)
def test_what_is_said_to_lower_the_memory_lowers_the_estimate(
    stage: str, key: str, less: Any, project: Project
) -> None:
    records = [{"prompt": "ab:" * 20, "response": "cd" * 40}] * 30
    project.write("long.jsonl", records)
    options = {"data__train": "long.jsonl", "train__batch_size": 30}
    before = memory_of(project, stage, **options)["one_at_a_time"]["model_step"]
    after = memory_of(project, stage, **options, **{key: less})["one_at_a_time"]["model_step"]
    assert after < before


def test_documents_of_ptx_have_a_moment_of_their_own(project: Project) -> None:
    options = {"ptx__data": "documents.jsonl", "ptx__coef": 1.0}
    assert "documents_step" in memory_of(project, "ppo", **options)["one_at_a_time"]


def test_the_policy_that_normalises_scores_is_no_part_of_what_stands(project: Project) -> None:
    plain = memory_of(project, "reward_model")
    memory = memory_of(
        project, "reward_model", normalise__on="reference", normalise__max_new_tokens=4
    )
    assert memory["one_at_a_time"]["sampling"] >= 0
    assert memory["peak"] >= plain["peak"]
    assert memory["model"] == plain["model"]


def test_adapters_on_a_cpu_leave_holes_of_half_their_activations(project: Project) -> None:
    lora = Lora(rank=2)
    shape = shape_of(AutoConfig.from_pretrained("base"), "policy", lora=lora)
    load = Load(tokens=1000, keys=50.0, targets=500, micro_batches=1)
    cpu = choose("cpu", "fp32")
    gpu = cpu._replace(device=torch.device("cuda"))
    kept = activations(shape, cpu, load, dropout=False, checkpointing=False)
    assert holes(shape, cpu, load, checkpointing=False) == kept // 2
    assert holes(shape, gpu, load, checkpointing=False) == 0
    assert holes(shape._replace(added=0), cpu, load, checkpointing=False) == 0
    told = memory_of(project, "ppo", **{"lora.rank": 2})
    assert told["policy"]["holes"] > 0
    assert told["critic"]["holes"] > 0
    assert "holes" not in memory_of(project, "ppo")["policy"]
