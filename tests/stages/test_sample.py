"""``rlhf sample``: answers by the inverse of the distribution, lines that survive a stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stages.answers
import stages.sample
from stages.errors import CheckpointError, ConfigError, Interrupted
from stages.models.generate import noise
from stages.runtime.reporter import SilentReporter
from stages.sample import SampleOptions, run
from tests.stages.project import END_ID, PROMPTS, Listener, Project, ids_of
from tests.stages.results import policy

QUIET = SilentReporter()


def sampled(**changes: Any) -> list[dict[str, Any]]:
    """The lines of a call without an output file."""
    lines: list[str] = []
    options = {"policy": "base", "prompts": "prompts.jsonl", "max_new_tokens": 6, **changes}
    run(SampleOptions(precision="fp32", **options), QUIET, write=lines.append)
    return [json.loads(line) for line in lines]


def into(output: str, **changes: Any) -> SampleOptions:
    return SampleOptions(
        "base", "prompts.jsonl", k=2, output=output, max_new_tokens=6, precision="fp32", **changes
    )


def by_hand(prompt: str, uniforms: list[float], *, temperature: float, top_p: float) -> list[int]:
    """Token after token by whole forward passes of transformers, one sequence alone."""
    model, ids = policy("base"), ids_of(prompt)
    answer: list[int] = []
    for uniform in uniforms:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + answer])).logits[0, -1]
        probabilities = (logits / temperature).softmax(-1).numpy()
        order = np.argsort(-probabilities)
        kept = np.cumsum(probabilities[order]) - probabilities[order] < top_p
        cut = np.zeros_like(probabilities)
        cut[order[kept]] = probabilities[order[kept]]
        cumulative = np.cumsum(cut)
        answer.append(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")))
        if answer[-1] == END_ID:
            break
    return answer


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.5, 0.7)])
def test_an_answer_is_the_inverse_distribution_at_its_own_uniform_numbers(
    project: Project, temperature: float, top_p: float
) -> None:
    found = sampled(k=3, seed=5, temperature=temperature, top_p=top_p)
    assert [line["prompt"] for line in found] == [record["prompt"] for record in PROMPTS]
    for n, line in enumerate(found):
        for sample, response in enumerate(line["responses"]):
            uniforms = noise(5, [(n, sample)], 6)[0].tolist()
            expected = by_hand(line["prompt"], uniforms, temperature=temperature, top_p=top_p)
            assert response["ids"] == expected
            ended = expected[-1] == END_ID
            assert response["flags"] == ([] if ended else ["cut"])
            assert ids_of(response["text"]) == [token for token in expected if token > 3]


def test_answers_do_not_depend_on_which_prompts_are_answered_together(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sampled(k=2)
    monkeypatch.setattr(stages.sample, "CHUNK", 1)
    assert sampled(k=2) == whole
    assert sampled(k=2, limit=3) == whole[:3]


def test_more_answers_begin_with_the_same_answers(project: Project) -> None:
    few, many = sampled(k=1), sampled(k=3)
    for one, other in zip(few, many, strict=True):
        assert other["responses"][0] == one["responses"][0]


def test_another_seed_gives_other_answers_and_the_same_seed_the_same(project: Project) -> None:
    assert sampled(seed=1) == sampled(seed=1)
    assert sampled(seed=1) != sampled(seed=2)


def test_an_interrupted_file_is_completed_to_the_uninterrupted_one(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.sample, "CHUNK", 2)
    told = run(into("whole.jsonl"), QUIET)
    assert (told["prompts"], told["answers"], told["kept"]) == (6, 12, 0)
    with pytest.raises(Interrupted) as caught:
        run(into("parts.jsonl"), Listener(stop_at=4))
    assert caught.value.exit_code == 143
    parts = Path("parts.jsonl")
    assert len(parts.read_text().splitlines()) == 4
    whole = Path("whole.jsonl").read_bytes()
    start = parts.stat().st_size
    end = whole.index(b"\n", start)
    for size, kept in ((start, 4), (start + 9, 4), (end - 1, 4), (end, 5)):
        parts.write_bytes(whole[:size])
        assert run(into("parts.jsonl", resume=True), QUIET)["kept"] == kept
        assert parts.read_bytes() == whole


@pytest.mark.parametrize("kept", [0, 2, 6])
@pytest.mark.parametrize("tail", ["my notes", '{"prompt": "of another', '{"mine": 1}', "{}", "7"])
def test_a_last_line_without_an_end_is_cut_only_where_it_is_torn_off_the_line_that_is_due(
    kept: int, tail: str, project: Project
) -> None:
    path = Path("answers.jsonl")
    if kept:
        run(into("answers.jsonl", limit=kept), QUIET)
    before = path.read_bytes() if kept else b""
    path.write_bytes(before + tail.encode())
    with pytest.raises(ConfigError) as caught:
        run(into("answers.jsonl", resume=True), QUIET)
    assert "no answers to the prompt" in str(caught.value) or "7 lines" in str(caught.value)
    assert path.read_bytes() == before + tail.encode()


def test_the_last_ranked_line_is_kept_where_an_editor_left_out_its_end(project: Project) -> None:
    run(into("answers.jsonl", limit=1), QUIET)
    path = Path("answers.jsonl")
    line = json.loads(path.read_text())
    line["responses"][0]["rank"], line["responses"][1]["rank"] = 2, 1
    path.write_text(json.dumps(line))
    assert run(into("answers.jsonl", resume=True), QUIET)["kept"] == 1
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == line
    assert len(lines) == 6


def test_a_file_that_has_lines_is_neither_overwritten_nor_doubled(project: Project) -> None:
    Path("answers.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match="not empty"):
        run(into("answers.jsonl"), QUIET)
    assert Path("answers.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("line", ["mine", "[1]", '{"prompt": "ab:"}', "of other prompts"])
def test_a_file_of_something_else_is_not_gone_on_with(project: Project, line: str) -> None:
    path = Path("answers.jsonl")
    if line == "of other prompts":
        run(into("answers.jsonl", limit=1), QUIET)
        line = path.read_text().rstrip().replace('"ab:"', '"zz:"')
    path.write_text(f"{line}\ntorn")
    with pytest.raises(ConfigError, match="no answers to the prompt") as caught:
        run(into("answers.jsonl", resume=True), QUIET)
    assert caught.value.where == "--output answers.jsonl:1"
    assert path.read_text() == f"{line}\ntorn"


def test_a_device_is_no_file_for_answers(project: Project) -> None:
    with pytest.raises(ConfigError, match="a device or a pipe"):
        run(into("/dev/null"), QUIET)


def test_more_lines_than_prompts_are_refused(project: Project) -> None:
    run(into("answers.jsonl"), QUIET)
    with pytest.raises(ConfigError, match="6 lines, and there are 2 prompts"):
        run(into("answers.jsonl", resume=True, limit=2), QUIET)


def test_a_reward_model_cannot_be_sampled(project: Project) -> None:
    with pytest.raises(CheckpointError, match="is a reward model"):
        sampled(policy="reward")


def test_answers_that_leave_no_room_for_a_prompt_are_refused(project: Project) -> None:
    with pytest.raises(ConfigError, match="leaves no room"):
        sampled(max_new_tokens=256)


def test_a_model_trained_on_turns_is_asked_in_turns(project: Project) -> None:
    """The policy's own folder says how prompts are read: nothing has to be repeated."""
    from stages import sft

    changes = {"data.chat_template": "chatml", "data.as_messages": True}
    sft.run(project.config("sft", **changes), QUIET)
    seen: list[list[int]] = []
    real = stages.answers.generate

    def generate(network: Any, prompts: Any, *rest: Any) -> Any:
        seen.extend(prompt.tolist() for prompt in prompts)
        return real(network, prompts, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.answers, "generate", generate)
        found = sampled(policy="runs/sft", k=1, limit=1)
    text = f"<|im_start|>user\n{PROMPTS[0]['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    assert seen == [ids_of(text)]
    assert found[0]["prompt"] == PROMPTS[0]["prompt"]


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--k 2", {"k": 3}),
        ("--seed 0", {"seed": 1}),
        ("--temperature 1.0", {"temperature": 0.5}),
        ("--top-p 1.0", {"top_p": 0.9}),
        ("--max-new-tokens 6", {"max_new_tokens": 7}),
    ],
)
def test_answers_drawn_otherwise_are_not_gone_on_with(
    project: Project, option: str, changes: dict[str, Any]
) -> None:
    run(into("answers.jsonl", limit=2), QUIET)
    before = Path("answers.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=f"were drawn with {option}, and now it is") as caught:
        run(replace(into("answers.jsonl", resume=True), **changes), QUIET)
    assert caught.value.where == "--output answers.jsonl:1"
    assert Path("answers.jsonl").read_bytes() == before


def test_answers_of_other_weights_are_not_gone_on_with(project: Project) -> None:
    run(into("answers.jsonl", limit=2), QUIET)
    before = Path("answers.jsonl").read_bytes()
    project.model("base", dtype=torch.float64, seed=9)
    with pytest.raises(ConfigError, match="of another policy, or of other weights"):
        run(into("answers.jsonl", resume=True), QUIET)
    assert Path("answers.jsonl").read_bytes() == before


def test_ranked_lines_and_lines_that_do_not_tell_how_they_were_drawn_are_kept(
    project: Project,
) -> None:
    run(into("whole.jsonl"), QUIET)
    lines = [json.loads(line) for line in Path("whole.jsonl").read_text().splitlines()]
    for rank, answer in enumerate(lines[0]["responses"], start=1):
        answer["rank"] = rank
    del lines[1]["sampling"]
    kept = "".join(json.dumps(line) + "\n" for line in lines[:2])
    Path("parts.jsonl").write_text(kept)
    assert run(into("parts.jsonl", resume=True), QUIET)["kept"] == 2
    rest = "".join(json.dumps(line) + "\n" for line in lines[2:])
    assert Path("parts.jsonl").read_text() == kept + rest
