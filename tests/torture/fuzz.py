"""Bad input: valid configs, data and model files with something changed, read in this process.

Whatever comes of an input, it is no traceback and no exit code 1: it is read, or it is refused with
one of the codes of a user's mistake. A config goes through the command line (``config show``);
records through reading, checking and tokenising; the small files of runs and models through the
functions that read them.
"""

from __future__ import annotations

import io
import json
import os
import random
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.torture import mutate
from tests.torture.server import PATIENCE, Child

ROOT = Path(__file__).parents[2]
KINDS = ("demonstrations", "rankings", "prompts")
TURNS = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
RECORDS: tuple[dict[str, Any], ...] = (
    {"prompt": "ab:", "response": "cd"},
    {"prompt": TURNS[:1], "response": "cd"},
    {"messages": TURNS},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": " b"},
    {"instruction": "a", "input": "c", "output": "b"},
    {"instruction": "a", "context": "c", "response": "b"},
    {"text": "abc"},
    {"prompt": "a", "responses": [{"text": "b", "rank": 2}, {"text": "c", "rank": 1, "score": 5}]},
    {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5},
    {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "no"}]},
    {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    {"prompt": "a", "answers": [{"answer": "b", "rank": 2.0}, {"answer": "c", "rank": 1.0}]},
    {"instruction": "a", "completions": [{"response": "b", "overall_score": 3}, {"response": "c",
     "overall_score": "N/A"}]},
    {"question": {"full_text": "a"}, "answer_0": "b", "answer_1": "c", "score_0": 1.0,
     "score_1": -1.0},
    {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 1, "post_id": "x",
     "score_A": 3, "score_B": 1},
    {"info": {"id": "x", "post": "a"}, "summaries": [{"text": "b"}, {"text": "c"}], "choice": 1},
    {"message_tree_id": "x", "prompt": {"text": "a", "role": "prompter", "replies": [
        {"text": "b", "role": "assistant", "rank": 0, "replies": []},
        {"text": "c", "role": "assistant", "rank": 1, "replies": []}]}},
    {"conversation_a": TURNS, "conversation_b": TURNS, "winner": "model_a"},
    {"prompt": "a"},
)  # fmt: skip


@dataclass
class Report:
    """What a campaign came to."""

    inputs: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> int:
        """Inputs that ended in a traceback or with exit code 1."""
        return len(self.wrong)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self) | {"failures": self.failures}


def campaign(
    folder: Path, *, seconds: float, seed: int, workers: int = 2, least: int = 0
) -> Report:
    """Read spoilt input until the time is over.

    Args:
        folder: an empty one, to work in.
        seconds: how long.
        seed: of the changes.
        workers: processes that do it beside each other.
        least: inputs of each worker, however long they take.
    """
    started = time.monotonic()
    children = []
    for n in range(workers):
        place = folder / f"worker-{n}"
        place.mkdir(parents=True)
        chance = random.Random(seed * workers + n)

        def work(place: Path = place, chance: random.Random = chance) -> Any:
            return _inputs(place, chance, started + seconds, least).to_dict()

        children.append(Child(folder, f"worker-{n}", work))
    total = Report()
    for ended in [child.wait(seconds + 10 * PATIENCE) for child in children]:
        if ended.value is None:
            total.wrong.append(f"a worker ended with {ended.code}: {ended.text[-3000:]}")
            continue
        for name in ("inputs", "codes"):
            counts = getattr(total, name)
            for key, number in ended.value[name].items():
                counts[key] = counts.get(key, 0) + number
        total.wrong += ended.value["wrong"]
    total.seconds = round(time.monotonic() - started, 1)
    return total


def _inputs(folder: Path, chance: random.Random, until: float, least: int) -> Report:
    """Input of every kind in turn."""
    os.chdir(folder)
    os.environ["RLHF_CACHE"] = str(folder / "cache")
    readers: list[tuple[str, Callable[[random.Random], int]]] = [
        ("config", Configs(folder).read),
        ("override", Configs(folder).override),
        *[("data", Data(folder).read)] * 6,
        *[("small file", Small(folder).read)] * 2,
    ]
    report = Report()
    while time.monotonic() < until or sum(report.inputs.values()) < least:
        for name, read in readers:
            code = _guarded(name, read, chance, report)
            report.inputs[name] = report.inputs.get(name, 0) + 1
            report.codes[str(code)] = report.codes.get(str(code), 0) + 1
    return report


def _guarded(
    name: str, read: Callable[[random.Random], int], chance: random.Random, report: Report
) -> int:
    """Read one input; what is no user's error is kept with the state that made it."""
    try:
        code = read(chance)
    except Exception:
        report.wrong.append(f"{name}: {traceback.format_exc()[-2500:]}")
        return 1
    return code


def _config(chance: random.Random, file: Path, *overrides: str) -> int:
    """Read a config; one in ten through the whole command line, which costs most of the time."""
    from rlhf_cli.config_file import load

    if chance.random() < 0.1:
        return _command("config", "show", "--json", "--", str(file), *overrides)
    return _refused(lambda: load(str(file), list(overrides), stage=None))


def _command(*argv: str) -> int:
    """A command line, which must not end with 1 or a traceback."""
    from rlhf_cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(argv)
    if code == 1 or "Traceback" in err.getvalue():
        raise AssertionError(f"{argv}: exit {code}\n{err.getvalue()}")
    json.loads(out.getvalue())
    if "\x1b" in out.getvalue() + err.getvalue():
        raise AssertionError(f"{argv}: an escape reached the terminal\n{err.getvalue()!r}")
    return code


