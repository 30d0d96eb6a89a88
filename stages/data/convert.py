"""Records in the form that this tool or another one reads: a JSON line each, or one a pair.

The other tools learn rewards from pairs, so a ranking becomes all of its strict pairs. Sources:
TRL's page "Dataset formats and types"; OpenRLHF's ``openrlhf/datasets``; LLaMA-Factory's
``data/README.md`` and the alpaca converter in ``src/llamafactory/data/converter.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TextIO

from stages.data import files, formats
from stages.data.encode import NO_STRICT_PAIR, UNRANKED, ranked_responses
from stages.data.records import (
    Demonstration,
    Document,
    Labelled,
    Message,
    Prompt,
    PromptLike,
    Ranking,
    Record,
    Response,
    Useless,
    to_json,
)

NOT_IN_TURN = "turns that do not alternate between user and assistant"
_PROGRESS_EVERY = 1024
_SEPARATORS = {ord(mark): f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}

Lines = list[dict[str, Any]] | str


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        format: of the file that was read.
        records: records in it.
        lines: lines written.
        dropped: reason → records that gave no line.
    """

    format: str
    records: int
    lines: int
    dropped: dict[str, int]


def convert(
    name: str,
    to: str,
    out: TextIO,
    *,
    as_messages: bool = False,
    columns: Mapping[str, str] | None = None,
    reporter: Any = None,
) -> Converted:
    """Write the records of a file in another form, one record in memory at a time.

    Args:
        name: a file in any known format, or ``-`` for standard input.
        to: one of ``TARGETS``.
        out: where the lines go.
        as_messages: whether dialogues in one string become turns, and other prompts a user turn.
        columns: foreign names → ours.
        reporter: hears how far it is.

    Raises:
        DataError: the file is missing, empty, broken or of no known format.
    """
    lines, dropped, n = 0, Counter[str](), 0
    if reporter is not None:
        reporter.begin(f"converting {name}", total=None, unit="records")
    entry, records = formats.convert(files.rows(name, columns), "auto", as_messages)
    for n, record in enumerate(records, start=1):
        found = _lines(_in_turns(record) if as_messages else record, to)
        if isinstance(found, str):
            dropped[found] += 1
            continue
        for line in found:
            out.write(json_line(line))
        lines += len(found)
        if reporter is not None and n % _PROGRESS_EVERY == 0:
            reporter.advance(n)
    if reporter is not None:
        reporter.end()
    return Converted(entry.name, n, lines, dict(dropped.most_common()))


def json_line(line: dict[str, Any]) -> str:
    """One line for every reader: those that take U+2028 and its like for line ends included."""
    text = json.dumps(line, ensure_ascii=False)
    return (text if text.isascii() else text.translate(_SEPARATORS)) + "\n"


def _in_turns(record: Record) -> Record:
    """A record whose string prompt is one user turn."""
    if isinstance(record, Useless | Document) or not isinstance(record.prompt, str):
        return record
    return replace(record, prompt=(Message("user", record.prompt),))


def _lines(record: Record, to: str) -> Lines:
    """The lines of a record, or why it gives none."""
    if isinstance(record, Useless):
        return record.reason
    return _TARGETS[to](record)


def _canonical(record: Record) -> Lines:
    assert not isinstance(record, Useless)
    return [canonical_line(record)]


def canonical_line(record: Any) -> dict[str, Any]:
    """A record as this tool writes it; any record but a useless one."""
    if isinstance(record, Document):
        return {"text": record.text}
    line: dict[str, Any] = {"prompt": to_json(record.prompt)}
    if isinstance(record, Demonstration):
        line["response"] = record.response.text
        line |= _given(flags=list(record.response.flags))
    elif isinstance(record, Labelled):
        line |= {"response": record.response.text, "label": record.desirable}
        line |= _given(flags=list(record.response.flags))
    elif isinstance(record, Ranking):
        ranked = any(response.rank is not None for response in record.responses)
        line = _given(id=record.id) | line
        line["responses"] = [_response(response, ranked) for response in record.responses]
        line |= _given(labeler=record.labeler, source=record.source, margin=record.margin)
    return line


def _response(response: Response, ranked: bool) -> dict[str, Any]:
    rank = {"rank": response.rank} if ranked else {}
    return {"text": response.text, **rank} | _given(
        score=response.score,
        ids=None if response.ids is None else list(response.ids),
        vocabulary=response.vocabulary,
        flags=list(response.flags),
        model=response.model,
    )


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != []}


