"""Chat templates: found, applied, and cut where the earlier answers of a conversation stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from stages.data.records import Message, Turns, to_json
from stages.errors import ConfigError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BUILT_IN = {"chatml": CHATML}
_END_OF_CHATML = "<|im_end|>"


def render(tokenizer: Any, template: str, turns: Turns, *, generation: bool) -> str:
    """Apply a chat template; whatever it raises becomes a ConfigError that names it."""
    try:
        text: str = tokenizer.apply_chat_template(
            to_json(turns),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=generation,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the chat template fails: {error}",
            where="data.chat_template",
            do="correct the template, or give conversations in the form it expects",
        ) from error
    return text


def template_of(tokenizer: Any, name: str | None) -> str | None:
    if name is None:
        own = tokenizer.chat_template
        return own.get("default") if isinstance(own, dict) else own
    if name in _BUILT_IN:
        return _with_end_token(tokenizer, _BUILT_IN[name])
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot read the chat template: {reason}",
            where=f"data.chat_template: {name}",
            do=f"give the path of a Jinja file, or a built-in name: {', '.join(_BUILT_IN)}",
        ) from error


def _with_end_token(tokenizer: Any, template: str) -> str:
    """The built-in template, closed by the tokenizer's own end token where it lacks ChatML's."""
    if _END_OF_CHATML in tokenizer.get_vocab() or tokenizer.eos_token is None:
        return template
    return template.replace(_END_OF_CHATML, "{{ eos_token }}")


def end_of_turn(tokenizer: Any, template: str) -> int | None:
    """The first special token after the text of an answer, or None where there is none."""
    mark = "\ue000answer\ue001"
    turns = (Message("user", "a"), Message("assistant", mark))
    _, found, tail = render(tokenizer, template, turns, generation=False).partition(mark)
    if not found:
        raise ConfigError(
            "the chat template does not show the assistant's turn",
            where="data.chat_template",
            do="use a template that renders every turn",
        )
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokenizer(tail, add_special_tokens=False, verbose=False)["input_ids"]
    return next((token for token in ids if token in special), None)


def pieces_of(turns: Turns, apply: Callable[[Turns], str]) -> list[str]:
    """The rendered prompt cut before and after each earlier answer: an odd number of texts.

    The answers are found by rendering once more with placeholders in their stead. The texts
    between the placeholders then delimit what the template made of each answer, trimmed or not.

    Args:
        turns: a conversation that the assistant is to answer.
        apply: the template.

    Raises:
        ConfigError: the template moves the answers.
    """
    whole = apply(turns)
    marks = {n: f"\ue000{n}\ue001" for n, t in enumerate(turns) if t.role == "assistant"}
    if not marks:
        return [whole]
    masked = tuple(Message(t.role, marks.get(n, t.content)) for n, t in enumerate(turns))
    between = _split(apply(masked), list(marks))
    answers = None if between is None else _answers(whole, between)
    if between is None or answers is None:
        raise ConfigError(
            "the chat template does not keep the earlier answers of a conversation in place",
            where="data.chat_template",
            do="use another template, or conversations with one answer",
        )
    return [text for pair in zip(between, answers, strict=False) for text in pair] + between[-1:]


def _split(skeleton: str, numbers: Sequence[int]) -> list[str] | None:
    """The texts around the placeholders, or None where these do not stand there once, in order."""
    parts = re.split("\ue000(\\d+)\ue001", skeleton)
    return parts[::2] if parts[1::2] == [str(n) for n in numbers] else None


def _answers(whole: str, between: Sequence[str]) -> list[str] | None:
    """What stands between the texts, each taken where it comes first, the last one at the end."""
    if not (whole.startswith(between[0]) and whole.endswith(between[-1])):
        return None
    answers, at = [], len(between[0])
    for text in between[1:-1]:
        stop = whole.find(text, at)
        if stop < 0:
            return None
        answers.append(whole[at:stop])
        at = stop + len(text)
    stop = len(whole) - len(between[-1])
    return [*answers, whole[at:stop]] if stop >= at else None
