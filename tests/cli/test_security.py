"""What comes from files is never run, never steers the terminal, and nothing leaves its place."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from rlhf_cli.app import main
from rlhf_cli.console import PlainReporter, clean
from stages.errors import CheckpointError
from stages.models import source
from tests.cli.test_resources import Ended, limited
from tests.families import save_tiny
from tests.stages.project import Project

HOSTILE = "\x1b]0;x\x07\x1b[2J[bold red]b[/] <b>i</b> \u202etxt \x9b31m"
SECRETS = {
    name: f"secret-of-{name}"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
}
STAGES = ("sft sft.yaml", "train-rm rm.yaml", "ppo ppo.yaml")


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.bin"])
def test_pickled_weights_are_refused_with_an_explanation_and_never_opened(
    name: str, folder: Path, capsys: Any
) -> None:
    mark = folder / "mark"
    (folder / "base" / "model.safetensors").unlink()
    (folder / "base" / name).write_bytes(pickle.dumps(Evil(mark)))
    assert main(["sft", "sft.yaml"]) == 4
    told = capsys.readouterr().err
    assert "pickled weights, which can run any code when they are opened" in told
    assert "convert them to safetensors" in told
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_never_opened(folder: Path) -> None:
    mark = folder / "mark"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt"):
        (folder / "base" / name).write_bytes(pickle.dumps(Evil(mark)))
    assert main(["sft", "sft.yaml"]) == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "key"), [("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")]
)
def test_code_that_a_model_brings_is_not_run_unless_asked(
    file: str, key: str, folder: Path, capsys: Any
) -> None:
    mark = folder / "mark"
    (folder / "base" / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    path = folder / "base" / file
    values = json.loads(path.read_text())
    values["auto_map"] = {key: "own.Own", "AutoModelForCausalLM": "own.Own"}
    if file == "config.json":
        values["model_type"] = "own"
    else:
        values["auto_map"] = {key: ["own.Own", "own.Own"]}
        values["tokenizer_class"] = "Own"
    path.write_text(json.dumps(values))
    code = main(["sft", "sft.yaml"])
    assert code in (0, 2, 4), "read without its code, or refused"
    assert not mark.exists()
    if code == 2:
        assert "trust_remote_code: true if you trust its author" in capsys.readouterr().err


def hostile_project(folder: Path) -> None:
    """Escapes and markup in every text of data, in file names and in a chat template's words."""
    project = Project(folder)
    records = [{"prompt": f"a{n}{HOSTILE}", "response": f"b{HOSTILE}"} for n in range(5)]
    project.write("demonstrations.jsonl", records)
    project.write("prompts.jsonl", [{"prompt": record["prompt"]} for record in records])
    save_tiny(folder / "base", "llama")  # a token for every byte
    save_tiny(folder / "reward", "llama", kind="reward", seed=1)


@pytest.mark.parametrize(
    "argv", ["check sft.yaml", "check ppo.yaml", "sft sft.yaml", "ppo ppo.yaml"]
)
def test_text_of_data_steers_no_terminal(argv: str, folder: Path, capsys: Any) -> None:
    hostile_project(folder)
    capsys.readouterr()
    disable_progress_bar()  # as ``silence_libraries`` does before they are imported
    code = main(argv.split())
    enable_progress_bar()
    out, err = capsys.readouterr()
    assert code == 0, err
    for text in (out, err):
        assert clean(text, keep="\n") == text
    if "sft" not in argv or "check" in argv:
        assert "\\x1b" in out + err, "it is shown as it is, made harmless"


SPOILT: dict[str, Callable[[Path], list[str]]] = {
    "a key": lambda folder: ["sft", "sft.yaml", f"{HOSTILE}=1"],
    "a value": lambda folder: ["sft", "sft.yaml", f"train.epochs={json.dumps(HOSTILE)}"],
    "a path": lambda folder: ["sft", "sft.yaml", f"model={json.dumps('./' + HOSTILE)}"],
    "a data file": lambda folder: ["sft", "sft.yaml", f"data.train={json.dumps(HOSTILE)}"],
    "a config": lambda folder: ["sft", f"{HOSTILE}.yaml"],
    "an option": lambda folder: ["sft", "sft.yaml", f"--{HOSTILE}"],
    "a role": lambda folder: _data(
        folder, {"messages": [{"role": HOSTILE, "content": "a"}, {"role": "user", "content": ""}]}
    ),
    "a column": lambda folder: _data(folder, {HOSTILE: "a"}),
    "a model type": lambda folder: _model_type(folder),
}


