"""Two processes judge a share each, and what ends the judging of one ends both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages import ppo
from stages.config import to_yaml
from stages.runtime.reporter import SilentReporter
from tests.stages.project import Project
from tests.stages.results import assert_equal, left_behind, rows, run_json, weights
from tests.stages.world import Job, start_world

pytestmark = pytest.mark.slow

CODE = (
    "import os\n"
    "def score(prompts, answers, records):\n"
    "    with open('calls.txt', 'a') as file:\n"
    "        file.write(f'{os.environ.get(\"RANK\")} {len(prompts)}\\n')\n"
    "    if os.path.exists('broken') and os.environ.get('RANK') == '1':\n"
    "        raise ValueError('only here')\n"
    "    return [len(a) + len(p) / 7 for a, p in zip(answers, prompts)]\n"
)
REWARD = [
    {"type": "python", "path": "mine.py", "normalise": True},
    {"type": "rule", "rule": "repetition", "n": 1, "weight": 0.5},
    {"path": "reward", "clip": 0.2},
]


def written(project: Project, output: str, **changes: Any) -> Any:
    values = {"critic.init": "policy", "rollout.batch_size": 7, "train.total_episodes": 14}
    config = project.config("ppo", output=output, reward=REWARD, **values, **changes)
    (project.folder / f"{output}.yaml").write_text(to_yaml(config))
    return config


def test_two_processes_score_as_one_and_stop_together_with_the_state_saved(
    project: Project,
) -> None:
    (project.folder / "mine.py").write_text(CODE)
    one = written(project, "one")
    written(project, "two")
    written(project, "three")
    ppo.run(one, SilentReporter())
    assert Path("calls.txt").read_text().split() == ["None", "7", "None", "7"]
    Path("calls.txt").unlink()
    world = start_world(project.folder, [Job(["ppo", "two.yaml"])])
    _, err = world.communicate(timeout=500)
    assert world.returncode == 0, err
    shares = [line.split() for line in Path("calls.txt").read_text().splitlines()]
    assert {rank for rank, _ in shares} == {"0", "1"}
    assert sum(int(count) for _, count in shares) == 14, "no answer is judged twice"
    assert_equal(rows("two"), rows("one"), rtol=1e-10)
    assert_equal(weights("two/model"), weights("one/model"), rtol=1e-8)

    Path("broken").touch()
    world = start_world(project.folder, [Job(["ppo", "three.yaml"], code=5)])
    _, err = world.communicate(timeout=500)
    assert world.returncode == 0, err
    assert "ValueError: only here for the prompt at prompts.jsonl:" in err
    told = run_json("three")
    assert (told["status"], told["error"]["kind"]) == ("failed", "training")
    Path("broken").unlink()
    ppo.run(written(project, "three"), SilentReporter(), resume=True)
    assert_equal(left_behind("three"), left_behind("one"), rtol=1e-10)
