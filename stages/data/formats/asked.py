"""What was asked, where it is spread over several columns: instruction, context, system, history.

Where a file has a column for a system text or for earlier turns, each of its prompts is read as
turns, so that all of them reach the model in the same way.
"""

from __future__ import annotations

from stages.data import fields as f
from stages.data.records import Message, PromptLike, Row, Turns

_SYSTEM = ("system", "system_prompt")


def instruction(row: Row, field: str, context: str) -> PromptLike:
    """An instruction, and the context below it after a blank line."""
    parts = [f.text(f.get(row, field), row.at(field))]
    parts.append(f.optional_text(row.fields.get(context), row.at(context)) or "")
    return in_turns(row, "\n\n".join(part for part in parts if part))


def in_turns(row: Row, prompt: PromptLike) -> PromptLike:
    """The prompt behind the row's system text and earlier turns, where it has columns for them."""
    columns = [name for name in _SYSTEM if name in row.fields]
    before = tuple(turn for name in columns for turn in _system(row, name))
    if not columns and "history" not in row.fields:
        return prompt
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    if turns[0].role == "system":
        before = ()
    return (*before, *_history(row), *turns)


def _system(row: Row, name: str) -> Turns:
    text = f.optional_text(row.fields[name], row.at(name))
    return (Message("system", text),) if text else ()


def _history(row: Row) -> Turns:
    """LLaMA-Factory's ``history``: pairs of a question and its answer."""
    where = row.at("history")
    given = row.fields.get("history")
    if not given:
        return ()
    turns: list[Message] = []
    for n, pair in enumerate(f.items(given, where)):
        words = f.items(pair, f"{where}[{n}]")
        if len(words) != 2:
            f.wrong("must be a question and its answer", f"{where}[{n}]")
        user, answer = (f.text(text, f"{where}[{n}]") for text in words)
        turns += [Message("user", user), Message("assistant", answer)]
    return tuple(turns)
