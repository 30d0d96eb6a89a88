"""Single answers that somebody found desirable, or not: for kto."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.data import fields as f
from stages.data.formats import canonical, plain
from stages.data.records import Cell, Demonstration, Labelled, Record, Row

_TRUTH = {"true": True, "false": False}


def is_labelled(fields: Mapping[str, Any]) -> bool:
    """A prompt with one answer and a label that is true or false, no number."""
    answered = "response" in fields or "completion" in fields
    label = fields.get("label")
    judged = isinstance(label, bool) or (isinstance(label, Cell) and label.lower() in _TRUTH)
    return "prompt" in fields and answered and judged


def read(row: Row) -> Record:
    """A line ``{"prompt", "response", "label"}``; TRL calls the answer ``completion``."""
    own = "response" in row.fields
    record = canonical.read(row) if own else plain.prompt_completion(row)
    if not isinstance(record, Demonstration):
        return record
    return Labelled(record.prompt, record.response, _label(row), row.origin)


def _label(row: Row) -> bool:
    value = f.get(row, "label")
    known = _TRUTH.get(value.lower()) if isinstance(value, Cell) else value
    if not isinstance(known, bool):
        f.wrong(f"must be true or false, not {value!r}", row.at("label"))
    return known
