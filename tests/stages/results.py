"""What a run left behind, read without the tool: rows, weights, states, passes of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.stages.project import RANKINGS, ids_of


def rows(output: str, kind: str | None = None, *, timed: bool = False) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, times aside."""
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    chosen = [row for row in found if kind in (None, row["kind"])]
    return chosen if timed else [_untimed(row) for row in chosen]


def samples(output: str) -> list[dict[str, Any]]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in (Path(output) / "samples.jsonl").read_text().splitlines()]


def run_json(output: str) -> dict[str, Any]:
    """run.json of a run folder."""
    return json.loads((Path(output) / "run.json").read_text())


def identity(folder: str) -> dict[str, Any]:
    """rlhf.json of a model folder."""
    return json.loads((Path(folder) / "rlhf.json").read_text())


def weights(folder: str | Path) -> dict[str, Tensor]:
    """The weights of a model folder."""
    return load_file(Path(folder) / "model.safetensors")


def policy(folder: str) -> Any:
    """A policy as transformers alone loads it, in float64."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def classifier(folder: str) -> Any:
    """A reward model or critic as transformers alone loads it, in float64."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()


@torch.no_grad()
def logps(model: Any, ids: list[int], *, temperature: float = 1.0) -> Tensor:
    """log π(token t | tokens before it) for t = 1 …, by one forward pass of transformers alone."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.no_grad()
def raw_score(model: Any, ids: list[int]) -> float:
    """The head's output for a sequence, by one forward pass of transformers alone."""
    return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


Scored = list[list[tuple[float, int]]]  # (raw score, rank) of each answer of each prompt


def scored_by_hand(folder: str, records: Any = RANKINGS) -> Scored:
    """The raw scores of every answer behind its prompt, alone, through transformers."""
    model = classifier(folder)
    return [
        [
            (raw_score(model, ids_of(r["prompt"]) + ids_of(text, end=True)), rank)
            for text, rank in r["responses"]
        ]
        for r in records
    ]


def losses_by_hand(folder: str, records: list[dict[str, str]]) -> list[torch.Tensor]:
    """The negative log-likelihoods of each answer's tokens, its end token included."""
    model = policy(folder)
    found = []
    for record in records:
        prompt, answer = ids_of(record["prompt"]), ids_of(record["response"], end=True)
        found.append(-logps(model, prompt + answer)[len(prompt) - 1 :])
    return found


def checkpoints(output: str) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((Path(output) / "checkpoints").glob("step-*"))


def left_behind(output: str) -> dict[str, Any]:
    """Everything a run left that does not tell the time: metrics, samples, weights, state."""
    folder = Path(output)
    last = checkpoints(output)[-1]
    files = [*last.glob("*.safetensors"), *folder.glob("*/*.safetensors")]
    state = json.loads((last / "state.json").read_text())
    text = folder / "samples.jsonl"
    return {
        "rows": rows(output),
        "samples": samples(output) if text.exists() else [],
        "state": _untimed(state),
        "checkpoint": last.name,
        **{str(path.relative_to(folder)): load_file(path) for path in files},
    }


def assert_equal(
    got: Any, expected: Any, *, rtol: float = 0.0, atol: float | None = None, where: str = ""
) -> None:
    """Nested values agree, bit for bit without tolerances; ``atol`` is ``rtol`` where not given."""
    atol = rtol if atol is None else atol
    exact = rtol == atol == 0
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(got[key], value, rtol=rtol, atol=atol, where=f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for n, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_equal(one, other, rtol=rtol, atol=atol, where=f"{where}[{n}]")
    elif isinstance(expected, Tensor) and exact:
        assert got.dtype == expected.dtype, where
        assert torch.equal(got, expected), where
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(
            got, expected, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, float) and not exact:
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol, err_msg=where)
    else:
        assert got == expected, where


def _untimed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _untimed(inner)
        for key, inner in value.items()
        if not key.startswith("time/") and key not in ("seconds", "train_seconds")
    }
