"""``rlhf evaluate``: every figure against separate forward passes and counting by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import stages.evaluate
from stages import reward_model, sample
from stages.answer_figures import Diversity, mean_interval
from stages.answers import Drawing
from stages.batch import Group
from stages.comparison import Names
from stages.config import ModelReward, PythonReward, RuleReward
from stages.config.rewards import placed
from stages.errors import CheckpointError, ConfigError, DataError, Interrupted, TrainingError
from stages.evaluate import PolicyOptions, RewardOptions, of_policy, of_reward
from stages.models.folder import Identity
from stages.pairs import Accuracies, Verdicts
from stages.runtime.reporter import SilentReporter
from stages.sample import SampleOptions
from tests.families import save_tiny
from tests.stages.project import (
    END_ID,
    PROMPTS,
    RANKINGS,
    TOKENIZER,
    Listener,
    Project,
    enter,
    ids_of,
    make_models,
    many_answers,
    rankings,
)
from tests.stages.results import classifier, logps, policy, raw_score, rows, scored_by_hand

QUIET = SilentReporter()
K, TOKENS, TAU, SEED = 3, 5, 0.8, 2
DRAWING = Drawing(k=K, max_new_tokens=TOKENS, temperature=TAU, seed=SEED)
TOLD = [("web", "ann"), ("web", "bob"), (None, "bob"), ("book", None)]
REWARD = placed(ModelReward(path="reward"))
TIED = {"prompt": "ea:", "responses": [("a", 1), ("b", 1)]}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Two policies, a reward model, and rankings that say whence they are and by whom."""
    with pytest.MonkeyPatch.context() as patch:
        made = enter(tmp_path_factory.mktemp("evaluate"), patch)
        make_models(made)
        made.model("other", dtype=torch.float64, seed=7)
        lines = rankings([*RANKINGS, TIED])
        for line, (source, labeler) in zip(lines, TOLD, strict=False):
            line.update(source=source, labeler=labeler)
        made.write("judged.jsonl", lines)
        yield made


def of_rankings(file: str = "judged.jsonl", **changes: Any) -> dict[str, Any]:
    return of_reward(RewardOptions("reward", file, **{"precision": "fp64", **changes}), QUIET)


def of_prompts(
    names: Names = Names("base", "other", REWARD),  # noqa: B008  (it is frozen)
    reporter: Any = QUIET,
    **changes: Any,
) -> dict[str, Any]:
    options = {"drawing": DRAWING, "precision": "fp64", **changes}
    return of_policy(PolicyOptions(names, "prompts.jsonl", **options), reporter)


@pytest.fixture(scope="module")
def compared(project: Project) -> dict[str, Any]:
    """Two policies on all prompts, scored."""
    return of_prompts()


# A reward model on rankings.


def strict_gaps(answers: list[tuple[float, int]]) -> list[float]:
    """Score differences of the strict pairs, better minus worse."""
    return [a - b for (a, i), (b, j) in permutations(answers, 2) if i < j]


def test_accuracies_margin_and_log_loss_are_those_of_separate_passes(project: Project) -> None:
    found = of_rankings()
    gaps = [strict_gaps(answers) for answers in scored_by_hand("reward")]
    every = np.concatenate(gaps)
    assert found["rankings"] == 4
    assert found["pairs"] == len(every) == 3 + 5 + 1 + 2
    assert found["accuracy"] == pytest.approx(np.mean(every > 0), rel=1e-12)
    assert found["margin"] == pytest.approx(np.mean(every), rel=1e-9)
    assert found["log_loss"] == pytest.approx(np.mean(np.logaddexp(0, -every)), rel=1e-9)

    def right(*chosen: int) -> Any:
        return pytest.approx(np.mean(np.concatenate([gaps[n] for n in chosen]) > 0), rel=1e-12)

    assert found["accuracy_by_k"] == {"2": right(2), "3": right(0, 3), "4": right(1)}
    assert found["by_source"] == {"web": right(0, 1), "book": right(3)}
    assert found["by_labeler"] == {"bob": right(1, 2), "ann": right(0)}
    assert list(found["by_labeler"]) == ["bob", "ann"]


