"""docs/guarantees.md names tests that exist, and leaves out nothing that must hold."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
NAME = re.compile(r"(?P<file>tests/[\w/]+\.py)::(?P<test>test_\w+)(?P<case>\[.+\])?")
WORDS = 25  # of a sentence at most

GROUPS = [
    "Numbers",
    "Resume",
    "Files",
    "Data",
    "Models handed on",
    "Errors",
    "Processes",
    "Security",
    "Memory and disk",
]
MUST_HOLD = {
    # words of the sentence: the test that guards it
    # padding and the end of a text
    "what is padding": "test_an_end_token_equal_to_the_padding_token_keeps_its_loss",
    "exactly one end token": "test_one_batch_is_overfitted_and_the_model_stops_by_itself",
    "last real token": (
        "test_invariant_9_a_score_is_the_same_alone_batched_padded_packed_and_in_a_tree"
    ),
    "one in the prompt": "test_stop_tokens_in_the_prompt_end_nothing",
    "special tokens": "test_special_tokens_agree_in_memory_and_in_every_saved_folder",
    # templates and tokenising
    "the same ids": "test_all_three_stages_read_a_prompt_as_the_same_ids",
    "the seam": "test_prompt_and_answer_are_tokenised_apart_where_the_tokenizer_would_merge",
    "without a chat template": (
        "test_messages_without_a_template_are_refused_before_any_weight_is_read"
    ),
    "end of turn": "test_the_end_of_turn_of_a_template_carries_loss_ends_rollouts_and_is_saved",
    "template call": ("test_a_prompt_has_the_ids_of_the_template_call_and_its_mask_their_number"),
    # loss
    "cut into micro-batches": "test_the_token_budget_changes_neither_losses_nor_weights",
    "each read once": "test_invariant_7_k_answers_are_read_once_each_however_many_pairs",
    "not nan": "test_loss_over_nothing_is_zero_with_zero_gradient",
    "whole optimiser steps": (
        "test_logging_saving_and_schedule_count_optimiser_steps_whatever_the_micro_batches"
    ),
    # resume and checkpoints
    "last of an epoch": "test_invariant_12_a_stop_after_any_step_leaves_no_trace",
    "file operation": "test_whatever_operation_goes_wrong_what_was_there_before_is_whole",
    "rotation": "test_the_oldest_go_and_neither_the_newest_nor_the_best",
    "reward head": "test_a_reward_model_without_its_head_is_refused",
    "tied": "test_tied_embeddings_stay_tied_and_are_written_once",
    "invalid generation settings": (
        "test_invalid_generation_settings_of_the_base_model_are_repaired"
    ),
    "nothing but the model folder": (
        "test_each_stage_needs_nothing_but_the_model_folder_of_the_one_before"
    ),
    # ppo
    "first ratio": "test_with_learning_rate_0_every_ratio_is_1_and_no_weight_moves",
    "fp32 or wider": "test_half_precision_logits_give_float32_log_probabilities",
    "sampling temperature": "test_log_probabilities_are_taken_at_the_sampling_temperature",
    "reference and reward model": (
        "test_invariant_11_reference_and_reward_model_stay_bit_identical_without_gradient"
    ),
    "padding, whatever stands in it": "test_invariant_4_padding_changes_no_number",
    "end token alone": (
        "test_empty_and_end_token_only_answers_give_finite_numbers_and_their_share"
    ),
    "clip fraction": "test_every_metric_of_the_stage_is_in_the_rows",
    "plain ppo": "test_invariant_10_terms_with_a_vanishing_weight_are_as_good_as_absent",
    "kl coefficient": "test_a_fixed_coefficient_stays_and_an_adaptive_one_follows_the_kl",
    "not finite": "test_a_loss_that_breaks_stops_the_run_and_names_step_and_quantity",
    # data
    "utf-8": "test_files_are_utf8_whatever_the_locale",
    "file, line and field": "test_a_wrong_field_is_named_with_its_place",
    "on the next run": ("test_a_changed_file_takes_effect_even_with_size_and_time_unchanged"),
    # processes, small runs
    "uneven": "test_invariant_5_two_processes_compute_what_one_computes",
    "main process": "test_only_the_main_process_is_heard",
    "less than a batch": "test_fewer_records_than_a_batch_make_one_step_an_epoch",
    "default settings": "test_every_stage_runs_on_a_cpu_with_its_default_settings",
    # config and command line
    "whole config": "test_a_mistake_is_named_with_its_place_and_what_would_be_right",
    "as people write them": "test_numbers_are_taken_as_people_write_them",
    "non-empty output folder": (
        "test_a_non_empty_folder_is_refused_and_overwriting_waits_until_the_run_begins"
    ),
    "without a terminal": "test_the_reporter_fits_the_terminal",
    "exit code that is not 0": ("test_each_user_error_ends_with_its_exit_code_and_no_traceback"),
    # evaluation
    "evaluation repeats itself": (
        "test_an_evaluation_leaves_random_streams_and_weights_and_repeats_itself"
    ),
    "unseen rankings": "test_held_out_figures_of_a_run_are_those_of_its_model",
}


class Guarantee(NamedTuple):
    """A row of the page: its sentence and the tests that it names."""

    sentence: str
    tests: tuple[str, ...]


def guarantees() -> list[Guarantee]:
    """The rows of all tables of the page."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    promised = [row for row in rows if row[0] not in ("guarantee", "---")]
    return [Guarantee(text, tuple(re.findall("`([^`]+)`", cell))) for text, cell in promised]


