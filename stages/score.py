"""``rlhf score``: the answers of a file, each with what a reward says of it.

Lines are read, judged and written a few hundred at a time. A line comes back as it was, its score
added; a record of another format comes back as a canonical line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from stages import judges
from stages.config.rewards import Placed
from stages.data import files, formats
from stages.data.convert import canonical_line, json_line
from stages.data.kinds import plain
from stages.data.records import (
    Demonstration,
    Labelled,
    PromptLike,
    Ranking,
    Record,
    Response,
    Row,
    Useless,
)
from stages.errors import DataError, Interrupted
from stages.models.load import Loading
from stages.models.precision import choose
from stages.runtime.reporter import Reporter
from stages.runtime.rewards.texts import Answer
from stages.runtime.signals import StopRequest
from stages.text_reward import TextReward, open_terms

CHUNK = 256  # lines that are judged together
OWN = ("canonical", "labelled")  # formats whose lines come back as they are


@dataclass(frozen=True)
class ScoreOptions:
    """What is scored, and by what.

    Attributes:
        terms: of the reward.
        file: answers in any format, or ``-`` for standard input.
        device: ``auto | cpu | cuda | mps``.
        precision: ``auto | bf16 | fp32``.
        trust_remote_code: whether Python code that a reward model brings may run.
    """

    terms: tuple[Placed, ...]
    file: str
    device: str = "auto"
    precision: str = "auto"
    trust_remote_code: bool = False


_SCALE = 2.0**-60  # exact, and sums of the largest numbers stay finite


class Line(NamedTuple):
    """A line to be written: its fields, and the answers that they hold."""

    fields: dict[str, Any]
    answers: list[Answer]


@dataclass
class Tally:
    """What was written: lines, answers and, for each term and the whole, scores and their sum.

    The sums are of scores times ``_SCALE``.
    """

    lines: int = 0
    answers: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, scores: Iterable[float | None]) -> None:
        """Scores of a term, or of the whole under no name."""
        there = [score for score in scores if score is not None]
        self.counts[name] += len(there)
        self.sums[name] += sum(score * _SCALE for score in there)  # type: ignore[assignment]

    def figures(self, name: str) -> dict[str, Any]:
        """Mean of a term's scores, and how many answers have none."""
        count = self.counts[name]
        mean = self.sums[name] / count / _SCALE if count else None
        return {"mean": mean, "missing": self.answers - count}


def run(options: ScoreOptions, reporter: Reporter, write: Callable[[str], Any]) -> dict[str, Any]:
    """Write each line of a file with the scores of its answers.

    Args:
        options: what is scored, and by what.
        reporter: hears about the progress.
        write: takes each line with its end.

    Returns:
        Counts and means: lines, answers, missing, mean, terms, dropped.

    Raises:
        ConfigError: a term cannot be opened.
        CheckpointError: a reward model cannot be used.
        DataError: the file cannot be read, or a line holds no answer.
        TrainingError: a term fails.
    """
    arithmetic = choose(options.device, options.precision)
    loading = Loading(arithmetic, trust_remote_code=options.trust_remote_code)
    reward = open_terms(options.terms, loading, reporter)
    tally = Tally()
    reporter.begin("score", total=None, unit="lines")
    with StopRequest() as stop:
        lines = _lines(options.file, tally, as_messages=reward.reads_turns)
        while chunk := list(islice(lines, CHUNK)):
            for text in _judged(chunk, reward, tally):
                write(text)
            tally.lines += len(chunk)
            reporter.advance(tally.lines)
            if stop.signum:
                raise Interrupted(
                    stop.signum,
                    what=f"interrupted after {tally.lines} lines",
                    do="run the same command again",
                )
    reporter.end()
    return {
        "status": "done",
        "lines": tally.lines,
        "answers": tally.answers,
        **tally.figures(""),
        "terms": {each.name: tally.figures(each.name) for each in options.terms},
        "dropped": dict(tally.dropped.most_common()),
    }


def _lines(name: str, tally: Tally, *, as_messages: bool) -> Iterator[Line]:
    """The lines of a file that hold answers."""
    rows = files.rows(name)
    first = next(rows)
    entry = formats.choose("auto", first.fields, first.origin)
    whole = chain([first], rows)
    if entry.name in OWN:
        for row in whole:
            yield _line(next(iter(entry.convert(iter([row]), False))), row)
        return
    for record in entry.convert(whole, as_messages):
        if isinstance(record, Useless):
            tally.dropped[record.reason] += 1
            continue
        yield _line(record, Row(canonical_line(record), record.origin))


def _line(record: Record, row: Row) -> Line:
    """The fields that are written, and the answers in them.

    Raises:
        DataError: there is no answer.
    """
    fields = plain(row.fields)
    if isinstance(record, Ranking):
        if not _is_canonical_list(fields.get("responses")):
            fields = canonical_line(record)
        given = [_answer(record.prompt, each, fields, row.origin) for each in record.responses]
        return Line(fields, given)
    if isinstance(record, Demonstration | Labelled):
        return Line(fields, [_sampled(record.prompt, record.response, fields, row.origin)])
    raise DataError(
        "there is no answer to score",
        where=getattr(record, "origin", row.origin),
        do="give lines with a prompt and a response, or responses",
    )


def _is_canonical_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _answer(prompt: PromptLike, response: Response, record: dict[str, Any], origin: str) -> Answer:
    return Answer(
        prompt=prompt,
        text=response.text,
        cut=response.cut,
        rendered=_joined(prompt),
        record=record,
        origin=origin,
        ids=response.ids,
        vocabulary=response.vocabulary,
    )


def _sampled(prompt: PromptLike, response: Response, record: dict[str, Any], origin: str) -> Answer:
    """An answer with the ids and the end that ``samples.jsonl`` tells of it."""
    answer = _answer(prompt, response, record, origin)
    ids = record.get("response_ids")
    if isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids):
        answer = answer._replace(ids=tuple(ids))
    return answer._replace(cut=answer.cut or record.get("ended") is False)


def _joined(prompt: PromptLike) -> str:
    """A prompt as one text; no policy is known here whose template would render its turns."""
    return prompt if isinstance(prompt, str) else "\n\n".join(turn.content for turn in prompt)


def _judged(lines: Sequence[Line], reward: TextReward, tally: Tally) -> Iterator[str]:
    """The lines as text, each answer with its score; null where no term has a judgement."""
    verdict = reward.judge([answer for line in lines for answer in line.answers])
    tally.answers += len(verdict.scores)
    tally.add("", verdict.scores)
    columns = zip(reward.terms, verdict.raw.unbind(1), verdict.judged.unbind(1), strict=True)
    for each, column, there in columns:
        tally.add(each.name, column[there].tolist())
    told = (
        {"score": score, **judges.of_answer(reward.terms, raw, judged)}
        for score, raw, judged in zip(*verdict, strict=True)
    )
    for line in lines:
        yield json_line(_with_scores(line.fields, list(islice(told, len(line.answers)))))


def _with_scores(fields: dict[str, Any], told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if "responses" not in fields:
        return fields | told[0]
    given = zip(fields["responses"], told, strict=True)
    return fields | {"responses": [response | scores for response, scores in given]}
