"""Prompts and answers within the limits: whole, cut where the config says so, or left out.

No more of a text is tokenised than the limits could keep, and as much again to know it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from stages.data.records import PromptLike, Response, Turns
from stages.data.templates import Codec, EncodedPrompt, Span

PROMPT_OVER = "prompt over max_prompt_tokens"
ANSWER_OVER = "answer over max_response_tokens"
POSITIONS_OVER = "prompt and answer over the model's positions"


@dataclass(frozen=True)
class Limits:
    """Where a record is too long, in tokens; None = no limit.

    Attributes:
        prompt: ``data.max_prompt_tokens``.
        response: ``data.max_response_tokens``, the end token included.
        positions: positions of the model, shared by prompt and answer.
        truncate: cut records that are too long instead of dropping them.
    """

    prompt: int | None = None
    response: int | None = None
    positions: int | None = None
    truncate: bool = False


def fit(
    prompt: PromptLike, responses: tuple[Response, ...], codec: Codec, limits: Limits
) -> tuple[EncodedPrompt, tuple[np.ndarray, ...]] | str:
    """Prompt and answers within the limits: prompt tokens go before answer tokens."""
    end = codec.end_of(prompt)
    limit = limits.response
    if limits.truncate and limits.positions is not None:
        limit = min(limits.positions - 1, limit or limits.positions)
    most = limits.positions if limit is None else limit
    answers = tuple(response_ids(response, codec, end, most) for response in responses)
    if limit is not None and any(len(answer) > limit for answer in answers):
        if not limits.truncate:
            return ANSWER_OVER
        answers = tuple(answer[:limit] for answer in answers)
    longest = max(map(len, answers))
    room = None if limits.positions is None else limits.positions - longest
    fitted = fit_prompt(prompt, codec, limits, room)
    return fitted if isinstance(fitted, str) else (fitted, answers)


def response_ids(response: Response, codec: Codec, end: int, most: int | None = None) -> np.ndarray:
    """The ids of an answer: those it was sampled with where the vocabulary is the same.

    Sampled ids that ended in a stop token keep it; others get the end token, unless cut. Of an
    answer of more than ``most`` ids, the first ``most`` are right and more are there.
    """
    if response.ids is None or response.vocabulary != codec.vocabulary_hash:
        return codec.encode_response(response.text, cut=response.cut, end=end, most=most)
    ids = np.array(response.ids, dtype=np.int32)
    if response.cut or (len(ids) and int(ids[-1]) in codec.stop_ids):
        return ids
    return np.append(ids, np.int32(end))


def fit_prompt(
    prompt: PromptLike, codec: Codec, limits: Limits, room: int | None
) -> EncodedPrompt | str:
    """The prompt within its own limit and the positions its answer leaves it."""
    limit = min((n for n in (limits.prompt, room) if n is not None), default=None)
    encoded = codec.encode_prompt(prompt, limit)
    if limit is None or len(encoded.ids) <= limit:
        return encoded
    if not limits.truncate or limit < 1:
        return PROMPT_OVER if _is_over(prompt, codec, limits.prompt, limit) else POSITIONS_OVER
    turns = codec.turns(prompt)
    starts = [] if turns is None else _later_starts(turns)
    if turns is None or not starts:
        return last_ids(encoded, limit, codec.prefix if turns is None else ())

    def fits(start: int) -> bool:
        return len(codec.encode_prompt(_begun_at(turns, start), limit).ids) <= limit

    longest = starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)]
    encoded = codec.encode_prompt(_begun_at(turns, longest), limit)
    return encoded if len(encoded.ids) <= limit else last_ids(encoded, limit, ())


def _is_over(prompt: PromptLike, codec: Codec, own: int | None, limit: int) -> bool:
    """Whether a prompt of more than ``limit`` tokens is over its own limit too."""
    if own is None or own <= limit:
        return own is not None
    if len(codec.render(prompt).encode()) <= own:  # a token has a byte at least
        return False
    return len(codec.encode_prompt(prompt, own).ids) > own


def _later_starts(turns: Turns) -> list[int]:
    """Where a conversation may begin instead: at its second, third, … user turn."""
    return [n for n, turn in enumerate(turns) if turn.role == "user"][1:]


def _begun_at(turns: Turns, start: int) -> Turns:
    """The conversation from a turn on, behind its system turn."""
    head = turns[:1] if turns[0].role == "system" else ()
    return (*head, *turns[start:])


def last_ids(encoded: EncodedPrompt, limit: int, prefix: tuple[int, ...]) -> EncodedPrompt:
    """The last ``limit`` tokens, behind the prefix where there is room for it."""
    kept = len(prefix) if len(prefix) < limit else 0
    cut = len(encoded.ids) - (limit - kept)
    ids = np.concatenate([np.array(prefix[:kept], dtype=np.int32), encoded.ids[cut:]])
    spans = (Span(max(s.start - cut, 0) + kept, s.stop - cut + kept) for s in encoded.spans)
    return EncodedPrompt(ids, tuple(span for span in spans if span.stop > kept))