def test_calibration_is_that_of_bins_counted_by_hand(project: Project) -> None:
    found = of_rankings()
    gaps = np.concatenate([strict_gaps(answers) for answers in scored_by_hand("reward")])
    confidence = 1 / (1 + np.exp(-np.abs(gaps)))
    places = np.minimum(((confidence - 0.5) * 20).astype(int), 9)
    bins, ece = [], 0.0
    for place in np.unique(places):
        inside = places == place
        n, sure, right = inside.sum(), confidence[inside].mean(), (gaps[inside] > 0).mean()
        bins.append({"n": n, "confidence": sure, "accuracy": right})
        ece += n / len(gaps) * abs(right - sure)
    assert found["ece"] == pytest.approx(ece, rel=1e-9)
    assert [b["n"] for b in found["bins"]] == [b["n"] for b in bins]
    for told, expected in zip(found["bins"], bins, strict=True):
        assert told == pytest.approx(expected, rel=1e-9)


def test_the_longer_answer_wins_as_often_as_counted_by_hand(project: Project) -> None:
    # ab: cd < dcba, cd > e, dcba > e; b: d against cde, ba, eeee, and two against eeee;
    # cab: fg > e; d: ab and ba > a.
    right = [0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert of_rankings()["length_accuracy"] == pytest.approx(np.mean(right))


def test_equal_scores_are_wrong_and_equal_lengths_are_not_longer() -> None:
    verdicts, by_name = Verdicts(), Accuracies()
    group = Group(np.arange(2), tuple(np.arange(n) for n in (2, 2, 3)), (1, 2, 3))
    gaps = verdicts.add(group, np.array([1.0, 1.0, 0.95]))
    by_name.add("web", gaps)
    by_name.add(None, gaps)
    # (1, 2) scores and lengths equal; (1, 3) and (2, 3) score higher and are shorter.
    assert by_name.shares() == {"web": 2 / 3}
    assert verdicts.judgement().figures["eval/accuracy"] == 2 / 3
    assert verdicts.judgement().figures["eval/length_accuracy"] == 0


UTILITY = [[1, 0.5, 0], [0.5, 1, 0.5, 0], [0, 1], [0.75, 0.75, 0]]


def test_regret_without_scores_is_in_the_share_of_others_that_an_answer_beats(
    project: Project,
) -> None:
    lost = []
    for answers, worth in zip(scored_by_hand("reward"), UTILITY, strict=True):
        chosen = int(np.argmax([score for score, _ in answers]))
        lost.append(max(worth) - worth[chosen])
    found = of_rankings()
    assert found["best_of_n_regret"] == pytest.approx(np.mean(lost), abs=1e-12)
    assert found["regret_unit"] == "rank"


def scored_file(project: Project, *, whole: bool) -> list[list[float]]:
    """The rankings with scores that order them as the ranks do, perhaps without the last one."""
    worth = [[10.0 - 3 * rank for _, rank in record["responses"]] for record in RANKINGS]
    lines = rankings()
    for line, values in zip(lines, worth, strict=True):
        for answer, value in zip(line["responses"], values, strict=True):
            answer["score"] = value
    if not whole:
        del lines[-1]["responses"][0]["score"]
    project.write("scored.jsonl", lines)
    return worth


def test_regret_is_in_the_scores_of_the_file_where_every_answer_has_one(project: Project) -> None:
    worth = scored_file(project, whole=True)
    lost = []
    for answers, values in zip(scored_by_hand("reward"), worth, strict=True):
        chosen = int(np.argmax([score for score, _ in answers]))
        lost.append(max(values) - values[chosen])
    found = of_rankings("scored.jsonl")
    assert found["best_of_n_regret"] == pytest.approx(np.mean(lost), rel=1e-12)
    assert found["regret_unit"] == "score"
    scored_file(project, whole=False)
    assert of_rankings("scored.jsonl")["regret_unit"] == "rank"


def test_the_figures_of_a_held_out_file_are_those_that_training_wrote(project: Project) -> None:
    project.write("held_out.jsonl", rankings(many_answers()))
    config = project.config("reward_model", **{"data.eval": "held_out.jsonl"})
    selected = reward_model.run(config, QUIET).selected
    assert selected is not None
    (told,) = (row for row in rows(config.output, "eval") if row["step"] == selected["step"])
    options = RewardOptions("runs/reward_model", "held_out.jsonl", precision="fp64")
    found = of_reward(options, QUIET)
    names = {
        **{f"eval/accuracy_k{k}": v for k, v in found["accuracy_by_k"].items()},
        **{f"eval/{name}": found[name] for name in ("accuracy", "margin", "ece")},
        "eval/loss": found["log_loss"],
        "eval/length_accuracy": found["length_accuracy"],
    }
    assert names == pytest.approx({name: told[name] for name in names}, rel=1e-9)


def test_rankings_without_a_strict_pair_are_left_out_and_said_so(project: Project) -> None:
    listener = Listener()
    of_reward(RewardOptions("reward", "judged.jsonl", precision="fp64"), listener)
    assert listener.warnings == ["4 of 5 records, format canonical; left out: 1 all answers tied"]
    project.write("tied.jsonl", rankings([TIED]))
    with pytest.raises(DataError, match="all answers tied") as caught:
        of_rankings("tied.jsonl")
    assert "two or more answers of unlike rank" in caught.value.do
    assert of_rankings(limit=2)["rankings"] == 2


# A policy on prompts.


def sampled_by(name: str) -> list[tuple[list[int], list[list[int]]]]:
    """Prompt and answers as ids, as ``rlhf sample`` draws them."""
    lines: list[str] = []
    options = SampleOptions(
        name,
        "prompts.jsonl",
        k=K,
        max_new_tokens=TOKENS,
        temperature=TAU,
        seed=SEED,
        precision="fp64",
    )
    sample.run(options, QUIET, write=lines.append)
    found = [json.loads(line) for line in lines]
    return [(ids_of(r["prompt"]), [a["ids"] for a in r["responses"]]) for r in found]


def scores_of(name: str) -> np.ndarray:
    model = classifier("reward")
    return np.array([[raw_score(model, p + a) for a in row] for p, row in sampled_by(name)])


def kl_by_hand(name: str, other: str) -> float:
    """Mean of log π − log π_other over the policy's own answers, by whole passes."""
    models = policy(name), policy(other)
    ratios = []
    for prompt, answers in sampled_by(name):
        for answer in answers:
            own, its = (
                float(logps(m, prompt + answer, temperature=TAU)[len(prompt) - 1 :].sum())
                for m in models
            )
            ratios.append(own - its)
    return float(np.mean(ratios))


def test_scores_and_wins_are_those_of_the_answers_that_sample_draws(
    compared: dict[str, Any],
) -> None:
    own, other = scores_of("base"), scores_of("other")
    assert compared["prompts"] == len(own) == 6
    assert compared["score"]["mean"] == pytest.approx(own.mean(), rel=1e-9)
    assert compared["against"]["score"]["mean"] == pytest.approx(other.mean(), rel=1e-9)
    assert compared["win_rate"] == np.mean((own > other) + 0.5 * (own == other))
    assert compared["ties"] == np.mean(own == other)
    assert 0 < compared["win_rate"] < 1
    assert compared["score"]["low"] < own.mean() < compared["score"]["high"]


def test_both_divergences_are_log_ratios_of_the_own_answers(compared: dict[str, Any]) -> None:
    assert compared["kl"] == pytest.approx(kl_by_hand("base", "other"), rel=1e-9)
    assert compared["kl_reverse"] == pytest.approx(kl_by_hand("other", "base"), rel=1e-9)
    assert compared["kl"] != pytest.approx(compared["kl_reverse"], rel=1e-2)


def test_the_best_of_n_curve_is_the_mean_over_subsets_with_its_kl(
    compared: dict[str, Any],
) -> None:
    own = scores_of("base")
    assert [row["n"] for row in compared["best_of_n"]] == [1, 2]
    best = [max(pair) for row in own for pair in combinations(row, 2)]
    assert compared["best_of_n"][0]["score"] == pytest.approx(own.mean(), rel=1e-9)
    assert compared["best_of_n"][1]["score"] == pytest.approx(np.mean(best), rel=1e-9)
    assert [row["kl"] for row in compared["best_of_n"]] == pytest.approx([0.0, np.log(2) - 0.5])
    asked = of_prompts(Names("base", None, REWARD), best_of=(3,))["best_of_n"]
    assert asked == [
        {"n": 3, "score": pytest.approx(own.max(axis=1).mean()), "kl": np.log(3) - 2 / 3}
    ]


def test_length_end_and_distinct_n_are_counted_on_the_ids(compared: dict[str, Any]) -> None:
    answers = [answer for _, row in sampled_by("base") for answer in row]
    assert compared["length"] == np.mean([len(answer) for answer in answers])
    assert compared["ended"] == np.mean([answer[-1] == END_ID for answer in answers])
    bare = [answer[:-1] if answer[-1] == END_ID else answer for answer in answers]
    for n in (1, 2, 3):
        grams = [tuple(ids[i : i + n]) for ids in bare for i in range(len(ids) - n + 1)]
        assert compared["distinct_n"][str(n)] == len(set(grams)) / len(grams)


def test_equal_policies_tie_everywhere_and_have_no_divergence(project: Project) -> None:
    found = of_prompts(Names("base", "base", REWARD))
    assert (found["win_rate"], found["ties"]) == (0.5, 1.0)
    assert (found["kl"], found["kl_reverse"]) == (0.0, 0.0)
    assert found["score"] == found["against"]["score"]


def test_what_was_not_asked_for_is_null(project: Project) -> None:
    alone = of_prompts(Names("base"))
    unscored = ("score", "win_rate", "ties", "best_of_n")
    uncompared = ("win_rate", "ties", "kl", "kl_reverse", "against")
    assert {name for name, value in alone.items() if value is None} == {*unscored, *uncompared}
    judged = of_prompts(Names("base", None, REWARD))
    assert {name for name, value in judged.items() if value is None} == {*uncompared}
    beside = of_prompts(Names("base", "other"))
    assert {name for name, value in beside.items() if value is None} == {*unscored}
    assert beside["against"]["score"] is None


def test_figures_do_not_depend_on_how_records_are_cut_into_chunks(
    project: Project, compared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = of_rankings()
    monkeypatch.setattr(stages.evaluate, "CHUNK", 2)
    assert flat(of_prompts()) == pytest.approx(flat(compared), rel=1e-9)
    assert flat(of_rankings()) == pytest.approx(flat(whole), rel=1e-9)


def test_no_more_than_a_chunk_of_rankings_is_read_at_once(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = stages.evaluate.read

    def read(groups: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(len(groups))
        return real(groups, *rest, **options)

    monkeypatch.setattr(stages.evaluate, "read", read)
    monkeypatch.setattr(stages.evaluate, "CHUNK", 3)
    of_rankings()
    assert sizes == [3, 1]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every number by the way that leads to it."""
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: v for n, part in inner for key, v in flat(part, f"{name}/{n}").items()}
    return {} if isinstance(value, str) or value is None else {name: value}


def test_an_evaluation_repeats_itself_and_leaves_files_and_random_state_alone(
    project: Project, compared: dict[str, Any]
) -> None:
    def files() -> dict[str, tuple[int, int]]:
        every = [p for p in project.folder.rglob("*") if "cache" not in p.parts and p.is_file()]
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in every}

    before, state = files(), torch.get_rng_state()
    assert of_prompts() == compared
    assert of_rankings() == of_rankings()
    assert files() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["prompts", "rankings"])
def test_an_interrupt_ends_between_two_chunks(
    kind: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.evaluate, "CHUNK", 2)
    listener = Listener(stop_at=2)
    run = {
        "prompts": lambda: of_prompts(Names("base"), listener),
        "rankings": lambda: of_reward(RewardOptions("reward", "judged.jsonl"), listener),
    }[kind]
    with pytest.raises(Interrupted, match=rf"after 2 of \d {kind}") as caught:
        run()
    assert caught.value.exit_code == 143


# Rewards from anywhere.


def test_a_reward_model_of_another_vocabulary_reads_the_text(project: Project) -> None:
    save_tiny(Path("foreign-reward"), "llama", kind="reward", dtype=torch.float64)
    listener = Listener()
    found = of_prompts(Names("base", None, placed(ModelReward(path="foreign-reward"))), listener)
    tokenizer = AutoTokenizer.from_pretrained("foreign-reward")
    model = classifier("foreign-reward")
    scores = []
    for prompt, row in sampled_by("base"):
        for answer in row:
            ended = answer[-1] == END_ID
            text = TOKENIZER.decode([i for i in answer if i > 3])
            ids = [*tokenizer(TOKENIZER.decode(prompt))["input_ids"], *tokenizer(text)["input_ids"]]
            scores.append(raw_score(model, ids + [tokenizer.eos_token_id] * ended))
    assert found["score"]["mean"] == pytest.approx(np.mean(scores), rel=1e-9)
    assert listener.notes == ["foreign-reward reads the text, in its own template and tokens"]


def test_weighted_terms_add_up_and_rules_need_no_model(project: Project) -> None:
    rule = RuleReward(type="rule", rule="length", target=4, weight=2.0)
    terms = placed((ModelReward(path="reward", weight=0.5), rule))
    found = of_prompts(Names("base", None, terms))
    lengths = [
        sum(token > 3 for token in answer) for _, row in sampled_by("base") for answer in row
    ]
    ruled = [-abs(length - 4) / 4 for length in lengths]
    expected = 0.5 * scores_of("base").mean() + 2.0 * np.mean(ruled)
    assert found["score"]["mean"] == pytest.approx(expected, rel=1e-9)
    alone = of_prompts(Names("base", None, placed((rule,))))
    assert alone["score"]["mean"] == pytest.approx(2.0 * np.mean(ruled), rel=1e-9)


def test_a_python_reward_reads_the_fields_of_the_prompts_lines(project: Project) -> None:
    code = "def score(prompts, answers, records):\n    return [r['worth'] for r in records]\n"
    Path("worth.py").write_text(code)
    project.write("worth.jsonl", [{**line, "worth": n} for n, line in enumerate(PROMPTS)])
    terms = placed(PythonReward(type="python", path="worth.py"))
    options = PolicyOptions(Names("base", None, terms), "worth.jsonl", drawing=Drawing(2, 2))
    assert of_policy(options, QUIET)["score"]["mean"] == np.mean(range(len(PROMPTS)))


def test_without_a_run_no_term_is_normalised_and_that_is_said(
    project: Project, compared: dict[str, Any]
) -> None:
    listener = Listener()
    terms = placed(ModelReward(path="reward", normalise=True))
    assert of_prompts(Names("base", "other", terms), listener) == compared
    assert listener.notes == ["reward.normalise is left out: there is no run to normalise over"]


def test_an_answer_that_nothing_judges_ends_the_evaluation(project: Project) -> None:
    exact = RuleReward(type="rule", rule="exact_match", field="solution")
    with pytest.raises(TrainingError, match="no term of the reward has a judgement"):
        of_prompts(Names("base", None, placed(exact)))


# What is refused.


def test_models_of_the_wrong_kind_are_refused(project: Project) -> None:
    for names, words in (
        (Names("base", "reward"), "is a reward model, and a policy is needed"),
        (Names("base", None, placed(ModelReward(path="other"))), "has no reward head"),
        (Names("base", "nowhere"), "no such folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            of_prompts(names)


def test_an_encoder_is_not_held_against_rankings(project: Project) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(TOKENIZER), num_hidden_layers=1, num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained("encoder")
    TOKENIZER.save_pretrained("encoder")
    with pytest.raises(CheckpointError, match="not read its score at the last token"):
        of_reward(RewardOptions("encoder", "judged.jsonl"), QUIET)


def test_another_vocabulary_of_the_other_policy_is_refused(project: Project) -> None:
    save_tiny(Path("foreign"), "llama")
    with pytest.raises(CheckpointError, match="its vocabulary is not that of base") as caught:
        of_prompts(Names("base", "foreign"))
    assert caught.value.where == "foreign"


def test_policies_that_were_trained_on_other_templates_are_refused(project: Project) -> None:
    from stages import sft

    turns = {"data.chat_template": "chatml", "data.as_messages": True, "train.max_steps": 1}
    sft.run(project.config("sft", output="runs/turns", **turns), QUIET)
    sft.run(project.config("sft", output="runs/plain", **{"train.max_steps": 1}), QUIET)
    with pytest.raises(CheckpointError, match="reads prompts by another template"):
        of_prompts(Names("runs/turns", "runs/plain"))
    # A folder of another tool does not say how it is asked: it is asked as the other one.
    found = of_prompts(Names("base", "runs/turns"))
    turned = of_prompts(Names("runs/turns", "base"))
    assert found["kl"] == pytest.approx(turned["kl_reverse"], rel=1e-12)


def test_a_critic_is_warned_of_wherever_it_judges(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Identity("critic", "ppo", "", "", False, (END_ID,), 0)
    monkeypatch.setattr(stages.evaluate, "identity_of", lambda _: told)
    listener = Listener()
    of_reward(RewardOptions("reward", "rankings.jsonl"), listener)
    of_prompts(Names("base", None, REWARD), listener, drawing=Drawing(1, 2))
    assert len(listener.warnings) == 2
    assert all("reward is a critic" in text for text in listener.warnings)


def test_scores_that_are_not_finite_end_the_evaluation(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = lambda _: lambda groups: torch.full(groups.ranks.shape, float("nan"))  # noqa: E731
    monkeypatch.setattr(stages.evaluate, "scorer", broken)
    with pytest.raises(TrainingError, match="12 of its scores are not finite"):
        of_rankings()


def test_a_curve_needs_scores_and_enough_answers(project: Project) -> None:
    with pytest.raises(ConfigError, match="nothing scores them"):
        of_prompts(Names("base"), best_of=(2,))
    with pytest.raises(ConfigError, match="best of 4 cannot be told from 3 answers") as caught:
        of_prompts(best_of=(1, 4))
    assert caught.value.do == "add --k 4"


def test_a_cut_distribution_is_warned_of_where_it_spoils_the_divergence(project: Project) -> None:
    listener = Listener()
    of_prompts(Names("base", "other"), listener, drawing=Drawing(1, 2, top_p=0.5))
    assert any("--top-p" in text for text in listener.warnings)
    listener = Listener()
    of_prompts(Names("base"), listener, drawing=Drawing(1, 2, top_p=0.5))
    assert listener.warnings == []


# Figures alone.


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(3).normal(1.5, 2.0, size=(100, 40))
    found = [mean_interval(values, seed=n) for n, values in enumerate(draws)]
    covered = np.mean([i.low < 1.5 < i.high for i in found if i.low and i.high])
    assert 0.88 <= covered <= 0.99
    width = np.mean([i.high - i.low for i in found if i.low and i.high])
    assert width == pytest.approx(2 * 1.96 * 2.0 / np.sqrt(40), rel=0.1)


def test_an_interval_is_seeded_and_one_prompt_has_none() -> None:
    values = np.arange(9.0)
    assert mean_interval(values, seed=1) == mean_interval(values, seed=1)
    assert mean_interval(values, seed=1) != mean_interval(values, seed=2)
    assert mean_interval(values[3:4], seed=1) == (3.0, None, None)


def test_distinct_n_counts_over_all_answers_and_packs_ids_without_collision() -> None:
    seen = Diversity()
    seen.add([np.array([1, 2, 1, 2]), np.array([2, 1])])
    big = 1 << 20  # (big 0) and (0 1) would be one number, had an id 20 bits
    seen.add([np.array([], dtype=np.int64), np.array([big, 0, 1])])
    # 1-grams: 1 2 1 2 2 1 | big 0 1; 2-grams: 12 21 12 21 | (big 0) (0 1);
    # 3-grams: 121 212 | (big 0 1).
    assert seen.shares() == {"1": 4 / 9, "2": 4 / 6, "3": 1.0}
    assert Diversity().shares() == {"1": None, "2": None, "3": None}