@lru_cache
def found_in(file: str) -> dict[str, bool]:
    """The test functions of a file, and whether each is parametrised; nothing is run."""
    path = ROOT / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {
        node.name: any("parametrize" in ast.unparse(d) for d in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def exists(name: str) -> bool:
    """Whether a name such as ``tests/a.py::test_b`` or ``tests/a.py::test_b[case]`` is a test."""
    found = NAME.fullmatch(name)
    if found is None:
        return False
    tests = found_in(found["file"])
    return tests.get(found["test"], False) if found["case"] else found["test"] in tests


def test_every_test_that_the_page_names_exists() -> None:
    named = [name for guarantee in guarantees() for name in guarantee.tests]
    assert len(named) > 150
    assert [name for name in named if not exists(name)] == []


def test_every_guarantee_is_one_short_sentence_with_its_tests() -> None:
    for sentence, tests in guarantees():
        assert tests, sentence
        assert sentence.endswith("."), sentence
        assert ". " not in sentence, sentence
        assert len(sentence.split()) <= WORDS, sentence


def test_the_page_has_every_group() -> None:
    found = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == GROUPS


@pytest.mark.parametrize("words", MUST_HOLD)
def test_what_must_hold_is_on_the_page_with_the_test_that_guards_it(words: str) -> None:
    guards = [
        name.partition("::")[2]
        for sentence, tests in guarantees()
        if words in sentence.lower()
        for name in tests
    ]
    assert MUST_HOLD[words] in guards


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("tests/test_guarantees.py::test_the_page_has_every_group", True),
        ("tests/test_guarantees.py::test_a_name_of_no_test_is_noticed", True),
        ("tests/test_guarantees.py::test_a_name_of_no_test_is_noticed[any case]", True),
        ("tests/test_guarantees.py::test_the_page_has_every_group[of no case]", False),
        ("tests/test_guarantees.py::test_that_is_not_there", False),
        ("tests/test_nowhere.py::test_the_page_has_every_group", False),
        ("tests/test_guarantees.py::exists", False),
        ("tests/test_guarantees.py", False),
    ],
)
def test_a_name_of_no_test_is_noticed(name: str, known: bool) -> None:
    assert exists(name) == known


@pytest.mark.parametrize("page", ["README.md", "docs/pipeline.md"])
def test_the_page_is_linked(page: str) -> None:
    assert "guarantees.md)" in (ROOT / page).read_text(encoding="utf-8")
