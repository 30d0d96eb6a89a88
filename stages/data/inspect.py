"""What a data file is: its format, how much of it is of use, how long its texts are.

What would be dropped is what the records themselves decide; limits belong to a stage's config, and
``rlhf check`` counts with them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from stages.data import files, formats
from stages.data.chunks import prompt_number, text_number
from stages.data.encode import (
    EMPTY_ANSWER,
    EMPTY_PROMPT,
    NO_STRICT_PAIR,
    UNRANKED,
    ranked_responses,
)
from stages.data.fit import response_ids
from stages.data.kinds import NO_ANSWER
from stages.data.records import (
    Demonstration,
    Document,
    Labelled,
    Prompt,
    Ranking,
    Record,
    Response,
    Useless,
)
from stages.data.report import DUPLICATE, quantiles
from stages.data.templates import Codec

_PROGRESS_EVERY = 1024


@dataclass(frozen=True)
class FileReport:
    """One data file.

    Attributes:
        file: its name.
        format: as recognised.
        records: records in it, before any is dropped.
        dropped: reason → records that no stage could use.
        k: K → rankings with K ranked answers, for K of two or more.
        tie_rate: share of the pairs of ranked answers whose ranks are equal; None without pairs.
        duplicates: records that are equal to an earlier one as a whole.
        prompt_tokens: quantile → tokens of the prompts; None without a tokenizer.
        response_tokens: quantile → tokens of the answers, end token included; None likewise.
        overlap: its prompts that another one of the files holds as well.
    """

    file: str
    format: str
    records: int
    dropped: dict[str, int]
    k: dict[int, int]
    tie_rate: float | None
    duplicates: int
    prompt_tokens: dict[str, int] | None
    response_tokens: dict[str, int] | None
    overlap: int = 0


@dataclass
class _Counts:
    """Counts while the records of a file pass by."""

    records: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    k: Counter[int] = field(default_factory=Counter)
    pairs: int = 0
    ties: int = 0
    whole: array[int] = field(default_factory=lambda: array("Q"))
    openings: set[int] = field(default_factory=set)
    prompts: array[int] = field(default_factory=lambda: array("q"))
    responses: array[int] = field(default_factory=lambda: array("q"))


def inspect(
    names: Sequence[str],
    codec: Codec | None = None,
    reporter: Any = None,
    columns: Mapping[str, str] | None = None,
) -> tuple[list[FileReport], int]:
    """Look at files, each once, in bounded memory.

    Args:
        names: files as :func:`stages.data.files.find` gives them, or ``-`` for standard input.
        codec: counts tokens, where given.
        reporter: hears how far the reading is.
        columns: foreign names → ours, in every file.

    Returns:
        A report for each file, and how many prompts stand in more than one of them.

    Raises:
        DataError: a file is missing, empty, broken or of no known format.
        ConfigError: messages that a codec without a template cannot read.
    """
    found = [_look(name, codec, reporter, columns) for name in names]
    everywhere = Counter(number for _, prompts in found for number in prompts)
    shared = {number for number, count in everywhere.items() if count > 1}
    reports = [replace(report, overlap=len(prompts & shared)) for report, prompts in found]
    return reports, len(shared)


def _look(
    name: str, codec: Codec | None, reporter: Any, columns: Mapping[str, str] | None
) -> tuple[FileReport, set[int]]:
    counts = _Counts()
    if reporter is not None:
        reporter.begin(f"reading {name}", total=None, unit="records")
    as_messages = codec is not None and codec.as_messages
    entry, records = formats.convert(files.rows(name, columns), "auto", as_messages)
    for record in records:
        counts.records += 1
        _count(record, entry.name, counts, codec)
        if reporter is not None and counts.records % _PROGRESS_EVERY == 0:
            reporter.advance(counts.records)
    if reporter is not None:
        reporter.end()
    return _report(name, entry.name, counts, codec), counts.openings


def _report(name: str, format_name: str, counts: _Counts, codec: Codec | None) -> FileReport:
    return FileReport(
        file=name,
        format=format_name,
        records=counts.records,
        dropped=dict(counts.dropped.most_common()),
        k=dict(sorted(counts.k.items())),
        tie_rate=counts.ties / counts.pairs if counts.pairs else None,
        duplicates=len(counts.whole) - len(np.unique(np.array(counts.whole, dtype=np.uint64))),
        prompt_tokens=quantiles(counts.prompts) if codec else None,
        response_tokens=quantiles(counts.responses) if codec else None,
    )


def _count(record: Record, format_name: str, counts: _Counts, codec: Codec | None) -> None:
    if isinstance(record, Useless):
        counts.dropped[record.reason] += 1
        return
    prompt = record.text if isinstance(record, Document) else record.prompt
    number = prompt_number(prompt)
    counts.whole.append(text_number(repr(replace(record, origin=""))))
    if isinstance(record, Ranking):
        _count_pairs(record, counts)
    reason = _useless(record, format_name)
    if isinstance(record, Prompt) and not reason and number in counts.openings:
        reason = DUPLICATE
    counts.openings.add(number)
    if reason:
        counts.dropped[reason] += 1
    elif codec is not None:
        _count_tokens(record, counts, codec)


def _count_pairs(record: Ranking, counts: _Counts) -> None:
    ranks = [rank for _, rank in ranked_responses(record)]
    if len(ranks) > 1:
        counts.k[len(ranks)] += 1
    for one, other in combinations(ranks, 2):
        counts.pairs += 1
        counts.ties += one == other


def _useless(record: Record, format_name: str) -> str:
    """Why no stage that reads such a file could use the record; empty where one could."""
    if isinstance(record, Ranking):
        ranks = [rank for _, rank in ranked_responses(record)]
        if len(ranks) < 2:
            return UNRANKED
        return NO_STRICT_PAIR if len(set(ranks)) == 1 else ""
    if isinstance(record, Labelled):
        return ""  # that an answer is empty may be why it is undesirable
    if isinstance(record, Demonstration):
        return "" if record.response.text.strip() else EMPTY_ANSWER
    if isinstance(record, Prompt):
        if format_name in formats.CONVERSATIONS:
            return NO_ANSWER
        return "" if record.prompt else EMPTY_PROMPT
    return ""


def _count_tokens(record: Record, counts: _Counts, codec: Codec) -> None:
    answers: list[Response] = []
    if isinstance(record, Document):
        counts.responses.append(len(codec.encode_response(record.text, end=codec.eos_id)))
        return
    assert not isinstance(record, Useless)
    prompt = record.prompt
    counts.prompts.append(len(codec.encode_prompt(prompt).ids))
    if isinstance(record, Ranking):
        answers = [response for response, _ in ranked_responses(record)]
    elif isinstance(record, Demonstration | Labelled):
        answers = [record.response]
    end = codec.end_of(prompt)
    counts.responses.extend(len(response_ids(answer, codec, end)) for answer in answers)


def find(sources: Sequence[str]) -> Iterator[str]:
    """The files that paths and globs name; ``-`` stays."""
    for source in sources:
        yield from [source] if source == files.STDIN else files.find(source)
