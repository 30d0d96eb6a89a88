"""Encoded records as people read them: one token by token, or all of them as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stages.batch import Example, Group, Ids, behind
from stages.data.kinds import PromptItem
from stages.data.store import Splits, Store
from stages.data.templates import Codec
from stages.errors import ConfigError
from stages.runtime.disk import FULL

AROUND = 12  # tokens shown on each side of a place where something begins or ends

Item = Example | Group | PromptItem


def first(store: Store, codec: Codec) -> dict[str, Any]:
    """The first record as the model sees it; a ranking shows each answer with its rank."""
    item = store[0]
    if not isinstance(item, Group):
        return {"origin": store.origin(0), **_sequence(_example(item), codec)}
    prompt = _sequence(Example(item.prompt, np.empty(0, np.int64)), codec)
    answers = {
        f"answer {n}": {"rank": rank, **_sequence(Example(ids, np.arange(len(ids))), codec)}
        for n, (ids, rank) in enumerate(zip(item.answers, item.ranks, strict=True), start=1)
    }
    return {"origin": store.origin(0), "prompt": prompt, **answers}


def dump(splits: Splits, codec: Codec, file: str) -> int:
    """Write every encoded record of both sides as JSON lines, and say how many lines that makes.

    Raises:
        ConfigError: the file is one of the data files, holds something, or cannot be written.
    """
    path = Path(file)
    read = [Path(name) for role in splits.report.roles for name in role.files]
    if path.exists() and any(name.exists() and name.samefile(path) for name in read):
        raise ConfigError(
            "is one of the data files", where=f"--dump {file}", do="give --dump another file"
        )
    if path.is_file() and path.stat().st_size:
        raise ConfigError(
            "is there already", where=f"--dump {file}", do="give another name, or remove the file"
        )
    lines = 0
    try:
        with path.open("w", encoding="utf-8") as out:
            for line in _lines(splits, codec):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
                lines += 1
    except OSError as error:
        if error.errno in FULL:
            raise  # no mistake of the user's
        raise ConfigError(
            f"cannot be written ({error.strerror})",
            where=f"--dump {file}",
            do="give a file in a folder that exists and that this user may write into",
        ) from None
    return lines


def _lines(splits: Splits, codec: Codec) -> Iterator[dict[str, Any]]:
    for split, store in (("train", splits.train), ("eval", splits.eval)):
        if store is None:
            continue
        for n in range(len(store)):
            item = store[n]
            for example, facts in _sequences(item):
                yield {
                    "origin": store.origin(n),
                    "split": split,
                    "ids": example.ids.tolist(),
                    "targets": example.targets.tolist(),
                    "text": codec.decode(example.ids, special=True),
                    **facts,
                }


def _sequences(item: Item) -> Iterator[tuple[Example, dict[str, Any]]]:
    """The sequences of a record: one, or an answer each behind the prompt."""
    if isinstance(item, Group):
        for answer, rank in zip(item.answers, item.ranks, strict=True):
            yield behind(item.prompt, answer), {"rank": rank}
    else:
        yield _example(item), {}


def _example(item: Example | PromptItem) -> Example:
    return item if isinstance(item, Example) else Example(item.ids, np.empty(0, np.int64))


def _sequence(example: Example, codec: Codec) -> dict[str, Any]:
    targets = np.zeros(len(example.ids), dtype=bool)
    targets[example.targets] = True
    rows = [_token(int(i), bool(t), codec) for i, t in zip(example.ids, targets, strict=True)]
    return {
        "text": codec.decode(example.ids, special=True),
        "length": len(rows),
        "targets": int(targets.sum()),
        "tokens": _shortened(rows, targets),
    }


def _token(token: int, target: bool, codec: Codec) -> dict[str, Any]:
    name = str(codec.tokenizer.convert_ids_to_tokens(token))
    return {"id": token, "token": name, "target": target, "end": target and token in codec.stop_ids}


def _shortened(rows: list[dict[str, Any]], targets: Ids) -> list[dict[str, Any]]:
    """The tokens near both ends and near each change between prompt and target."""
    places = [0, *(np.flatnonzero(np.diff(targets)) + 1).tolist(), len(rows)]
    near = {n for place in places for n in range(place - AROUND, place + AROUND)}
    shown: list[dict[str, Any]] = []
    for n, row in enumerate(rows):
        if n in near:
            shown.append(row)
        elif shown and "left_out" in shown[-1]:
            shown[-1]["left_out"] += 1
        else:
            shown.append({"left_out": 1})
    return shown
