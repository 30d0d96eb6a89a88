"""What was read, kept and left out, and why: for the terminal, ``run.json`` and ``check``."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from stages.data.chunks import Chunk
from stages.data.encode import ALL_TIED, NO_STRICT_PAIR, UNRANKED
from stages.data.fit import ANSWER_OVER, POSITIONS_OVER, PROMPT_OVER
from stages.errors import DataError

DUPLICATE = "duplicate prompt"
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class RoleReport:
    """One role's data (``train``, ``eval``, …).

    Attributes:
        role: what it is used for.
        files: names as given, globs resolved.
        hashes: of the files' bytes, in the same order.
        format: the recognised formats.
        records: records read, before any was left out.
        kept: records left for this role.
        dropped: reason → records left out for it.
        first: reason → place of the first record left out for it.
        prompt_tokens: quantile → tokens of the kept prompts.
        response_tokens: quantile → tokens of the kept answers, end token included.
        answers: K → rankings with K ranked answers.
    """

    role: str
    files: tuple[str, ...]
    hashes: tuple[str, ...]
    format: str
    records: int
    kept: int
    dropped: dict[str, int]
    first: dict[str, str]
    prompt_tokens: dict[str, int]
    response_tokens: dict[str, int]
    answers: dict[int, int]

    def rows(self) -> list[dict[str, Any]]:
        """The entries of ``run.json``, one a file; the counts are those of all files together."""
        counts = {"records": self.records, "kept": self.kept, "dropped": dict(self.dropped)}
        pairs = zip(self.files, self.hashes, strict=True)
        return [{"role": self.role, "file": f, "hash": h, **counts} for f, h in pairs]

    def line(self) -> str:
        """One line for a person."""
        text = f"{self.role}: {self.kept} of {self.records} records, format {self.format}"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return f"{text}; left out: {reasons}" if reasons else text


@dataclass(frozen=True)
class DataReport:
    """All roles of one load, and the lines that the stage prints."""

    roles: tuple[RoleReport, ...]
    notes: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """The ``data`` list of ``run.json``."""
        return [row for role in self.roles for row in role.rows()]


@dataclass
class Tally:
    """Counts while the records pass by."""

    records: int = 0
    kept: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    answers: Counter[int] = field(default_factory=Counter)
    prompts: array[int] = field(default_factory=lambda: array("q"))
    responses: array[int] = field(default_factory=lambda: array("q"))

    def add(self, chunk: Chunk) -> None:
        """Count the records of a chunk."""
        self.records += chunk.records
        self.kept += chunk.kept
        for reason, origin in chunk.dropped:
            self.dropped[reason] += 1
            self.first.setdefault(reason, origin)
        self.prompts.extend(chunk.prompts)
        self.responses.extend(chunk.responses)
        self.answers.update(chunk.answers)

    def report(self, files: tuple[str, ...], hashes: tuple[str, ...]) -> RoleReport:
        """The finished counts."""
        return RoleReport(
            role="train",
            files=files,
            hashes=hashes,
            format=", ".join(self.formats),
            records=self.records,
            kept=self.kept,
            dropped=dict(self.dropped.most_common()),
            first=dict(self.first),
            prompt_tokens=quantiles(self.prompts),
            response_tokens=quantiles(self.responses),
            answers=dict(sorted(self.answers.items())),
        )


def quantiles(lengths: array[int]) -> dict[str, int]:
    """The median and the long end of some lengths."""
    if not lengths:
        return {}
    values = np.quantile(np.array(lengths), list(_QUANTILES.values()), method="higher")
    return {name: int(value) for name, value in zip(_QUANTILES, values, strict=True)}


def to_dict(report: RoleReport) -> dict[str, Any]:
    """A report as JSON can hold it."""
    return asdict(report)


def from_dict(value: dict[str, Any]) -> RoleReport:
    """The inverse of :func:`to_dict` after JSON."""
    answers = {int(k): n for k, n in value["answers"].items()}
    lists = {name: tuple(value[name]) for name in ("files", "hashes")}
    return RoleReport(**{**value, **lists, "answers": answers})


def check(report: RoleReport, max_dropped: float) -> None:
    """Refuse data of which nothing, or too little, can be used. Duplicates are no defect.

    Raises:
        DataError: with the reasons, their counts and the first place of each.
    """
    where = ", ".join(report.files)
    if not report.records:
        what = f"there is no record to learn from in this file of the format {report.format}"
        raise DataError(what, where=where, do="give a file that holds ranked answers")
    unusable = sum(n for reason, n in report.dropped.items() if reason != DUPLICATE)
    reasons = "; ".join(
        f"{count} × {reason} (first: {report.first[reason]})"
        for reason, count in report.dropped.items()
        if reason != DUPLICATE
    )
    if not report.kept:
        what = (
            f"nothing is left to learn from: all {report.records} records are left out: {reasons}"
        )
        raise DataError(what, where=where, do=_remedy(report))
    if unusable > max_dropped * report.records:
        what = (
            f"{unusable} of {report.records} records cannot be used, more than "
            f"data.max_dropped = {max_dropped:g} allows: {reasons}"
        )
        raise DataError(what, where=where, do=f"{_remedy(report)}; or raise data.max_dropped")


def _remedy(report: RoleReport) -> str:
    """What helps against the reasons that were met, the most frequent first."""
    helps = [_REMEDIES.get(reason, _REPAIR) for reason in report.dropped if reason != DUPLICATE]
    return "; ".join(dict.fromkeys(helps)) or _REPAIR


_REPAIR = "repair these records"
_RANK = "give each prompt two or more answers of unlike rank"
_REMEDIES = {
    PROMPT_OVER: "raise data.max_prompt_tokens, or set data.overlong: truncate",
    ANSWER_OVER: "raise data.max_response_tokens, or set data.overlong: truncate",
    POSITIONS_OVER: "shorten these records (a stage does it with data.overlong: truncate), ask for "
    "shorter answers, or take a model with more positions",
    UNRANKED: _RANK,
    ALL_TIED: _RANK,
    NO_STRICT_PAIR: "set ranking.ties: half for ties, or rank them",
}