def _trl(record: Record) -> Lines:
    if isinstance(record, Demonstration):
        answer = _answer(record.prompt, record.response)
        return [{"prompt": to_json(record.prompt), "completion": answer}]
    if isinstance(record, Labelled):
        answer = _answer(record.prompt, record.response)
        prompt = to_json(record.prompt)
        return [{"prompt": prompt, "completion": answer, "label": record.desirable}]
    if isinstance(record, Ranking):
        return _pairs(record)
    return _canonical(record)


def _openrlhf(record: Record) -> Lines:
    if isinstance(record, Demonstration):
        answer = _answer(record.prompt, record.response)
        return [{"input": to_json(record.prompt), "output": answer}]
    if isinstance(record, Labelled):
        answer = _answer(record.prompt, record.response)
        label = int(record.desirable)
        return [{"input": to_json(record.prompt), "output": answer, "label": label}]
    if isinstance(record, Ranking):
        return _pairs(record)
    if isinstance(record, Prompt):
        return [{"input": to_json(record.prompt)}]
    assert isinstance(record, Document)
    return [{"input": record.text}]


def _answer(prompt: PromptLike, response: Response) -> Any:
    """A text behind a text, an assistant turn behind turns."""
    if isinstance(prompt, str):
        return response.text
    return [{"role": "assistant", "content": response.text}]


def _pairs(record: Ranking) -> Lines:
    found = _strict_pairs(record)
    if isinstance(found, str):
        return found
    prompt = to_json(record.prompt)
    return [
        {
            "prompt": prompt,
            "chosen": _answer(record.prompt, chosen),
            "rejected": _answer(record.prompt, rejected),
            **_measures(record, chosen, rejected),
        }
        for chosen, rejected in found
    ]


def _strict_pairs(record: Ranking) -> list[tuple[Response, Response]] | str:
    """Each pair of answers of unlike rank, the better one first; or why there is none."""
    ranked = sorted(ranked_responses(record), key=lambda pair: pair[1])
    if len(ranked) < 2:
        return UNRANKED
    pairs = combinations(ranked, 2)
    return [(a, b) for (a, first), (b, second) in pairs if first < second] or NO_STRICT_PAIR


def _measures(record: Ranking, chosen: Response, rejected: Response) -> dict[str, Any]:
    scored = chosen.score is not None and rejected.score is not None
    scores = {"score_chosen": chosen.score, "score_rejected": rejected.score} if scored else {}
    return scores | _given(margin=record.margin)


def _llama_factory(record: Record) -> Lines:
    """Alpaca's columns; turns go into ``system`` and ``history``, which a plain prompt has not."""
    if isinstance(record, Document):
        return [{"text": record.text}]
    assert not isinstance(record, Useless)
    asked = _alpaca(record.prompt)
    if asked is None:
        return NOT_IN_TURN
    if isinstance(record, Demonstration):
        return [asked | {"output": record.response.text}]
    if isinstance(record, Labelled):
        return [asked | {"output": record.response.text, "kto_tag": record.desirable}]
    if isinstance(record, Prompt):
        return [asked]
    found = _strict_pairs(record)
    if isinstance(found, str):
        return found
    return [asked | {"chosen": a.text, "rejected": b.text} for a, b in found]


def _alpaca(prompt: PromptLike) -> dict[str, Any] | None:
    """Instruction, system text and history; None where the turns do not alternate."""
    if isinstance(prompt, str):
        return {"instruction": prompt, "input": ""}
    system = prompt[0].content if prompt[0].role == "system" else ""
    turns = prompt[prompt[0].role == "system" :]
    roles = [turn.role for turn in turns]
    if roles != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        return None
    texts = [turn.content for turn in turns]
    history = [list(pair) for pair in zip(texts[:-1:2], texts[1::2], strict=True)]
    return {"instruction": texts[-1], "input": "", "system": system, "history": history}


_TARGETS: dict[str, Callable[[Record], Lines]] = {
    "canonical": _canonical,
    "trl": _trl,
    "openrlhf": _openrlhf,
    "llama-factory": _llama_factory,
}
TARGETS = tuple(_TARGETS)
