"""The rule behind the ranks, and what both sides are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import inputs, works
from benchmarks.configs import values_of
from benchmarks.inputs import Size
from benchmarks.learning import within
from benchmarks.works import Job
from stages.config import resolve

WORK = replace(works.reward(12, 4), size="tiny")
ALL = (*works.FULL, *works.REDUCED, *works.QUICK)
NARROW = Size(hidden=32, layers=2, heads=2, inner=64, vocabulary=600)


def test_ranks_follow_the_share_of_early_words() -> None:
    assert inputs.share_of_early("ba ge ha zu") == 0.5
    for row in inputs.records(WORK, 20, seed=3):
        answers = sorted(row["responses"], key=lambda r: r["rank"])
        shares = [inputs.share_of_early(r["text"]) for r in answers]
        assert [r["rank"] for r in answers] == [1, 2, 3, 4]
        assert shares == sorted(shares, reverse=True)
        assert len(set(shares)) == 4


def test_words_that_were_seen_predict_the_ranks_of_unseen_rankings() -> None:
    """A linear reader of words learns the rule, so a reward model can."""
    seen: dict[str, float] = {}
    for row in inputs.records(WORK, 300, seed=0):
        for answer in row["responses"]:
            for word in answer["text"].split():
                seen[word] = seen.get(word, 0.0) + 2.5 - answer["rank"]
    right = [
        sum(seen.get(w, 0.0) for w in pair["chosen"].split()) / len(pair["chosen"].split())
        > sum(seen.get(w, 0.0) for w in pair["rejected"].split()) / len(pair["rejected"].split())
        for row in inputs.records(WORK, 50, seed=1)
        for pair in inputs.pairs(row)
    ]
    assert sum(right) / len(right) > 0.8


def test_a_seed_gives_the_same_records_and_another_gives_others() -> None:
    assert inputs.records(WORK, 3, seed=0) == inputs.records(WORK, 3, seed=0)
    assert inputs.records(WORK, 3, seed=0) != inputs.records(WORK, 3, seed=1)


def test_pairs_are_all_pairs_with_the_better_one_first() -> None:
    responses = [{"text": t, "rank": r} for t, r in (("b", 2), ("a", 1), ("c", 3))]
    found = inputs.pairs({"prompt": "p", "responses": responses})
    assert [(p["chosen"], p["rejected"]) for p in found] == [("a", "b"), ("a", "c"), ("b", "c")]


def test_lengths_are_spread_around_their_median_unless_they_are_fixed() -> None:
    work = replace(works.sft(64), size="tiny")
    lengths = [len(row["response"].split()) for row in inputs.records(work, 400, seed=0)]
    assert 34 < sorted(lengths)[200] < 46
    assert max(lengths) > 2 * 40
    fixed = inputs.records(replace(work, spread=0.0), 20, seed=0)
    assert {len(row["response"].split()) for row in fixed} == {40}


def test_nearly_every_word_is_one_token() -> None:
    tokenizer = inputs.make_tokenizer(2048)
    words = inputs.words_of(2048)
    single = sum(len(tokenizer(f" {word}")["input_ids"]) == 1 for word in words)
    assert single > 0.9 * len(words)


def test_half_of_the_answers_end_before_their_sixteenth_token(tmp_path: Path) -> None:
    inputs.write_models(tmp_path, NARROW)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ending")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ending").eval()
    torch.manual_seed(0)
    prompts = torch.randint(2, 300, (400, 8))
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=16
    )
    ended = (out[:, 8:] == tokenizer.eos_token_id).any(dim=1).double().mean()
    assert 0.4 < float(ended) < 0.6


@pytest.mark.parametrize("work", [w for w in ALL if w.stage != "sample"])
def test_every_training_work_is_a_config_of_this_project(work: works.Work) -> None:
    job = Job(work, "base", "reward", "data.jsonl", "pairs.jsonl", "out")
    config = resolve(values_of(job))
    assert config.stage == work.stage
    assert config.train.batch_size == work.batch


@pytest.mark.parametrize("work", ALL)
def test_the_peers_steps_are_whole_and_as_many_as_ours(work: works.Work) -> None:
    assert work.records % work.batch == 0
    sequences = work.batch * work.k * (work.k - 1) // 2 if work.k > 1 else work.batch
    if work.stage != "sample":
        assert sequences % work.micro == 0


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(works.ppo(64), "a", "b", "c", "d", "e", precision="bf16", seed=3, save=True)
    assert works.read_job(str(job.write(tmp_path / "job.json"))) == job


def test_sides_agree_where_their_ranges_over_the_seeds_overlap() -> None:
    assert within([1.0, 2.0, 3.0], [2.5, 4.0, 5.0])
    assert not within([1.0, 2.0], [2.1, 4.0])
