"""Stage 1 against transformers alone: the loss, what carries it, and the batches it is taken on."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch

import stages.sft
from stages import sft
from stages.config import InvalidConfig
from stages.errors import DataError
from stages.runtime.reporter import SilentReporter
from tests.stages.project import DEMONSTRATIONS, END_ID, Listener, Project, ids_of
from tests.stages.results import (
    assert_equal,
    identity,
    logps,
    losses_by_hand,
    policy,
    rows,
    run_json,
    weights,
)

QUIET = SilentReporter()


def test_one_batch_is_overfitted_and_the_model_stops_by_itself(project: Project) -> None:
    config = project.config(
        "sft", train__max_steps=120, train__batch_size=8, train__schedule="constant"
    )
    result = sft.run(config, QUIET)
    assert result.metrics["loss/sft"] < 0.02
    model = policy("runs/sft/model")
    for record in DEMONSTRATIONS:
        prompt = torch.tensor([ids_of(record["prompt"])])
        out = model.generate(prompt, max_new_tokens=20, do_sample=False)
        assert out[0, prompt.shape[1] :].tolist() == ids_of(record["response"], end=True)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_the_loss_of_a_step_is_that_of_separate_sequences_in_transformers(
    project: Project, aggregation: str
) -> None:
    config = project.config("sft", train__batch_size=5, sft__aggregation=aggregation)
    sft.run(config, QUIET)
    losses = losses_by_hand("base", DEMONSTRATIONS)
    expected = torch.cat(losses).mean()
    if aggregation == "seq_mean":
        expected = torch.stack([loss.mean() for loss in losses]).mean()
    assert rows("runs/sft")[0]["loss/sft"] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean"])
def test_the_token_budget_changes_neither_losses_nor_weights(
    project: Project, aggregation: str
) -> None:
    found = []
    for budget in (1, 20, 100_000):
        config = project.config(
            "sft",
            output=f"runs/{budget}",
            sft__aggregation=aggregation,
            train__tokens_per_micro_batch=budget,
        )
        sft.run(config, QUIET)
        found.append((rows(f"runs/{budget}"), weights(f"runs/{budget}/model")))
    assert_equal(found[0], found[2], rtol=1e-10)
    assert_equal(found[1], found[2], rtol=1e-10)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_train_on_decides_which_turns_of_a_conversation_carry_loss(
    project: Project, train_on: str
) -> None:
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "fgh")]
    project.write(
        "chats.jsonl", [{"messages": [{"role": r, "content": text} for r, text in turns]}]
    )
    changes: dict[str, Any] = {"data.train": "chats.jsonl", "data.chat_template": "chatml"}
    sft.run(project.config("sft", sft__train_on=train_on, train__max_steps=1, **changes), QUIET)
    ids: list[int] = []
    marks: list[bool] = []
    for n, (role, text) in enumerate(turns):
        opening = ids_of(f"<|im_start|>{role}\n")
        answer = ids_of(f"{text}<|im_end|>")
        ids += opening + answer + ids_of("\n") * (n < 3)
        counts = role == "assistant" and (train_on == "assistant" or n == 3)
        marks += [False] * len(opening) + [counts] * len(answer) + [False] * (n < 3)
    logp = logps(policy("base"), ids)
    chosen = torch.tensor(marks[1:]) if train_on != "all" else torch.ones(len(ids) - 1).bool()
    assert rows("runs/sft")[0]["loss/sft"] == pytest.approx(float(-logp[chosen].mean()), rel=1e-9)


def batches_of(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The sequences of every micro-batch that the stage packs, as they come."""
    seen: list[list[list[int]]] = []
    real = stages.sft.pack

    def pack(examples: Any) -> Any:
        seen.append([example.ids.tolist() for example in examples])
        return real(examples)

    monkeypatch.setattr(stages.sft, "pack", pack)
    return seen


