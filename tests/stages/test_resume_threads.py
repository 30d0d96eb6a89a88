"""Equal runs end with equal bits on several threads, which may add in any order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from stages import reward_model
from stages.runtime.reporter import SilentReporter
from tests.families import random_module
from tests.stages.project import END_ID, LETTERS, TOKENIZER, Project, rankings
from tests.stages.results import assert_equal, left_behind


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def wide(project: Project, name: str) -> str:
    """A model at whose size torch splits its sums among threads."""
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=256,
        eos_token_id=END_ID,
        pad_token_id=0,
    )
    folder = project.folder / name
    random_module(config, "policy", dtype=torch.float32, seed=0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return name


def test_two_equal_runs_on_two_threads_are_equal_bit_for_bit(project: Project) -> None:
    """Rankings of four answers: the keys of a prompt are read from the rows of all of them."""
    rng = np.random.default_rng(0)

    def text(shortest: int, longest: int) -> str:
        return "".join(rng.choice(list(LETTERS[:26]), rng.integers(shortest, longest)))

    records = [
        {"prompt": text(8, 20), "responses": [(text(6, 14), rank) for rank in (1, 2, 3, 4)]}
        for _ in range(8)
    ]
    project.write("rankings.jsonl", rankings(records))
    changes = {
        "model": wide(project, "wide"),
        "train.precision": "fp32",
        "train.batch_size": 8,
        "train.max_steps": 2,
        "normalise.on": "none",
    }
    for output in ("first", "second"):
        reward_model.run(project.config("reward_model", output=output, **changes), SilentReporter())
    assert_equal(left_behind("second"), left_behind("first"))
