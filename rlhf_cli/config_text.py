"""The text of a config file, and places in it."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_cli.yaml_source import Document, Mark, NotYaml, read_yaml
from stages.errors import ConfigError

MOST_BYTES = 1_000_000
"""The longest config file that is read; the longest of those that the tool writes has 10 kB."""


def document(path: str) -> tuple[str, Document]:
    """The name of a config file, or of standard input where it is ``-``, and what stands in it.

    Raises:
        ConfigError: it cannot be read, is too long, or is no YAML.
    """
    name = "stdin" if path == "-" else path
    data = _bytes(path)
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"has more than {MOST_BYTES:,} bytes, which no config needs",
            where=name,
            do="name a config file; data files are named by its keys, such as data.train",
        )
    text = _decoded(data, name)
    try:
        return name, read_yaml(text)
    except NotYaml as error:
        raise ConfigError(
            str(error),
            where=in_file(name, error.mark),
            do="correct the file; a config is one YAML 1.2 mapping of keys to values",
        ) from None


def _bytes(path: str) -> bytes:
    """What the file holds, or a little more of it than any config has."""
    if path == "-":
        return sys.stdin.buffer.read(MOST_BYTES + 1)
    try:
        with Path(path).open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        what, do = "no such file", "check the path; rlhf init writes complete examples"
    except IsADirectoryError:
        what, do = "is a folder, not a config file", "name the YAML file in it"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what, do = f"cannot be read: {reason}", "check the path and its permissions"
    raise ConfigError(what, where=path, do=do)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        mark = Mark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        raise ConfigError(
            f"byte 0x{data[error.start]:02x} is not UTF-8",
            where=in_file(name, mark),
            do="save the file as UTF-8",
        ) from None


def in_file(name: str, mark: Mark) -> str:
    """A place as messages name it: ``file.yaml:4:3``."""
    return f"{name}:{mark.line}:{mark.column}"