def test_the_pretraining_share_mixes_its_number_of_documents_into_every_step(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = batches_of(monkeypatch)
    pretrain = {"sft.pretrain.data": "documents.jsonl", "sft.pretrain.share": 0.4}
    sft.run(project.config("sft", train__batch_size=5, **pretrain), QUIET)
    z = ids_of("z")[0]
    assert [len(batch) for batch in seen] == [5, 4, 5]
    assert [sum(z in ids for ids in batch) for batch in seen] == [2, 2, 2]
    documents = [tuple(ids) for batch in seen for ids in batch if z in ids]
    assert len(set(documents[:5])) == 5, "a document came twice before all had come once"


def test_with_pretraining_an_epoch_still_shows_every_demonstration(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = batches_of(monkeypatch)
    pretrain = {"sft.pretrain.data": "documents.jsonl", "sft.pretrain.share": 0.5}
    config = project.config(
        "sft", train__max_steps=None, train__epochs=2, train__batch_size=4, **pretrain
    )
    result = sft.run(config, QUIET)
    z = ids_of("z")[0]
    shown = [tuple(ids) for batch in seen for ids in batch if z not in ids]
    assert result.step == 6  # two demonstrations a step: 2 + 2 + 1, twice
    assert len(set(shown[:5])) == 5
    assert len(shown) == 10
    assert rows("runs/sft")[-1]["records"] == 10
    assert rows("runs/sft")[-1]["epoch"] == 2.0


def test_pretraining_documents_carry_loss_on_all_their_tokens_but_the_first(
    project: Project,
) -> None:
    project.write("one.jsonl", [{"prompt": "ab:", "response": "cd"}])
    project.write("text.jsonl", [{"text": "zabc"}])
    changes = {"data.train": "one.jsonl", "sft.pretrain.data": "text.jsonl"}
    sft.run(project.config("sft", train__batch_size=2, sft__pretrain__share=0.5, **changes), QUIET)
    document = -logps(policy("base"), ids_of("zabc", end=True))
    (answer,) = losses_by_hand("base", [{"prompt": "ab:", "response": "cd"}])
    expected = torch.cat([document, answer]).mean()
    assert rows("runs/sft")[0]["loss/sft"] == pytest.approx(float(expected), rel=1e-9)


def test_a_last_partial_batch_is_averaged_over_its_own_tokens(project: Project) -> None:
    config = project.config("sft", train__batch_size=2, train__learning_rate=0.0)
    sft.run(config, QUIET)
    steps = rows("runs/sft")
    assert [row["records"] for row in steps] == [2, 4, 5]
    losses = losses_by_hand("base", DEMONSTRATIONS)
    pairs = {
        round(float(torch.cat([a, b]).mean()), 9) for a in losses for b in losses if a is not b
    }
    assert round(steps[0]["loss/sft"], 9) in pairs
    assert round(steps[1]["loss/sft"], 9) in pairs
    assert round(steps[2]["loss/sft"], 9) in {round(float(loss.mean()), 9) for loss in losses}


def test_fewer_records_than_a_batch_make_one_step_an_epoch(project: Project) -> None:
    config = project.config("sft", train__max_steps=None, train__epochs=3, train__batch_size=50)
    assert sft.run(config, QUIET).step == 3
    assert [row["records"] for row in rows("runs/sft")] == [5, 10, 15]
    assert [row["epoch"] for row in rows("runs/sft")] == [1.0, 2.0, 3.0]


def test_max_steps_run_past_the_last_epoch(project: Project) -> None:
    config = project.config("sft", train__max_steps=5, train__epochs=1, train__batch_size=4)
    assert sft.run(config, QUIET).step == 5
    assert rows("runs/sft")[-1]["epoch"] == 2.5


def test_a_limit_reads_the_first_records_only(project: Project) -> None:
    sft.run(project.config("sft", data__limit=3, train__batch_size=9), QUIET)
    expected = torch.cat(losses_by_hand("base", DEMONSTRATIONS[:3])).mean()
    assert rows("runs/sft")[0]["loss/sft"] == pytest.approx(float(expected), rel=1e-9)
    assert run_json("runs/sft")["data"][0]["records"] == 3


def test_no_step_at_all_is_refused(project: Project) -> None:
    with pytest.raises(InvalidConfig, match=r"train\.max_steps"):
        project.config("sft", train__max_steps=0)
    project.write("demonstrations.jsonl", [{"prompt": "a", "response": ""}])
    with pytest.raises(DataError):
        sft.run(project.config("sft"), QUIET)
    assert not (project.folder / "runs/sft/model").exists()


def test_the_learning_rate_of_each_step_is_in_its_row(project: Project) -> None:
    config = project.config(
        "sft", train__max_steps=5, train__learning_rate=1.0, train__warmup_steps=3
    )
    sft.run(config, QUIET)
    found = [row["optim/lr"] for row in rows("runs/sft")]
    # Warm-up from a tenth of the peak; then half a cosine between the peak and a tenth of it.
    assert found == pytest.approx([0.1, 0.55, 1.0, 1.0, 0.55], rel=1e-12)


def test_dropout_is_on_in_training_and_set_by_the_config(project: Project) -> None:
    project.model("gpt2", "gpt2", dropout=0.0, dtype=torch.float64)
    plain = project.config("sft", model="gpt2", output="runs/plain", train__batch_size=5)
    wet = project.config(
        "sft", model="gpt2", output="runs/wet", train__batch_size=5, train__dropout=0.3
    )
    sft.run(plain, QUIET)
    sft.run(wet, QUIET)
    expected = float(torch.cat(losses_by_hand("gpt2", DEMONSTRATIONS)).mean())
    assert rows("runs/plain")[0]["loss/sft"] == pytest.approx(expected, rel=1e-9)
    assert rows("runs/wet")[0]["loss/sft"] != pytest.approx(expected, rel=1e-3)


def test_a_preset_s_dropout_is_told_to_be_left_where_the_family_has_none(project: Project) -> None:
    told = Listener()
    sft.run(project.config("sft", preset="instructgpt", train__max_steps=1), told)
    assert "llama models have no residual dropout: the preset's is left" in told.notes


def test_an_output_with_a_space_is_quoted_in_the_next_command(project: Project) -> None:
    told = sft.run(project.config("sft", output="runs/my sft", train__max_steps=1), QUIET)
    assert shlex.split(told.next)[-1] == "model=runs/my sft"


def test_the_model_folder_says_what_the_next_stage_needs(project: Project) -> None:
    sft.run(project.config("sft"), QUIET)
    told = identity("runs/sft/model")
    assert told["kind"] == "policy"
    assert told["stop_ids"] == [END_ID]
    assert told["pad_id"] == 0
    assert told["parent"]["path"] == "base"
