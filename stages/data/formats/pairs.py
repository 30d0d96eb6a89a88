"""Pairs of a chosen and a rejected answer: TRL's columns, and HH-RLHF's whole dialogues."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stages.data import fields as f
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


def read(row: Row) -> Record:
    """``chosen`` and ``rejected``, strings or messages, with a prompt column or a shared start."""
    chosen, rejected = f.get(row, "chosen"), f.get(row, "rejected")
    explicit = row.fields.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        texts = [f.text(chosen, row.at("chosen")), f.text(rejected, row.at("rejected"))]
        if explicit is not None:
            return _pair(row, f.prompt(explicit, row.at("prompt")), *texts)
        return _pair(row, *_common(*texts))
    start = None if explicit is None else f.prompt(explicit, row.at("prompt"))
    sides = [
        _conversation(start, f.turns(turns, row.at(side)), row.at(side))
        for side, turns in (("chosen", chosen), ("rejected", rejected))
    ]
    if sides[0][0] != sides[1][0]:
        return Useless(DIFFER, row.origin)
    return _pair(row, sides[0][0], sides[0][1], sides[1][1])


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
    if isinstance(start, str) or prompt[: len(start)] == start:
        return prompt or start, answer.content
    return start + prompt, answer.content


def _pair(row: Row, prompt: PromptLike, chosen: str, rejected: str) -> Ranking:
    scores = [
        f.number(row.fields.get(name), row.at(name)) for name in ("score_chosen", "score_rejected")
    ]
    name = row.fields.get("id")
    return Ranking(
        prompt=prompt,
        responses=(Response(chosen, 1, scores[0]), Response(rejected, 2, scores[1])),
        origin=row.origin,
        id=None if name is None else str(name),
        margin=f.number(row.fields.get("margin"), row.at("margin")),
    )