def _data(folder: Path, record: Any) -> list[str]:
    Project(folder).write("demonstrations.jsonl", [record])
    return ["sft", "sft.yaml"]


def _model_type(folder: Path) -> list[str]:
    (folder / "base" / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    return ["sft", "sft.yaml"]


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("debug", [False, True])
def test_an_error_that_quotes_text_steers_no_terminal(
    name: str, debug: bool, folder: Path, capsys: Any
) -> None:
    argv = [*SPOILT[name](folder), *["--debug"] * debug]
    assert main(argv) in (2, 3, 4)
    out, err = capsys.readouterr()
    for text in (out, err):
        assert clean(text, keep="\n\t") == text


def test_the_name_of_a_phase_steers_no_terminal(capsys: Any) -> None:
    PlainReporter(sys.stderr).begin(HOSTILE, total=3, unit=HOSTILE)
    told = capsys.readouterr().err
    assert clean(told, keep="\n") == told


def written(folder: Path) -> Iterator[tuple[Path, bytes]]:
    return ((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("argv", [*STAGES, "sft sft.yaml model=./no", "sft sft.yaml data.train=no"])
def test_secrets_of_the_environment_reach_no_file_and_no_message(
    argv: str, folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    main([*argv.split(), "--debug"])
    out, err = capsys.readouterr()
    for value in SECRETS.values():
        assert value not in out + err
        for path, data in written(tmp_path):
            assert value.encode() not in data, path


def changed(event: str, details: tuple[Any, ...]) -> Any:
    """The path that an audit event changes, None for other events."""
    if event == "open":
        return details[0] if not isinstance(details[0], int) and details[2] & 0o3 else None
    if event in ("os.mkdir", "os.remove", "os.rmdir"):
        return details[0] if details[-1] == -1 else None  # else relative to a folder noted before
    return details[1] if event == "os.rename" else None


def watched(folder: Path, out: Path, *argv: str) -> tuple[Ended, list[str]]:
    """A command in a process whose writing and talking is noted, by Python's own audit events."""
    notes = out / "notes"

    def watch() -> None:
        file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def note(event: str, details: tuple[Any, ...]) -> None:
            if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
                os.write(file, f"network {event} {details[-1]!r}\n".encode())
                raise OSError("no network in this test")
            place = changed(event, details)
            if place is not None:
                os.write(file, f"write {os.path.abspath(os.fsdecode(place))}\n".encode())

        import huggingface_hub.constants

        huggingface_hub.constants.HF_HUB_OFFLINE = False
        sys.addaudithook(note)

    ended = limited(watch, *argv, out=out)
    return ended, notes.read_text().splitlines()


@pytest.mark.parametrize("argv", [*STAGES, "check sft.yaml", "check ppo.yaml"])
def test_a_stage_writes_into_its_folder_and_the_cache_only_and_asks_no_network(
    argv: str, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "told"
    out.mkdir()
    ended, notes = watched(folder, out, *argv.split())
    assert ended.code == 0, ended.text
    scratch = f"{tempfile.gettempdir()}/rlhf-check-"  # of rlhf check, gone at its end
    allowed = (f"{tmp_path / 'cache'}", f"{folder / 'runs'}", "/dev/", "/proc/self/", scratch)
    places = {line.removeprefix("write ") for line in notes if line.startswith("write")}
    assert {place for place in places if not place.startswith(allowed)} == set()
    assert not any(place.startswith(scratch) and Path(place).exists() for place in places)
    assert [line for line in notes if line.startswith("network")] == []
    assert any(place.startswith(allowed[0]) for place in places), "the watch sees writing"


def test_a_hub_id_is_the_one_thing_that_asks_the_network(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "told"
    out.mkdir()
    ended, notes = watched(folder, out, "sft", "sft.yaml", "model=someone/some-model")
    assert ended.code == 4, ended.text
    assert any(line.startswith("network") for line in notes)
    error = ended.told["error"]
    assert "the hub cannot be reached" in error["what"]
    assert "if it is a hub id, look after the connection" in error["do"]
    assert "run the stage that makes it first" in error["do"]


def test_offline_no_hub_is_asked_and_the_advice_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(source, "is_offline_mode", lambda: True)
    monkeypatch.setattr(source, "get_session", asked)
    source._require_on_hub.cache_clear()
    with pytest.raises(CheckpointError) as caught:
        source.identity_of("someone/some-model")
    assert "HF_HUB_OFFLINE" in caught.value.what
    assert "unset HF_HUB_OFFLINE" in caught.value.do
    source._require_on_hub.cache_clear()


def test_a_link_in_the_output_folder_is_not_followed_out_of_it(folder: Path, capsys: Any) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    elsewhere = folder.parent / "elsewhere"
    run = folder / "runs" / "sft"
    for name in ("checkpoints", "model", "metrics.jsonl"):
        shutil.rmtree(elsewhere, ignore_errors=True)
        elsewhere.mkdir()
        kept = run / f"{name}.kept"
        (run / name).rename(kept)
        target = elsewhere / name
        shutil.copytree(kept, target) if kept.is_dir() else shutil.copy(kept, target)
        before = dict(written(elsewhere))
        (run / name).symlink_to(target)
        for flag in ("--resume", "--overwrite"):
            capsys.readouterr()
            assert main(["sft", "sft.yaml", "train.max_steps=5", flag]) == 2
            assert f"{name} in it is a link" in capsys.readouterr().err
        assert dict(written(elsewhere)) == before
        (run / name).unlink()
        kept.rename(run / name)
    assert main(["sft", "sft.yaml", "train.max_steps=5", "--resume"]) == 0


def test_the_lock_is_no_way_out_of_the_folder(folder: Path, capsys: Any) -> None:
    (folder / "runs" / "sft").mkdir(parents=True)
    (folder / "runs" / "sft" / ".lock").symlink_to(folder.parent / "made")
    assert main(["sft", "sft.yaml"]) == 2
    assert not (folder.parent / "made").exists()


@pytest.mark.parametrize("flag", ["--overwrite", "--resume"])
def test_a_user_s_files_survive_beside_a_run(flag: str, folder: Path) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    run = folder / "runs" / "sft"
    theirs = ("notes.txt", ".tmp-mine", ".old-mine", "models/a", "checkpoints.bak/a", "best/model")
    for name in theirs:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine")
    assert main(["sft", "sft.yaml", "train.max_steps=4", "checkpoint.keep=1", flag]) == 0
    assert {name: (run / name).read_text() for name in theirs} == dict.fromkeys(theirs, "mine")


def test_weights_that_changed_since_a_stage_wrote_them_are_named_by_the_next(
    folder: Path, capsys: Any
) -> None:
    assert main(["sft", "sft.yaml"]) == 0
    file = folder / "runs" / "sft" / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in load_file(file).values())
    for argv in (["train-rm", "rm.yaml"], ["check", "rm.yaml"], ["ppo", "ppo.yaml"]):
        capsys.readouterr()
        assert main([*argv, "model=runs/sft"]) == 4
        told = capsys.readouterr().err
        assert "model/model.safetensors: is not what was written" in told


def test_the_password_of_a_reward_server_reaches_no_file_and_no_message(
    folder: Path, capsys: Any
) -> None:
    """Told by the config as shown, by a mistake in it, and a run that reaches no server."""
    pytest.importorskip("urllib3")
    url = "http://me:topsecret@127.0.0.1:9/score"
    reward = f"reward={{type: http, url: '{url}', retries: 0}}"
    argv = ["ppo.yaml", reward, "critic.init=policy", "output=runs/x"]
    assert main(["config", "show", *argv]) == 0
    assert "http://me:***@127.0.0.1:9/score" in capsys.readouterr().out
    wrong = reward.replace("http://me", "htp://me")
    assert main(["config", "show", "ppo.yaml", wrong]) == 2
    told = capsys.readouterr()
    assert main(["ppo", *argv, "--json"]) == 5
    more = capsys.readouterr()
    assert "the reward http cannot be asked" in more.err
    kept = [path for path in (folder / "runs/x").rglob("*") if path.is_file()]
    assert {"run.json", "config.yaml"} <= {path.name for path in kept}
    texts = [told.out, told.err, more.out, more.err]
    texts += [path.read_bytes().decode("utf-8", "replace") for path in kept]
    assert not any("topsecret" in text for text in texts)