def _refused(work: Callable[[], Any]) -> int:
    """A piece of work that succeeds or ends with a user's error."""
    from rlhf_cli import failure
    from stages.errors import RlhfError

    try:
        work()
    except RlhfError as error:
        if not (error.what and error.do):
            raise AssertionError(f"an error without a word or advice: {error}") from error
        json.dumps(failure.as_text(failure.explain(error)))
        return error.exit_code
    return 0


class Configs:
    """Configs of all stages."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "config.yaml"
        found = sorted((ROOT / "configs").rglob("*.yaml"))
        self.good = [path.read_bytes() for path in found]
        self.values = [_plain(path) for path in found]

    def read(self, chance: random.Random) -> int:
        """A config file with bytes or values changed."""
        n = chance.randrange(len(self.good))
        if chance.random() < 0.5:
            self.file.write_bytes(mutate.data(self.good[n], chance))
        else:
            self.file.write_text(mutate.as_json(mutate.value(self.values[n], chance)))
        return _config(chance, self.file)

    def override(self, chance: random.Random) -> int:
        """A setting of the command line."""
        n = chance.randrange(len(self.good))
        self.file.write_bytes(self.good[n])
        places = [*_dotted(self.values[n])]
        key = chance.choice(places)
        if chance.random() < 0.2:
            key = mutate.data(key.encode(), chance).decode("utf-8", "replace")
        text = mutate.as_json(chance.choice(mutate.VALUES))
        if chance.random() < 0.5:
            text = mutate.data(text.encode(), chance).decode("utf-8", "replace")
        return _config(chance, self.file, f"{key}={text}")


def _plain(path: Path) -> Any:
    from ruamel.yaml import YAML

    return json.loads(json.dumps(YAML(typ="safe").load(path.read_text(encoding="utf-8"))))


def _dotted(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [prefix]
    return [
        place
        for key, inner in values.items()
        for place in _dotted(inner, f"{prefix}.{key}" if prefix else key)
    ]


class Data:
    """Files of records in every format."""

    def __init__(self, folder: Path) -> None:
        from stages.data.templates import make_codec
        from tests.stages.project import letter_tokenizer

        self.folder, self.count = folder, 0
        tokenizer = letter_tokenizer()
        self.codecs = [
            make_codec(tokenizer, chat_template="chatml", as_messages=False),
            make_codec(tokenizer, chat_template=None, as_messages=False),
        ]

    def read(self, chance: random.Random) -> int:
        """A file of a few records, one of them or its bytes changed, as a stage reads it."""
        from stages.data.store import LoadSpec, load

        good = chance.choice(RECORDS)
        records = [good] * chance.randint(1, 3)
        if chance.random() < 0.6:
            records[-1] = mutate.value(good, chance)
        text = "\n".join(map(mutate.as_json, records)) + "\n"
        whole = chance.random() < 0.2
        content = (mutate.as_json(records) if whole else text).encode("utf-8")
        if chance.random() < 0.4:
            content = mutate.data(content, chance)
        self.count += 1
        file = self.folder / f"data-{self.count % 50}.{'json' if whole else 'jsonl'}"
        file.write_bytes(content)
        spec = LoadSpec(
            kind=chance.choice(KINDS), data=_section(file, chance), max_positions=256, workers=1
        )
        return _refused(lambda: load(spec, chance.choice(self.codecs)))


def _section(file: Path, chance: random.Random) -> Any:
    return SimpleNamespace(
        train=str(file),
        eval=chance.choice((None, 0.5)),
        format="auto",
        columns=None,
        as_messages=False,
        chat_template=None,
        max_prompt_tokens=128,
        max_response_tokens=128,
        overlong=chance.choice(("drop", "truncate")),
        max_dropped=chance.choice((0.5, 1.0)),
        limit=None,
    )


class Small:
    """The small files of a run, a checkpoint and a model."""

    def __init__(self, folder: Path) -> None:
        from stages.models.folder import Identity, write_identity
        from stages.runtime import checkpoint, run_dir

        self.run, self.model = folder / "run", folder / "model"
        self.model.mkdir()
        self.run.mkdir()
        write_identity(self.model, Identity("policy", "sft", "t", "v", False, (1,), 0))
        (self.model / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
        (self.model / "manifest.json").write_text('{"a": {"bytes": 1, "xxh3_128": "x"}}')
        run_dir.write_run(self.run, {"status": "done", "data": [], "parents": [], "config": {}})
        self.checkpoint = checkpoint.save(
            self.run / "checkpoints", 1, checkpoint.Saved({}, {"step": 1, "window": {}})
        )
        (self.run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss/sft": 0.5}\n')

    def read(self, chance: random.Random) -> int:
        """One of them with something changed, through the function that reads it."""
        from stages.models import folder as model_folder
        from stages.models import manifest
        from stages.runtime import checkpoint, metrics, run_dir

        readers: dict[Path, Callable[[], Any]] = {
            self.model / "rlhf.json": lambda: model_folder.read_identity(self.model),
            self.model / "config.json": lambda: model_folder.read_config(self.model),
            self.model / "manifest.json": lambda: manifest.require(self.model),
            self.run / "run.json": lambda: run_dir.read_run(self.run),
            self.checkpoint / "manifest.json": lambda: checkpoint.load(self.checkpoint),
            self.checkpoint / "state.json": lambda: checkpoint.load(self.checkpoint),
            self.run / "metrics.jsonl": lambda: metrics.cut_back(self.run / "metrics.jsonl", 1, 0),
        }
        file = chance.choice(sorted(readers))
        good = file.read_bytes()
        try:
            if chance.random() < 0.5:
                file.write_bytes(mutate.data(good, chance))
            else:
                file.write_text(mutate.as_json(mutate.value(json.loads(good), chance)))
            return _refused(readers[file])
        finally:
            file.write_bytes(good)
