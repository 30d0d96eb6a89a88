"""A run from opening to its end: what is written, what is gone on with, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from stages.config import SftConfig
from stages.errors import CheckpointError, ConfigError, Interrupted, TrainingError
from stages.models.folder import Identity
from stages.runtime import trackers
from stages.runtime.metrics import Window
from stages.runtime.opening import begin, opened, require_parents
from stages.runtime.optim import trainee, weights
from stages.runtime.processes import World
from stages.runtime.reporter import SilentReporter
from stages.runtime.resume import require_same_meaning
from stages.runtime.session import Progress, goal
from stages.runtime.signals import StopRequest
from stages.runtime.start import require_same_text
from tests.families import tiny_policy


class Listener(SilentReporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make(tmp_path):
    def config(**changes) -> SftConfig:
        values = {"stage": "sft", "model": str(tmp_path / "base"), "device": "cpu",
                  "data": {"train": "x.jsonl"}, "output": str(tmp_path / "run"),
                  "train": {"precision": "fp64"}}  # fmt: skip
        return SftConfig.model_validate(values | changes)

    return config


def run(config, *, resume=False, overwrite=False, reporter=None):
    return opened(config, reporter or Listener(), resume=resume, overwrite=overwrite)


def trained(config, seed: int = 0):
    return trainee(tiny_policy("gpt2", seed=seed), config.train)


def read(folder, name="run.json"):
    return json.loads((folder / name).read_text())


def rows(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


PROGRESS = Progress(
    step=7,
    records=70,
    iteration=2,
    selected={"step": 5, "by": "eval/loss", "value": 0.5},
    window=Window({"loss/sft": 3.0}, {"loss/sft": 2}),
    last={"loss/sft": 1.0},
    evaluation={"eval/loss": 0.5},
    stage={"kl_coef": 0.02},
)


def test_progress_and_weights_come_back_from_a_checkpoint(make, tmp_path):
    config = make(train={"precision": "fp64", "ema_decay": 0.5})
    with run(config) as session:
        begin(session)
        first = trained(config)
        session.restore(model=first)
        session.progress = Progress(**{**vars(PROGRESS), "seconds": 40.0})
        session.save({"rollout": {"ids": torch.arange(3)}})
    listener = Listener()
    with run(config, resume=True, reporter=listener) as session:
        begin(session)
        other = trained(config, seed=1)
        extra = session.restore(model=other)
        assert torch.equal(extra["rollout"]["ids"], torch.arange(3))
        assert asdict(session.progress) | {"seconds": 0} == asdict(PROGRESS)
        assert session.progress.seconds >= 40.0
        assert session.seconds > session.progress.seconds
        for name, p in weights(first).items():
            assert torch.equal(weights(other)[name], p)
            assert torch.equal(other.average[name], p)
    assert any("step 7" in note for note in listener.notes)


def test_rows_beyond_the_checkpoint_are_taken_back(make, tmp_path):
    config = make()
    with run(config) as session:
        begin(session)
        session.restore(model=trained(config))
        for step in (1, 2, 3):
            session.progress.step = step
            session.log("train", {"loss/sft": float(step)}, epoch=0.1)
            if step == 2:
                session.save()
    with run(config, resume=True) as session:
        begin(session)
        session.restore(model=trained(config))
        assert session.progress.step == 2
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_a_row_names_its_kind_and_place_and_leaves_undefined_numbers_out(make, tmp_path):
    with run(make()) as session:
        begin(session)
        session.progress.step, session.progress.records = 4, 12
        session.log("train", {"loss/sft": 0.5, "optim/lr": float("nan")}, epoch=0.25)
        session.log("eval", {"eval/loss": 2.0}, epoch=0.25)
    train, evaluation = rows(tmp_path / "run")
    assert {k: train[k] for k in ("kind", "step", "epoch", "records", "loss/sft")} == {
        "kind": "train", "step": 4, "epoch": 0.25, "records": 12, "loss/sft": 0.5,
    }  # fmt: skip
    assert "optim/lr" not in train
    assert train["seconds"] >= 0
    assert (evaluation["kind"], evaluation["eval/loss"]) == ("eval", 2.0)


def finish(session, step: int = 3):
    session.progress.step = step
    session.progress.last = {"loss/sft": 0.5}
    return session.finish("rlhf train-rm next.yaml")


def test_a_finished_run_is_done_at_once_when_it_is_resumed(make, tmp_path):
    with run(make()) as session:
        begin(session)
        result = finish(session)
    told = read(tmp_path / "run")
    assert (told["status"], told["step"], told["error"]) == ("done", 3, None)
    assert told["processes"] == 1
    assert told["precision"] == "fp64"
    assert told["config"]["stage"] == "sft"
    with run(make(), resume=True) as session:
        assert session.done == result
        assert session.done.status == "done"
    assert read(tmp_path / "run") == told


def test_a_finished_run_goes_on_when_more_is_asked_of_it(make):
    with run(make()) as session:
        begin(session)
        session.restore(model=trained(make()))
        session.progress.step = 3
        session.save()
        finish(session)
    longer = make(train={"precision": "fp64", "epochs": 9})
    assert goal(longer) != goal(make())
    with run(longer, resume=True) as session:
        assert session.done is None
        assert session.resume_from is not None
        assert session.resume_from.name == "step-000003"


def test_a_run_of_no_step_is_no_success(make):
    with run(make()) as session:
        begin(session)
        with pytest.raises(ConfigError, match="no optimiser step"):
            session.finish("")


def test_resume_starts_where_there_is_nothing_to_go_on_with(make):
    with run(make(), resume=True) as session:
        assert session.resume_from is None
        begin(session)
        session.log("train", {"loss/sft": 1.0})
    listener = Listener()
    with run(make(), resume=True, reporter=listener) as session:
        assert session.resume_from is None
        begin(session)
    assert any("nothing to resume" in note for note in listener.notes)
    assert not (session.folder / "metrics.jsonl").exists()


def test_a_non_empty_folder_is_refused_and_overwriting_waits_until_the_run_begins(make, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty") as caught, run(make()):
        pass
    assert caught.value.where == f"output: {folder}"
    with run(make(), overwrite=True) as session:
        assert (folder / "metrics.jsonl").exists()
        begin(session)
        assert not (folder / "metrics.jsonl").exists()
        assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.yaml", "model/notes.txt", "config.json"])
def test_a_folder_that_holds_no_run_is_not_written_over(make, tmp_path, name):
    theirs = tmp_path / "run" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    for flags in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(ConfigError, match="no run of rlhf") as caught, run(make(), **flags):
            pass
        assert "another folder" in caught.value.do
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [theirs]
    assert theirs.read_text() == "mine"


def test_a_log_file_in_the_output_folder_hinders_no_run_and_is_kept(make, tmp_path):
    log = tmp_path / "run" / "log.txt"
    log.parent.mkdir()
    log.write_text("job 7\n")
    for flags in ({"resume": True}, {"overwrite": True}):
        with run(make(), **flags) as session:
            begin(session)
    assert log.read_text() == "job 7\n"


def test_a_kill_while_an_earlier_run_is_replaced_leaves_none_of_its_checkpoints(
    make, tmp_path, monkeypatch
):
    with run(make()) as session:
        begin(session)
        session.progress.step = 3
        session.save()

    def killed(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("stages.runtime.run_dir.clear", killed)
    with pytest.raises(KeyboardInterrupt), run(make(seed=1), overwrite=True) as session:
        begin(session)
    monkeypatch.undo()
    with run(make(seed=1), resume=True) as session:
        assert session.resume_from is None
    assert not (tmp_path / "run" / ".old-checkpoints").exists()


def test_two_sessions_cannot_share_a_folder(make):
    with run(make()) as session:
        begin(session)
        with pytest.raises(ConfigError, match="another run"), run(make(), resume=True):
            pass


def test_an_error_is_told_in_run_json_and_a_mistake_before_the_start_is_not(make, tmp_path):
    def fail(*, begun: bool) -> None:
        with run(make()) as session:
            if begun:
                begin(session)
            raise TrainingError("step 3: broken", do="mend it")

    with pytest.raises(TrainingError):
        fail(begun=False)
    assert not (tmp_path / "run" / "run.json").exists()
    with pytest.raises(TrainingError):
        fail(begun=True)
    told = read(tmp_path / "run")
    assert told["status"] == "failed"
    assert told["error"] == {"kind": "training", "what": "step 3: broken", "do": "mend it"}


def test_a_signal_saves_and_ends_with_its_exit_code(make, tmp_path):
    config = make()
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with run(config) as session:
            begin(session)
            session.restore(model=trained(config))
            session.progress.step = 5
            session.take_steps()
            session.stop_if_asked()
            os.kill(os.getpid(), signal.SIGTERM)
            session.stop_if_asked({"rollout": {"ids": torch.arange(2)}})

    with pytest.raises(Interrupted) as caught:
        work()
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert read(tmp_path / "run")["status"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / "step-000005" / "COMPLETE").exists()
    with run(config, resume=True) as session:
        begin(session)
        extra = session.restore(model=trained(config))
    assert session.progress.step == 5
    assert extra["rollout"]["ids"].tolist() == [0, 1]


def test_the_second_signal_leaves_at_once():
    program = (
        "import os, signal\n"
        "from stages.runtime.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT); print(stop.signum, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT); print('still here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "2\n"
    assert done.returncode == 130


def test_a_stop_request_in_another_thread_changes_no_handler():
    from threading import Thread

    before = signal.getsignal(signal.SIGINT)

    def enter():
        with StopRequest() as stop:
            seen.append(stop.signum)

    seen: list[int] = []
    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [0]
    assert signal.getsignal(signal.SIGINT) is before


def test_broken_weights_are_never_saved(make, tmp_path):
    config = make()
    with run(config) as session:
        begin(session)
        broken = trained(config)
        session.restore(model=broken)
        with torch.no_grad():
            broken.parameters[0].view(-1)[0] = float("nan")
        with pytest.raises(TrainingError, match="not finite"):
            session.save()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_best_checkpoint_outlives_the_rotation(make, tmp_path):
    config = make(checkpoint={"keep": 1})
    with run(config) as session:
        begin(session)
        session.restore(model=trained(config))
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
            session.progress.step = step
            session.select("eval/loss", loss)
            session.save()
    left = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000004"]


@pytest.mark.parametrize(
    ("by", "values", "best"),
    [
        ("eval/loss", [3.0, 1.0, 1.0, 2.0], 1),
        ("eval/accuracy", [0.5, 0.7, 0.7, 0.6], 1),
        ("eval/loss", [float("nan"), 2.0, float("inf")], 1),
    ],
)
def test_the_best_is_the_first_lowest_loss_or_highest_accuracy(make, by, values, best):
    with run(make()) as session:
        chosen = []
        for step, value in enumerate(values):
            session.progress.step = step
            if session.select(by, value):
                chosen.append(step)
    assert chosen[-1] == best == session.progress.selected["step"]
    assert session.progress.selected["value"] == values[best]


def test_parents_whose_weights_changed_are_refused_on_resume(make):
    config = make()
    parents = [{"role": "model", "path": "base", "hash": "a"}]
    with run(config) as session:
        require_parents(session, parents)
        begin(session)
        session.restore(model=trained(config))
        session.save()
        session.write_run("running")
    with run(config, resume=True) as session:
        require_parents(session, parents)
        with pytest.raises(CheckpointError, match="have changed"):
            require_parents(session, [{**parents[0], "hash": "b"}])


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"a.jsonl": "1", "b.jsonl": "3"}, "b.jsonl: this data file has changed"),
        ({"a.jsonl": "1"}, "b.jsonl: this data file is gone"),
        ({"a.jsonl": "1", "b.jsonl": "2", "c.jsonl": "3"}, "c.jsonl: this data file is new"),
    ],
)
def test_data_that_changed_are_refused_on_resume(make, files, told):
    def rows(files):
        return [{"role": "train", "file": file, "hash": hash} for file, hash in files.items()]

    config = make()
    with run(config) as session:
        session.facts["data"] = rows({"a.jsonl": "1", "b.jsonl": "2"})
        begin(session)
        session.restore(model=trained(config))
        session.save()
    before = read(session.folder)
    with run(config, resume=True) as session:
        session.facts["data"] = rows(files)
        with pytest.raises(CheckpointError, match=told):
            begin(session)
    assert read(session.folder) == before
    with run(config, resume=True) as session:
        session.facts["data"] = rows({"a.jsonl": "1", "b.jsonl": "2"})
        begin(session)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train": {"precision": "fp32"}}, "train.precision"),
        ({"train": {"precision": "fp64", "learning_rate": 0.5}}, "train.learning_rate"),
        ({"train": {"precision": "fp64", "adam_betas": [0.9, 0.99]}}, "train.adam_betas"),
        ({"seed": 3}, "seed"),
        ({"data": {"train": "y.jsonl"}}, "data.train"),
        ({"model": "other"}, "model"),
    ],
)
def test_a_continuation_with_another_meaning_is_refused_by_key(make, changes, key):
    stored = make().model_dump(mode="json")
    with pytest.raises(CheckpointError) as caught:
        require_same_meaning(json.loads(json.dumps(stored)), make(**changes))
    assert caught.value.what.startswith("was ")
    assert caught.value.where.endswith(f": {key}")
    assert str(caught.value).count(key) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"log": {"every": 1, "samples": 0}},
        {"checkpoint": {"every": 3, "keep": 9}},
        {"evaluate": {"every": 2}},
        {"train": {"precision": "fp64", "epochs": 9, "max_steps": 4}},
        {"train": {"precision": "fp64", "tokens_per_micro_batch": 64}},
        {"train": {"precision": "fp64", "gradient_checkpointing": True}},
        {"output": "elsewhere"},
    ],
)
def test_a_continuation_may_go_further_and_tell_more(make, changes):
    stored = json.loads(json.dumps(make().model_dump(mode="json")))
    require_same_meaning(stored, make(**changes))


def test_a_key_that_the_stored_config_does_not_know_is_let_pass(make):
    stored = make().model_dump(mode="json")
    del stored["seed"]
    require_same_meaning(stored, make(seed=5))


class Codec:
    """The fields by which two ways of reading text are told apart."""

    def __init__(self, vocabulary: str = "v", template: str = "t") -> None:
        self.vocabulary_hash, self.template_hash, self.as_messages = vocabulary, template, False


def test_models_that_read_text_in_another_way_are_refused():
    facts = Identity("policy", "sft", "t", "v", False, (1,), 0)
    require_same_text(facts, Codec(), "runs/sft", "the config")
    for codec, word in ((Codec(vocabulary="w"), "vocabulary"), (Codec(template="u"), "template")):
        with pytest.raises(CheckpointError, match=word) as caught:
            require_same_text(facts, codec, "runs/sft", "the config")
        assert caught.value.where == "runs/sft"
        assert "the config" in caught.value.what


def test_tensorboard_gets_every_row(make, tmp_path):
    pytest.importorskip("tensorboard")
    config = make(log={"trackers": ["tensorboard"]})
    with run(config) as session:
        begin(session)
        assert len(session.trackers) == 1
        session.log("train", {"loss/sft": 0.5})
    written = [p for p in (tmp_path / "run" / "trackers").rglob("*") if p.is_file()]
    assert any("tfevents" in p.name for p in written)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(written[0].parent))
    events.Reload()
    assert [event.value for event in events.Scalars("loss/sft")] == [0.5]


def test_an_unknown_tracker_is_refused_with_those_that_are_known(make, tmp_path):
    config = make(log={"trackers": ["abacus"]})
    with pytest.raises(ConfigError, match="abacus") as caught, run(config):
        pass
    assert caught.value.where == "log.trackers"
    assert "tensorboard" in caught.value.do
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_tracker_whose_package_is_missing_is_refused(make, monkeypatch):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [])
    with pytest.raises(ConfigError, match="not installed"):
        trackers.require(make(log={"trackers": ["tensorboard"]}))


def test_only_the_main_process_starts_trackers(make, tmp_path):
    config = make(log={"trackers": ["tensorboard"]})
    assert trackers.start(config, tmp_path, World(rank=1, size=2)) == []
