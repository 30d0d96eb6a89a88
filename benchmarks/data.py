"""How long reading, checking and tokenising take, and how much memory: ``make bench-data``.

Writes demonstrations and rankings of made-up words into a temporary folder and loads each file
three times, in a fresh process: cold, again, and after one line has changed. The peak is that of
the reading process and of those that tokenise for it, sampled and added up, and what the reading
process holds before it begins (interpreter and libraries) stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"demonstrations": 1_000_000, "rankings": 300_000}
ANSWERS = 4
WORDS = 6_000


def main() -> None:
    """Write the files, measure each load in a process of its own, print a table."""
    options = _options()
    if options.load:
        print(json.dumps(_load(options.load, options.kind, Path(options.folder))))
        return
    counts = {"demonstrations": options.demonstrations, "rankings": options.rankings}
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, Python", end=" ")
    print(f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    print(f"{'':30}{'records':>10}{'file MB':>9}{'s':>8}{'records/s':>11}", end="")
    print(f"{'peak MiB':>10}{'libraries':>11}")
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-data-", dir=options.folder) as folder:
        _tokenizer(Path(folder))
        for kind, count in counts.items():
            path = Path(folder) / f"{kind}.jsonl"
            _write(path, kind, count)
            for name in ("cold start", "second start", "one changed line"):
                if name == "one changed line":
                    _change(path)
                _row(f"{kind}: {name}", count, path, _measured(path, kind, Path(folder)))


def _options() -> Any:
    parser = argparse.ArgumentParser(description="Time and memory of reading data.")
    for kind, count in SIZE.items():
        parser.add_argument(f"--{kind}", type=int, default=count, help="records")
    parser.add_argument("--folder", help="where the files are written (default: temporary)")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    return parser.parse_args()


def _row(name: str, count: int, path: Path, found: dict[str, float]) -> None:
    size, seconds = path.stat().st_size / 1e6, found["seconds"]
    print(f"{name:30}{count:>10,}{size:>9,.0f}{seconds:>8.1f}{count / seconds:>11,.0f}", end="")
    print(f"{found['peak']:>10,.0f}{found['libraries']:>11,.0f}", flush=True)


# The data: about 25 words of prompt and 60 of answer.


def _write(path: Path, kind: str, count: int) -> None:
    text = _texts(random.Random(count))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            file.write(json.dumps(_record(kind, text)) + "\n")


def _record(kind: str, text: Callable[[int], str]) -> dict[str, Any]:
    if kind == "demonstrations":
        return {"prompt": text(25), "response": text(60)}
    answers = [{"text": text(40), "rank": rank} for rank in range(1, ANSWERS + 1)]
    return {"prompt": text(25), "responses": answers}


def _texts(source: random.Random) -> Callable[[int], str]:
    letters = "etaoinshrdlucmfw"
    words = ["".join(source.choices(letters, k=source.randint(2, 9))) for _ in range(WORDS)]
    return lambda mean: " ".join(source.choices(words, k=source.randint(mean // 2, mean * 3 // 2)))


def _change(path: Path) -> None:
    """Replace the first letter of the first prompt in place."""
    place = len('{"prompt": "')
    with open(path, "r+b") as file:
        file.seek(place)
        letter = file.read(1)
        file.seek(place)
        file.write(b"x" if letter != b"x" else b"y")


def _tokenizer(folder: Path) -> None:
    """A byte-level BPE of 8,000 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = _texts(random.Random(0))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((text(80) for _ in range(3_000)), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    made.save_pretrained(folder / "tokenizer")


# One load, in a process of its own.


def _measured(path: Path, kind: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--load", str(path), "--kind", kind]
    command += ["--folder", str(folder)]
    environment = {**os.environ, "RLHF_CACHE": f"{folder}/cache", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout)


def _load(path: str, kind: str, folder: Path) -> dict[str, float]:
    from transformers import AutoTokenizer

    from stages.data.store import LoadSpec, load
    from stages.data.templates import make_codec

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    codec = make_codec(tokenizer, chat_template=None, as_messages=False)
    section = SimpleNamespace(
        train=path, eval=0.01, format="auto", columns=None, max_prompt_tokens=512,
        max_response_tokens=512, overlong="drop", max_dropped=0.5, limit=None,
    )  # fmt: skip
    libraries = _resident()
    with _Peak() as peak:
        started = time.perf_counter()
        splits = load(LoadSpec(kind, section), codec)
        seconds = time.perf_counter() - started
    assert len(splits.train)
    return {"seconds": seconds, "peak": peak.value, "libraries": libraries}


class _Peak:
    """The largest sum of the resident memory of this process and its children, in MiB."""

    def __init__(self) -> None:
        self.value = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.value = max(self.value, _resident())


def _resident() -> float:
    return sum(_resident_of(pid) for pid in (os.getpid(), *_children())) / 2**20


def _children() -> Iterator[int]:
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def _resident_of(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0  # it has just ended
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
