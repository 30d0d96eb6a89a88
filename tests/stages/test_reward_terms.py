"""A reward of several terms: each is judged, weighed, logged and remembered as its config says."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from rlhf_cli.app import main
from stages import check, ppo
from stages.errors import ConfigError, Interrupted, TrainingError
from stages.runtime.reporter import SilentReporter
from tests.families import save_tiny
from tests.runtime.reward_server import scores, serving
from tests.stages.project import TOKENIZER, Listener, Project
from tests.stages.results import assert_equal, classifier, left_behind, raw_score, rows, samples
from tests.stages.test_processes import require_ppo_of_two_equal
from tests.stages.test_resume import stopped_at
from tests.stages.watch import watch_steps

QUIET = SilentReporter()
LENGTH = {"type": "rule", "rule": "length", "target": 3}
PYTHON = "def score(prompts, answers, records):\n    return [len(a) - 2.0 for a in answers]\n"


def config(project: Project, reward: Any, **changes: Any) -> Any:
    """A small run of ppo with this reward, its critic from the policy."""
    return project.config("ppo", **{"critic.init": "policy", **changes}, reward=reward)


@pytest.fixture
def python_file(project: Project) -> str:
    (project.folder / "mine.py").write_text(PYTHON)
    return "mine.py"


def test_one_model_in_a_list_is_the_run_of_that_model_alone(project: Project) -> None:
    ppo.run(project.config("ppo"), QUIET)
    plain = rows("runs/ppo")
    changes = {"critic.init": "reward", "output": "runs/list"}
    ppo.run(config(project, [{"path": "reward"}], **changes), QUIET)
    assert_equal(rows("runs/list"), plain)
    assert_equal(left_behind("runs/list"), left_behind("runs/ppo"))


def test_the_score_is_the_weighted_sum_of_clipped_terms(
    project: Project, python_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    reward = [
        {"path": "reward", "weight": 2.0, "clip": 0.1},
        {**LENGTH, "weight": -0.5},
        {"type": "python", "path": python_file, "name": "long"},
    ]
    ppo.run(config(project, reward, evaluate__every=1, data__eval=0.3), QUIET)
    judge, rollout = classifier("reward"), seen[0].rollout
    expected: dict[str, list[float]] = {"model": [], "rule": [], "long": []}
    for prompt, answer, total in zip(
        rollout.prompts, rollout.answers, rollout.scores.tolist(), strict=True
    ):
        text = len([token for token in answer.tolist() if token > 3])  # the letters
        by_model = raw_score(judge, [*prompt.tolist(), *answer.tolist()])
        found = (by_model, -abs(text - 3) / 3, text - 2.0)
        for name, value in zip(expected, found, strict=True):
            expected[name].append(value)
        cut = max(-0.1, min(0.1, by_model))
        assert total == pytest.approx(2.0 * cut - 0.5 * found[1] + found[2], rel=1e-6)
    row = rows("runs/ppo", "train")[0]
    for name, values in expected.items():
        assert row[f"score/{name}"] == pytest.approx(statistics.fmean(values), rel=1e-6)
    assert row["objective/score"] == pytest.approx(float(rollout.scores.mean()))
    assert row["score/long_missing"] == 0.0
    assert "score/model_missing" not in row
    assert {"eval/score_model", "eval/score_rule", "eval/score_long"} <= set(
        rows("runs/ppo", "eval")[0]
    )
    first = samples("runs/ppo")[0]
    assert set(first["scores"]) == {"model", "rule", "long"}
    assert first["scores"]["model"] == pytest.approx(expected["model"][0], rel=1e-6)


def test_moments_run_over_the_rollouts_and_evaluations_leave_them(
    project: Project, python_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    reward = {"type": "python", "path": python_file, "normalise": True}
    changes = {"evaluate.every": 1, "data.eval": 0.3, "train.batch_size": 6}
    ppo.run(config(project, reward, **changes, **{"train.total_episodes": 18}), QUIET)
    so_far: list[float] = []
    for step in seen:
        terms = step.rollout.terms[:, 0].tolist()
        so_far += terms
        mean, deviation = statistics.fmean(so_far), statistics.pstdev(so_far)
        for score, value in zip(step.rollout.scores.tolist(), terms, strict=True):
            assert score == pytest.approx((value - mean) / deviation, rel=1e-6)
    kept = left_behind("runs/ppo")["state"]["stage"]["moments"]["python"]
    assert kept[:2] == pytest.approx([18, statistics.fmean(so_far)])


def test_a_stop_within_a_rollout_leaves_no_trace_in_normalised_scores(
    project: Project, python_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = [{"type": "python", "path": python_file, "normalise": True}, {"path": "reward"}]
    changes = {"train.total_episodes": 24, "checkpoint.every": 1}
    ppo.run(config(project, reward, output="runs/whole", **changes), QUIET)
    asked = config(project, reward, output="runs/cut", **changes)
    with monkeypatch.context() as patch:
        stopped_at(3, patch)  # within the second rollout
        with pytest.raises(Interrupted):
            ppo.run(asked, QUIET)
    ppo.run(asked, QUIET, resume=True)
    assert_equal(left_behind("runs/cut"), left_behind("runs/whole"))


def test_the_guard_that_stops_a_run_does_not_count_its_rollout_twice(
    project: Project, python_file: str
) -> None:
    reward = {"type": "python", "path": python_file, "normalise": True}
    changes = {"train.total_episodes": 12, "kl.coef": 0.0}
    ppo.run(config(project, reward, output="runs/whole", **changes), QUIET)
    low = config(project, reward, output="runs/cut", **changes, **{"kl.stop_above": 1e-9})
    with pytest.raises(TrainingError, match="stop_above"):
        ppo.run(low, QUIET)
    ppo.run(config(project, reward, output="runs/cut", **changes), QUIET, resume=True)
    assert_equal(left_behind("runs/cut"), left_behind("runs/whole"))


def test_an_answer_without_a_judgement_is_counted_and_left_to_the_other_terms(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_steps(monkeypatch)
    code = "def score(p, answers, r):\n    return [None if n % 2 else 5 for n, _ in enumerate(p)]\n"
    (project.folder / "half.py").write_text(code)
    reward = [{"type": "python", "path": "half.py"}, LENGTH]
    ppo.run(config(project, reward), QUIET)
    rollout = seen[0].rollout
    row = rows("runs/ppo", "train")[0]
    assert row["score/python_missing"] == 3.0
    assert row["score/python"] == 5.0
    judged = torch.where(rollout.judged[:, 0], 5.0 + rollout.terms[:, 1], rollout.terms[:, 1])
    torch.testing.assert_close(rollout.scores, judged)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("return [None] * len(p)", "no term of the reward has a judgement of an answer to"),
        ("raise ValueError('no')", "raised ValueError: no for the prompt at prompts.jsonl:"),
        ("return [0.0]", "returned 1 scores for"),
    ],
)
def test_a_term_that_fails_stops_the_run_with_its_state_saved(
    code: str, words: str, project: Project, capsys: Any
) -> None:
    """In the second rollout; corrected, the run goes on to what it would have been."""
    good = "def score(p, a, r):\n    return [float(len(x)) for x in a]\n"
    (project.folder / "mine.py").write_text(good)
    reward = {"type": "python", "path": "mine.py"}
    ppo.run(config(project, reward, output="runs/whole"), QUIET)
    (project.folder / "mine.py").write_text(
        f"n = 0\ndef score(p, a, r):\n    global n\n    n += 1\n    if n > 1:\n        {code}\n"
        "    return [float(len(x)) for x in a]\n"
    )
    with pytest.raises(TrainingError) as caught:
        ppo.run(config(project, reward), QUIET)
    assert words in caught.value.what
    assert json.loads(Path("runs/ppo/run.json").read_text())["status"] == "failed"
    assert left_behind("runs/ppo")["state"]["iteration"] == 1
    (project.folder / "mine.py").write_text(good)
    ppo.run(config(project, reward), QUIET, resume=True)
    assert_equal(left_behind("runs/ppo"), left_behind("runs/whole"))


@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_evaluation_that_a_reward_failed_in_is_made_good_on_resume(
    fails_at: int, project: Project
) -> None:
    """The first call evaluates, the second judges a rollout, the third evaluates again."""
    good = "def score(p, a, r):\n    return [float(len(x)) for x in a]\n"
    bad = f"n = 0\ndef score(p, a, r):\n    global n\n    n += 1\n    assert n < {fails_at}\n"
    reward = {"type": "python", "path": "mine.py", "normalise": True}
    changes = {"data.eval": 0.3, "evaluate.every": 1}
    (project.folder / "mine.py").write_text(good)
    ppo.run(config(project, reward, output="runs/whole", **changes), QUIET)
    (project.folder / "mine.py").write_text(bad + good.splitlines()[1] + "\n")
    with pytest.raises(TrainingError, match="AssertionError"):
        ppo.run(config(project, reward, **changes), QUIET)
    (project.folder / "mine.py").write_text(good)
    ppo.run(config(project, reward, **changes), QUIET, resume=True)
    assert_equal(rows("runs/ppo"), rows("runs/whole"))
    assert_equal(left_behind("runs/ppo"), left_behind("runs/whole"))


def test_records_are_the_lines_of_the_prompts(project: Project) -> None:
    lines = [{"prompt": "ab:", "answer": "c", "n": 1.5}, {"prompt": "b:", "answer": ["d", "e"]}]
    project.write("asked.jsonl", lines)
    code = (
        "import json\ndef score(prompts, answers, records):\n"
        "    json.dump(records, open('seen.json', 'w'))\n    return [0.0] * len(prompts)\n"
    )
    (project.folder / "mine.py").write_text(code)
    reward = [
        {"type": "python", "path": "mine.py"},
        {"type": "rule", "rule": "exact_match", "field": "answer"},
    ]
    ppo.run(config(project, reward, **{"data.train": "asked.jsonl"}), QUIET)
    seen = json.loads(Path("seen.json").read_text())
    assert len(seen) == 6
    assert all(record in lines for record in seen)


def test_a_reward_model_of_another_tokenizer_reads_the_text(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, heard = watch_steps(monkeypatch), Listener()
    save_tiny(project.folder / "foreign", "gpt2", kind="reward", dtype=torch.float64, seed=3)
    ppo.run(config(project, {"path": "foreign"}), heard)
    assert any("foreign reads the text" in note for note in heard.notes)
    judge, theirs = classifier("foreign"), AutoTokenizer.from_pretrained("foreign")
    rollout = seen[0].rollout
    for prompt, answer, score in zip(
        rollout.prompts, rollout.answers, rollout.scores.tolist(), strict=True
    ):
        asked, said = (
            theirs(TOKENIZER.decode(ids, skip_special_tokens=True), add_special_tokens=False)
            for ids in (prompt, answer)
        )
        end = [theirs.eos_token_id] if answer[-1] == 1 else []
        ids = [*asked["input_ids"], *said["input_ids"], *end]
        assert score == pytest.approx(raw_score(judge, ids), rel=1e-6)


def test_a_server_scores_the_texts_of_a_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("urllib3")
    seen = watch_steps(monkeypatch)
    with serving(lambda _, body: scores([len(t) for t in body["responses"]])) as server:
        reward = {"type": "http", "url": server.url, "concurrency": 2, "name": "judge"}
        ppo.run(config(project, reward), QUIET)
    told = [len(text) for body in server.bodies[:2] for text in body["responses"]]
    assert len(told) == 6
    assert sorted(seen[0].rollout.scores.tolist()) == sorted(map(float, told))
    assert rows("runs/ppo", "train")[0]["score/judge"] == pytest.approx(sum(told) / 6)
    assert {"prompt": "ab:"} in server.bodies[0]["records"] + server.bodies[1]["records"]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [{}, {"lora.rank": 2}])
def test_two_processes_give_what_one_gives_with_every_kind_of_term(
    project: Project, python_file: str, adapters: dict[str, Any]
) -> None:
    save_tiny(project.folder / "foreign", "gpt2", kind="reward", dtype=torch.float64, seed=3)
    with serving(lambda _, body: scores([len(t) for t in body["responses"]])) as server:
        reward = [
            {"path": "reward", "weight": 2.0, "clip": 0.1},
            {"path": "foreign", "name": "foreign"},
            {"type": "python", "path": python_file, "normalise": True},
            {"type": "http", "url": server.url, "weight": 0.1},
            LENGTH,
        ]
        changes = {"reward": reward, "critic.init": "reward", **adapters}
        require_ppo_of_two_equal(project, **changes)
    names = {"model", "foreign", "python", "http", "rule"}
    assert {f"score/{name}" for name in names} <= rows("one", "train")[0].keys()


@pytest.mark.parametrize(
    ("reward", "where", "words"),
    [
        ({"type": "python", "path": "gone.py"}, "reward.path: gone.py", "cannot be read"),
        (
            [LENGTH, {"type": "rule", "rule": "exact_match", "field": "right"}],
            "reward.1.field: right",
            "no line of the prompts has such a field",
        ),
    ],
)
def test_what_can_be_known_at_start_is_refused_by_stage_and_check(
    reward: Any, where: str, words: str, project: Project
) -> None:
    asked = config(project, reward)
    for run in (lambda: ppo.run(asked, QUIET), lambda: check.run(asked, QUIET)):
        with pytest.raises(ConfigError) as caught:
            run()
        assert caught.value.where == where
        assert words in caught.value.what
    assert not Path("runs").exists()


def test_check_shows_every_reward_model_and_a_run_may_not_write_into_one(project: Project) -> None:
    reward = [{"path": "reward"}, {"path": "reward", "name": "again", "weight": -1.0}]
    report = check.run(config(project, reward), QUIET)
    assert {"reward_model", "reward_again"} <= set(report["models"])
    known = {"type": "model", "from": "reward", "reads": "token ids"}
    assert report["reward"] == {
        "model": {**known, "weight": 1.0},
        "again": {**known, "weight": -1.0},
    }
    with pytest.raises(ConfigError, match=r"the folder of reward\.0\.path"):
        check.run(config(project, reward, output="reward"), QUIET)


def test_terms_can_be_changed_on_the_command_line(project: Project, capsys: Any) -> None:
    (project.folder / "mine.py").write_text(PYTHON)
    (project.folder / "p.yaml").write_text(
        "stage: ppo\nmodel: base\ndata: {train: prompts.jsonl, eval: null}\noutput: o\n"
        "critic: {init: policy}\nreward:\n  - {path: nowhere}\n  - {type: python, path: mine.py}\n"
    )
    argv = ["ppo", "p.yaml", "reward.0.path=reward", "reward.1.weight=0.5", "--json"]
    small = ["rollout.batch_size=4", "rollout.max_new_tokens=3", "train.total_episodes=4"]
    assert main([*argv, *small, "--require", "score/python<=1e9"]) == 0
    assert "score/python" in json.loads(capsys.readouterr().out)["metrics"]


def test_an_encoder_may_be_the_reward_but_no_critic(project: Project) -> None:
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = BertConfig(vocab_size=len(TOKENIZER), intermediate_size=32, num_labels=1, **settings)
    BertForSequenceClassification(encoder).save_pretrained("encoder")
    TOKENIZER.save_pretrained("encoder")
    asked = config(project, {"path": "encoder"})
    assert check.run(asked, QUIET)["models"]["reward"]["layout"] == "as transformers runs it"
    ppo.run(asked, QUIET)
    row = rows("runs/ppo", "train")[0]
    assert row["score/model_missing"] == 0.0
    assert row["objective/score"] == row["score/model"]
    changes = {"critic.init": "reward", "output": "runs/critic"}
    as_critic = config(project, {"path": "encoder"}, **changes)
    with pytest.raises(ConfigError, match="vocabulary"):
        ppo.run(as_critic, QUIET)
