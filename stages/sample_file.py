"""The file that ``rlhf sample`` writes: only added to, and only where it is its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stages.data.records import PromptLike, to_json
from stages.data.store import Store
from stages.errors import ConfigError
from stages.runtime.place import existing


class Kept(NamedTuple):
    """What an earlier run left.

    Attributes:
        lines: the complete lines, with their ends; the last one may lack its end alone.
        tail: what follows them.
    """

    lines: list[bytes]
    tail: bytes


def read(output: str | None, *, resume: bool) -> Kept:
    """The lines of an earlier run; none where there is no file.

    Raises:
        ConfigError: the file has lines and is not resumed, or cannot be written.
    """
    if output is None:
        return Kept([], b"")
    path = Path(output)
    nearest = existing(path)
    if path.is_dir() or not os.access(nearest, os.W_OK) or (nearest != path and nearest.is_file()):
        raise ConfigError(
            "cannot be written" if nearest == path else f"{nearest} cannot be written",
            where=f"--output {path}",
            do="give a file that this user may write",
        )
    if path.exists() and not path.is_file():
        raise ConfigError(
            "is a device or a pipe, which cannot be resumed",
            where=f"--output {path}",
            do="leave --output away: the answers go to standard output then",
        )
    text = path.read_bytes() if path.exists() else b""
    if text and not resume:
        raise ConfigError(
            "the file is not empty",
            where=f"--output {path}",
            do="go on with --resume, or give another file",
        )
    end = text.rfind(b"\n") + 1
    lines, tail = text[:end].splitlines(keepends=True), text[end:]
    return Kept([*lines, tail], b"") if _is_whole(tail) else Kept(lines, tail)


def _is_whole(tail: bytes) -> bool:
    """Whether a line lacks nothing but its end, as an editor may leave the last one."""
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return False
    return True


def require_of(
    lines: Sequence[bytes],
    tail: bytes,
    prompts: Store,
    drawn: Mapping[str, Any],
    output: str,
) -> None:
    """What was kept are answers to these prompts, drawn as the missing ones will be.

    Args:
        lines: the complete lines.
        tail: what follows them, which is going to be cut.
        prompts: all prompts, in their order.
        drawn: what decides an answer besides its prompt, and ``k``.
        output: the file's name.

    Raises:
        ConfigError: they are something else; the file may be another one than was meant.
    """
    if len(lines) > len(prompts):
        raise ConfigError(
            f"has {len(lines)} lines, and there are {len(prompts)} prompts",
            where=output,
            do="give --output another file",
        )
    for n, line in enumerate(lines):
        where = f"--output {output}:{n + 1}"
        _require_drawn_alike(_answers_in(line, prompts[n].prompt, where), drawn, where)
    n = len(lines)
    if tail and not (n < len(prompts) and _is_torn_off(tail, prompts[n].prompt)):
        raise _foreign(f"--output {output}:{n + 1}")


def _answers_in(line: bytes, prompt: PromptLike, where: str) -> dict[str, Any]:
    """A kept line, which holds answers to the prompt in its place, ranked or not."""
    try:
        found = json.loads(line)
        if isinstance(found["responses"], list) and found["prompt"] == to_json(prompt):
            return dict(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _foreign(where)


def _is_torn_off(tail: bytes, prompt: PromptLike) -> bool:
    """Whether a text is the beginning of the line of answers to a prompt."""
    line = json.dumps({"prompt": to_json(prompt), "responses": []}, ensure_ascii=False)
    head = line.removesuffix("]}").encode()
    return tail.startswith(head) or head.startswith(tail)


def _foreign(where: str) -> ConfigError:
    return ConfigError(
        "the line holds no answers to the prompt in its place",
        where=where,
        do="give --output another file, or the prompts that it was sampled from",
    )


def _require_drawn_alike(line: Mapping[str, Any], drawn: Mapping[str, Any], where: str) -> None:
    """A kept line was drawn as the missing ones will be, as far as it tells.

    Raises:
        ConfigError: it was not; the option is named.
    """
    told = line.get("sampling")
    before = {**drawn, **(told if isinstance(told, dict) else {}), "k": len(line["responses"])}
    for name, value in drawn.items():
        if before[name] == value:
            continue
        option = f"--{name.replace('_', '-')}"
        what = f"its answers were drawn with {option} {before[name]}, and now it is {value}"
        if name == "policy":
            what = "its answers are those of another policy, or of other weights of this one"
        raise ConfigError(
            what,
            where=where,
            do="go on with the options that the file was drawn with, or give --output another file",
        )


def make_ready(output: str | None, lines: Sequence[bytes]) -> None:
    """The file holds the kept lines alone: what an earlier run left torn goes now."""
    if output is None:
        return
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with open(output, "ab") as file:
        file.truncate(sum(map(len, lines)))
        if lines and not lines[-1].endswith(b"\n"):
            file.write(b"\n")


def append(lines: Sequence[str], output: str) -> None:
    """Add lines, and wait until the disk has them."""
    with open(output, "a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
