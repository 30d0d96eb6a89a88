"""Prompts and answers as token ids: the one prompt builder of all stages.

Prompt and answer are tokenised apart and their ids joined, as in a rollout, where the answer is
sampled after the prompt's ids. A prompt with earlier answers in it is tokenised piecewise at their
boundaries, so that a conversation and its continuation share their ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from stages.data.chat_template import end_of_turn, pieces_of, render, template_of
from stages.data.long_text import first_tokens, last_tokens
from stages.data.records import Message, PromptLike, Turns
from stages.errors import CheckpointError, ConfigError


class Span(NamedTuple):
    """Tokens ``start:stop`` of a prompt: an earlier answer with its end token."""

    start: int
    stop: int


class EncodedPrompt(NamedTuple):
    """The ids of a prompt, and where the earlier answers in it stand."""

    ids: np.ndarray
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Codec:
    """A tokenizer with the template and the end tokens that go with it.

    Attributes:
        tokenizer: a transformers tokenizer; it is not changed.
        template: the Jinja text of the chat template, or None.
        as_messages: whether a plain string prompt becomes one user turn.
        end_id: closes an answer to a templated prompt: the template's end-of-turn token.
        eos_id: closes an answer to a plain prompt: the tokenizer's end-of-text token.
        stop_ids: every token that ends a rollout.
        prefix: the special tokens that the tokenizer puts before a plain text.
        template_hash: changes with the template, ``as_messages`` and the end tokens.
        vocabulary_hash: changes with any token or id.
    """

    tokenizer: Any
    template: str | None
    as_messages: bool
    end_id: int
    eos_id: int
    stop_ids: tuple[int, ...]
    prefix: tuple[int, ...]
    template_hash: str
    vocabulary_hash: str

    def turns(self, prompt: PromptLike) -> Turns | None:
        """The prompt as turns for the template, or None for a plain string."""
        if isinstance(prompt, str):
            return (Message("user", prompt),) if self.as_messages else None
        return tuple(prompt)

    def end_of(self, prompt: PromptLike) -> int:
        """The token that closes an answer to this prompt."""
        return self.eos_id if self.turns(prompt) is None else self.end_id

    def render(self, prompt: PromptLike) -> str:
        """The text of a prompt as the model reads it, up to where the answer starts."""
        turns = self.turns(prompt)
        if turns is None:
            assert isinstance(prompt, str)
            return prompt
        return self._apply(turns, generation=True)

    def encode_prompt(self, prompt: PromptLike, most: int | None = None) -> EncodedPrompt:
        """The ids of a prompt, in every stage.

        Args:
            prompt: a text or turns.
            most: of a prompt of more than ``most`` ids, the last ``most`` are right, with the
                answers among them, and more are there; None = all are.

        Raises:
            ConfigError: messages without a chat template, or a template that refuses them.
        """
        turns = self.turns(prompt)
        if turns is None:
            return EncodedPrompt(self._plain(self.render(prompt), most))
        return self._joined(
            pieces_of(turns, lambda shown: self._apply(shown, generation=True)), most
        )

    def encode_response(
        self, text: str, *, cut: bool = False, end: int | None = None, most: int | None = None
    ) -> np.ndarray:
        """The ids of an answer, closed by exactly one end token unless it was cut.

        Args:
            text: the answer; end tokens written at its end are taken off first.
            cut: whether the answer stops without having ended.
            end: the end token, ``end_id`` unless given.
            most: of an answer of more than ``most`` ids, the first ``most`` are right, and more are
                there; None = all are.
        """
        end = self.end_id if end is None else end
        ends = (end, self.end_id, self.eos_id)
        ids, whole = first_tokens(self._ids, text, most)
        if not whole and ids[-1] in ends:
            ids = self._ids(text)  # whether the answer goes on behind it decides
        while len(ids) and ids[-1] in ends:
            ids = ids[:-1]
        return ids if cut else np.append(ids, np.int32(end))

    def decode(self, ids: Sequence[int] | np.ndarray, *, special: bool = False) -> str:
        """The text of ids, without stop tokens at its end; ``special`` shows every token."""
        tokens = [int(token) for token in ids]
        while not special and tokens and tokens[-1] in self.stop_ids:
            tokens.pop()
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def tokenizer_hash(self) -> str:
        """Changes with anything that can change the ids of a text."""
        fast: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        text = fast.to_str() if hasattr(fast, "to_str") else repr(self.tokenizer)
        return _hash([text, self.vocabulary_hash, list(self.prefix)])

    def _plain(self, text: str, most: int | None) -> np.ndarray:
        """A plain text behind the tokenizer's own prefix, which is not doubled."""
        ids, whole = last_tokens(self._ids, text, most)
        if not whole:
            return ids
        if tuple(ids[: len(self.prefix)]) == self.prefix:
            return ids
        return np.concatenate([np.array(self.prefix, dtype=np.int32), ids])

    def _joined(self, pieces: list[str], most: int | None) -> EncodedPrompt:
        """The ids of a conversation, its pieces taken from the last one back as far as is asked.

        A span is an earlier answer and what of the piece after it still belongs to it.
        """
        parts: list[np.ndarray] = []
        back: list[list[int]] = []  # start and stop of each span, as distances from the end
        held = 0
        for n in reversed(range(len(pieces))):
            room = None if most is None else most - held
            ids, whole = last_tokens(self._ids, pieces[n], room)
            parts.append(ids)
            held += len(ids)
            if n % 2:
                back[-1][0] = held
            elif n and whole:
                back.append([held, held - self._end_within(ids)])
            if most is not None and held > most:
                break
        spans = (Span(held - start, held - stop) for start, stop in reversed(back))
        return EncodedPrompt(np.concatenate(parts[::-1]), tuple(spans))

    def _ids(self, text: str) -> np.ndarray:
        # The Python part of a call takes several times as long as the tokenizer itself.
        fast = self._fast
        if fast is not None and fast.truncation is None and fast.padding is None:
            return np.array(fast.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return np.array(encoded["input_ids"], dtype=np.int32)

    @cached_property
    def _fast(self) -> Any:
        """The Rust tokenizer that does the work of a call, where its class adds nothing to it."""
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        kind = type(self.tokenizer)
        plain = all(
            getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None)
            for name in ("__call__", "_encode_plus")
        )
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        return fast if plain and isinstance(fast, Tokenizer) else None

    def _apply(self, turns: Turns, *, generation: bool) -> str:
        if self.template is None:
            raise ConfigError(
                "the data holds messages, but the tokenizer has no chat template",
                where="data.chat_template",
                do="set data.chat_template to chatml or to the path of a template",
            )
        return render(self.tokenizer, self.template, turns, generation=generation)

    def _end_within(self, ids: np.ndarray) -> int:
        """How many tokens after an answer still belong to it: blanks and the end token, or none."""
        ends = np.flatnonzero(ids == self.end_id)
        if not len(ends):
            return 0
        before = self.decode(ids[: ends[0]], special=True)
        return 0 if before.strip() else int(ends[0]) + 1


