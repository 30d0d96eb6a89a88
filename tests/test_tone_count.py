"""The demo's task: its rule, its sloppy grammar, its labeller."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "data_samples" / "tone_count.py"
PROMPT = "Be polite: mention the kettle in 6 words."


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tone_count", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tone_count = load()


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names
    assert names <= set(sys.stdlib_module_names)


def test_prompt_is_read_back() -> None:
    assert tone_count.parse_prompt(PROMPT) == ("polite", "kettle", 6)
    assert tone_count.parse_prompt("Sound plain: note the hat with 10 words.") == (
        "plain",
        "hat",
        10,
    )


@pytest.mark.parametrize("prompt", ["", "Hello there.", "Be polite in 6 words.", PROMPT + PROMPT])
def test_a_foreign_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="not a tone-count prompt"):
        tone_count.true_score(prompt, " Please.")


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        # noun, words, tone, form
        (" Please keep the kettle warm today.", (1, 1, 1, 1)),
        ("Please keep the kettle warm today.", (1, 1, 1, 1)),
        (" Please keep the kettle warm today!", (1, 1, 1, 1)),
        (" Please keep the lamp warm today.", (0, 1, 1, 1)),
        (" Please keep the kettle warm.", (1, 2 / 3, 1, 1)),
        (" Please keep the kettle warm by our door.", (1, 1 / 3, 1, 1)),
        (" Please keep this kettle.", (1, 1 / 3, 1, 1)),
        (" Keep the kettle.", (1, 0, 0, 1)),
        (" The big kettle looks warm today.", (1, 1, 0, 1)),
        (" Hooray, the kettle is warm today!", (1, 1, 0, 1)),
        (" Please, wow, the kettle is warm.", (1, 1, 0, 1)),
        (" please keep the kettle warm today.", (1, 1, 1, 2 / 3)),
        (" Please keep the kettle warm today", (1, 1, 1, 2 / 3)),
        (" Please keep. The kettle warm today.", (1, 1, 1, 2 / 3)),
        (" Please keep the kettle warm um.", (1, 1, 1, (5 / 6 + 2) / 3)),
        (" Please keep the kettle kettle today.", (1, 1, 1, 5 / 6)),
        (" Kettle kettle", (1, 0, 0, (1 + 1 + 0) / 3 / 2)),
        (" Pleasekettle.", (0, 0, 0, 2 / 3)),
        ("", (0, 0, 0, 0)),
        (" . !", (0, 0, 0, 0)),
    ],
)
def test_hand_worked_scores_of_a_polite_request(response: str, parts: tuple[float, ...]) -> None:
    assert tone_count.score_parts(PROMPT, response) == pytest.approx(parts)
    assert tone_count.true_score(PROMPT, response) == pytest.approx(sum(parts) / 4)


@pytest.mark.parametrize(
    ("tone", "response", "right"),
    [
        ("cheerful", " Hooray, the kettle is warm today!", 1),
        ("cheerful", " Wow, this old kettle stays clean.", 1),
        ("cheerful", " Kindly keep the kettle warm today.", 0),
        ("plain", " Keep the old kettle warm today.", 1),
        ("plain", " Please keep the kettle warm today.", 0),
    ],
)
def test_tone_is_right_if_its_markers_and_no_others_occur(
    tone: str, response: str, right: int
) -> None:
    prompt = f"Be {tone}: mention the kettle in 6 words."
    assert tone_count.score_parts(prompt, response).tone == right


def test_every_prompt_has_its_own_words_and_can_be_answered_perfectly() -> None:
    rng = random.Random(0)
    prompts = tone_count.all_prompts()
    assert len(set(prompts)) == len(prompts)
    assert len(prompts) >= tone_count.DEMONSTRATIONS + tone_count.PROMPTS + tone_count.EVAL_PROMPTS
    for prompt in prompts:
        answer = tone_count.write_answer(tone_count.parse_prompt(prompt), rng)
        assert tone_count.true_score(prompt, answer) == 1.0
        assert answer[0] == " "
        assert answer[1] != " "


def test_no_sloppiness_breaks_nothing_and_full_sloppiness_breaks_everything() -> None:
    rng = random.Random(0)
    for prompt in tone_count.all_prompts()[::40]:
        request = tone_count.parse_prompt(prompt)
        neat = tone_count.write_sloppy_answer(request, 0.0, rng)
        sloppy = tone_count.write_sloppy_answer(request, 1.0, rng)
        assert tone_count.true_score(prompt, neat) == 1.0
        broken = tone_count.score_parts(prompt, sloppy)
        assert broken.noun == 0
        assert broken.tone == 0
        assert broken.words < 1
        assert broken.form < 1


def test_make_writes_the_promised_files_and_repeats_itself(tmp_path: Path) -> None:
    for name in ("first", "again"):
        assert tone_count.main(["make", str(tmp_path / name)]) == 0
    assert tone_count.main(["make", str(tmp_path / "other"), "--seed", "1"]) == 0
    counts = {"demonstrations": 3000, "prompts": 1500, "eval_prompts": 256, "pretrain": 512}
    for name, count in counts.items():
        first, again, other = (
            (tmp_path / folder / f"{name}.jsonl").read_bytes()
            for folder in ("first", "again", "other")
        )
        assert first == again
        assert first != other
        assert first.count(b"\n") == count


def test_the_same_seed_gives_the_same_data_in_every_process(tmp_path: Path) -> None:
    """Set order changes with the hash seed; the files must not."""
    digests = set()
    for hash_seed in ("1", "2"):
        folder = tmp_path / hash_seed
        command = [sys.executable, str(SCRIPT), "make", str(folder)]
        subprocess.run(command, check=True, env={"PYTHONHASHSEED": hash_seed})
        digests.add(b"".join(path.read_bytes() for path in sorted(folder.iterdir())))
    assert len(digests) == 1


def test_no_prompt_is_made_twice(tmp_path: Path) -> None:
    tone_count.main(["make", str(tmp_path)])
    names = ("demonstrations", "prompts", "eval_prompts")
    prompts = [line["prompt"] for name in names for line in read(tmp_path / f"{name}.jsonl")]
    assert len(set(prompts)) == len(prompts)


def test_demonstrations_leave_room_for_improvement(tmp_path: Path) -> None:
    tone_count.main(["make", str(tmp_path)])
    lines = read(tmp_path / "demonstrations.jsonl")
    scores = [tone_count.true_score(line["prompt"], line["response"]) for line in lines]
    assert 0.70 < fmean(scores) < 0.80
    assert fmean(score == 1 for score in scores) > 0.15


def sampled(tmp_path: Path) -> Path:
    """Answers as `rlhf sample` writes them."""
    answers = [
        (" The lamp.", ["cut"]),
        (" Please keep the kettle warm today.", []),
        (" Please keep the kettle warm.", []),
        (" Kindly leave this kettle dry now.", []),
    ]
    responses = [
        {"text": text, "ids": [7, position], "vocabulary": "abc", "flags": flags}
        for position, (text, flags) in enumerate(answers)
    ]
    line = {"id": "q1", "prompt": PROMPT, "responses": responses, "source": "sample"}
    return write(tmp_path / "answers.jsonl", [line])


def test_label_ranks_by_true_score_with_ties_and_keeps_every_field(tmp_path: Path) -> None:
    answers, ranked = sampled(tmp_path), tmp_path / "rankings.jsonl"
    assert tone_count.main(["label", str(answers), "--output", str(ranked), "--noise", "0"]) == 0
    (line,) = read(ranked)
    assert [answer.pop("rank") for answer in line["responses"]] == [3, 1, 2, 1]
    assert [line] == read(answers)


def test_label_writes_to_standard_output_without_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tone_count.main(["label", str(sampled(tmp_path)), "--noise", "0"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert [answer["rank"] for answer in json.loads(line)["responses"]] == [3, 1, 2, 1]


def test_noise_swaps_close_answers_sometimes_and_keeps_equal_ones_tied() -> None:
    texts = (
        " Please keep the kettle warm today.",  # 1
        " Kindly leave this kettle dry now.",  # 1
        " Please keep the kettle warm um.",  # 0.986
        " Lamp",  # 0.167
    )
    line = {"prompt": PROMPT, "responses": [{"text": text} for text in texts]}
    ranked = tone_count.label([line] * 200, 0.05, seed=0)
    ranks = [[answer["rank"] for answer in line["responses"]] for line in ranked]
    assert all(first == second for first, second, _, _ in ranks)
    assert all(last == 3 for *_, last in ranks)
    # P(swap) = Φ(−(1/4 · 1/18) / (0.05 · √2)) = Φ(−0.196) = 0.42, its error over 200 lines 0.035
    assert fmean(third == 1 for _, _, third, _ in ranks) == pytest.approx(0.42, abs=0.11)


def test_labels_follow_from_the_seed() -> None:
    line = {
        "prompt": PROMPT,
        "responses": [
            {"text": " Please keep the kettle warm um."},
            {"text": " Kindly keep kettle."},
        ],
    }
    first, again, other = (tone_count.label([line] * 50, 0.5, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_score_prints_means_over_all_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = {"prompt": PROMPT, "response": " Please keep the kettle warm today.", "step": 3}
    path = write(tmp_path / "mixed.jsonl", [*read(sampled(tmp_path)), single])
    assert tone_count.main(["score", str(path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    # " The lamp." has only its form; " Please keep the kettle warm." lacks a third of the words
    parts = {"noun": 4 / 5, "words": (3 + 2 / 3) / 5, "tone": 4 / 5, "form": 1.0}
    assert printed["answers"] == 5
    assert printed["parts"] == pytest.approx(parts, abs=1e-6)
    assert printed["true_score"] == pytest.approx(fmean(parts.values()), abs=1e-6)
    assert printed["distinct"] == 0.8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no answers in this file"),
        ('{"prompt": ', ":1: not an answers line"),
        ("[]", ":1: not an answers line"),
        ('{"prompt": "Hello.", "response": "Hi."}', ":1: not an answers line"),
        (json.dumps({"prompt": PROMPT, "responses": []}), ":1: not an answers line"),
        (json.dumps({"prompt": PROMPT, "responses": [{"text": None}]}), ":1: not an answers line"),
    ],
)
def test_an_unusable_file_ends_with_its_place_and_exit_code_3(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(content, encoding="utf-8")
    assert tone_count.main(["score", str(path)]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert str(path) in printed.err
    assert message in printed.err


def test_a_missing_file_ends_with_exit_code_3(tmp_path: Path) -> None:
    assert tone_count.main(["label", str(tmp_path / "none.jsonl")]) == 3
