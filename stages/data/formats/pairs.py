"""Pairs of a chosen and a rejected answer: TRL's columns, and HH-RLHF's whole dialogues."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from stages.data import fields as f
from stages.data.formats import asked
from stages.data.records import (
    Message,
    PromptLike,
    Ranking,
    Record,
    Response,
    Row,
    Turns,
    Useless,
)

_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
DIFFER = "the prompts of the two answers differ"
_LARGEST = sys.float_info.max  # nothing is told by what no float holds, nor by NaN
_ASKED = ("prompt", "question", "input")
_SCORES = ("score_{}", "{}_score", "{}-rating", "{}_rating")
_REPEATED = 40  # nobody begins both answers with so long a prompt; so the file repeats it there


def is_hh(fields: Mapping[str, Any]) -> bool:
    """Two dialogues of Human and Assistant."""
    both = [fields.get("chosen"), fields.get("rejected")]
    return all(isinstance(text, str) and text.lstrip().startswith("Human:") for text in both)


def hh(row: Row, as_messages: bool) -> Record:
    """Two dialogues that differ in their last assistant turn only."""
    chosen, rejected = (
        split_dialogue(f.text(f.get(row, side), row.at(side)), row.at(side))
        for side in ("chosen", "rejected")
    )
    if chosen[0] != rejected[0]:
        return Useless(DIFFER, row.origin)
    answers = (chosen[1], rejected[1])
    if as_messages:
        return _pair(row, turns_of(chosen[0]), answers[0].strip(), answers[1].strip())
    return _pair(row, chosen[0], *answers)


def split_dialogue(dialogue: str, where: str) -> tuple[str, str]:
    """The dialogue up to and with its last "Assistant:", and what follows."""
    prompt, marker, answer = dialogue.rpartition(_ASSISTANT)
    if not marker:
        f.wrong('no "Assistant:" turn in the dialogue', where)
    return prompt + marker, answer


def turns_of(prompt: str) -> Turns:
    """The turns of a dialogue string, without the open assistant turn at its end."""
    pieces = _SPEAKER.split(prompt)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    spoken = zip(pieces[::2], pieces[1::2], strict=True)
    turns = [Message(roles[speaker], words.strip()) for speaker, words in spoken]
    return tuple(turns[:-1] if turns and turns[-1] == Message("assistant", "") else turns)


def read(row: Row, as_messages: bool) -> Record:
    """``chosen`` and ``rejected``, strings or messages, with a prompt column or a shared start."""
    chosen, rejected = (f.conversation(f.get(row, side)) for side in ("chosen", "rejected"))
    start = _asked(row)
    if isinstance(chosen, str) and isinstance(rejected, str):
        texts = [f.text(chosen, row.at("chosen")), f.text(rejected, row.at("rejected"))]
        if start is None:
            return _pair(row, *_common(*texts))
        return _pair(row, *_behind(start, *texts, as_messages=as_messages))
    sides = [
        _conversation(start, f.turns(turns, row.at(side)), row.at(side))
        for side, turns in (("chosen", chosen), ("rejected", rejected))
    ]
    if sides[0][0] != sides[1][0]:
        return Useless(DIFFER, row.origin)
    return _pair(row, sides[0][0], sides[0][1], sides[1][1])


def _asked(row: Row) -> PromptLike | None:
    """The prompt by whichever column holds it, or None."""
    if row.fields.get("instruction") is not None and row.fields.get("prompt") is None:
        return asked.instruction(row, "instruction", "input")
    given = next((name for name in _ASKED if row.fields.get(name) is not None), None)
    if given is not None:
        return asked.in_turns(row, f.prompt(row.fields[given], row.at(given)))
    sides = [f.unfolded(row.fields[side]) for side in ("chosen", "rejected")]
    if "conversations" in row.fields and all(isinstance(side, dict) for side in sides):
        turns = f.prompt(row.fields["conversations"], row.at("conversations"))
        return asked.in_turns(row, turns)
    return None


def _behind(
    prompt: PromptLike, chosen: str, rejected: str, *, as_messages: bool
) -> tuple[PromptLike, str, str]:
    """Prompt and answers, without a prompt that both answers repeat, and as turns where asked."""
    if not isinstance(prompt, str):
        return prompt, chosen, rejected
    if len(prompt) >= _REPEATED and chosen.startswith(prompt) and rejected.startswith(prompt):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if as_messages and prompt.lstrip().startswith("Human:"):
        return turns_of(prompt), chosen.strip(), rejected.strip()
    return prompt, chosen, rejected


def _common(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Cut what two strings share off as their prompt, between words: TRL's implicit prompt."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    shared = chosen[:same]
    rest = (chosen[len(shared) :], rejected[len(shared) :])
    if not all(text[:1].isspace() for text in rest):
        shared = re.sub(r"\s*\S*$", "", shared)
    cut = len(shared)
    return shared, chosen[cut:], rejected[cut:]


def _conversation(start: PromptLike | None, turns: Turns, where: str) -> tuple[PromptLike, str]:
    """The prompt and the last assistant turn of one side."""
    *before, answer = turns
    if answer.role != "assistant":
        f.wrong("the last turn must be the assistant's", f"{where}[{len(turns) - 1}].role")
    prompt = tuple(before)
    if start is None and not prompt:
        f.wrong("no turn before the answer, and no prompt column", where)
    if start is None or (isinstance(start, str) and prompt):
        return prompt, answer.content
    given = (Message("user", start),) if isinstance(start, str) else start
    if not prompt or prompt[: len(given)] == given:
        return prompt or given, answer.content
    return _joined(given, prompt), answer.content


def _joined(start: Turns, prompt: Turns) -> Turns:
    """The turns of the prompt column, and those of the answer's column that it does not hold."""
    repeated = start[0].role == "system" and start[1:] == prompt
    return start if repeated else start + prompt


def _pair(row: Row, prompt: PromptLike, chosen: str, rejected: str) -> Ranking:
    scores = [_score(row, side) for side in ("chosen", "rejected")]
    return Ranking(
        prompt=prompt,
        responses=(Response(chosen, 1, scores[0]), Response(rejected, 2, scores[1])),
        origin=row.origin,
        id=f.name(row.fields.get("id")),
        margin=f.number(row.fields.get("margin"), row.at("margin")),
    )


def _score(row: Row, side: str) -> float | None:
    """The score of an answer, under the names that it has in the known data sets."""
    first, *others = (name.format(side) for name in _SCORES)
    if first in row.fields:
        return f.number(row.fields[first], row.at(first))
    found = (row.fields[name] for name in others if name in row.fields)
    return next((float(n) for n in found if type(n) in (int, float) and abs(n) <= _LARGEST), None)