def make_codec(
    tokenizer: Any,
    *,
    chat_template: str | None,
    as_messages: bool,
    extra_stop_ids: Sequence[int] = (),
) -> Codec:
    """Join a tokenizer with a chat template.

    Args:
        tokenizer: a transformers tokenizer.
        chat_template: None = the tokenizer's own, a built-in name, or the path of a file.
        as_messages: whether a plain string prompt becomes one user turn.
        extra_stop_ids: further tokens that end a rollout.

    Raises:
        ConfigError: the template is missing or broken, or ``as_messages`` has none to use.
        CheckpointError: the tokenizer has no end token.
    """
    template = template_of(tokenizer, chat_template)
    if as_messages and template is None:
        raise ConfigError(
            "data.as_messages needs a chat template, and the tokenizer has none",
            where="data.chat_template",
            do="set data.chat_template to chatml or to the path of a template",
        )
    eos_id = tokenizer.eos_token_id
    end_id = eos_id if template is None else end_of_turn(tokenizer, template)
    if eos_id is None and end_id is None:
        raise CheckpointError(
            "the tokenizer has no end token, so no answer could ever end",
            do="set eos_token in the tokenizer's configuration",
        )
    eos_id, end_id = (end_id if eos_id is None else eos_id), (eos_id if end_id is None else end_id)
    assert end_id is not None
    assert eos_id is not None
    return Codec(
        tokenizer=tokenizer,
        template=template,
        as_messages=as_messages,
        end_id=int(end_id),
        eos_id=int(eos_id),
        stop_ids=tuple(dict.fromkeys([int(end_id), int(eos_id), *extra_stop_ids])),
        prefix=_prefix(tokenizer),
        template_hash=_hash([template, as_messages, int(end_id), int(eos_id)]),
        vocabulary_hash=_hash(sorted(tokenizer.get_vocab().items())),
    )


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """The special tokens put before a text (a begin token, most often); never those after it."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]
    starts = (n for n in range(len(full)) if full[n : n + len(bare)] == bare)
    return tuple(full[: next(starts, 0)])


def _hash(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True).encode()
    return blake2b(text, digest_size=16).hexdigest()
