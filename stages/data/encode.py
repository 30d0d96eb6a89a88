"""Records → token ids with their targets marked, or the reason why a record is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stages.batch import Example, Group
from stages.data.fit import Limits, fit, fit_prompt, response_ids
from stages.data.records import Demonstration, Document, Labelled, Prompt, Ranking, Response
from stages.data.templates import Codec, EncodedPrompt
from stages.errors import DataError

EMPTY_ANSWER = "empty answer"
EMPTY_PROMPT = "empty prompt"
UNRANKED = "fewer than two ranked answers"
NO_STRICT_PAIR = "no strict pair"
ALL_TIED = "all answers tied"
NO_TARGET = "no target token"
DESIRABLE, UNDESIRABLE = 1, 2  # the ranks of labelled answers


def encode_demonstration(
    record: Demonstration, codec: Codec, limits: Limits, *, train_on: str = "assistant"
) -> Example | str:
    """One sequence whose targets are the answer and its end token.

    Args:
        record: prompt and answer.
        codec: tokenizer and template.
        limits: what is too long.
        train_on: ``last`` = the answer; ``assistant`` = earlier answers in the prompt too;
            ``all`` = every token but the first, which nothing precedes.
    """
    if not record.response.text.strip():
        return EMPTY_ANSWER
    fitted = fit(record.prompt, (record.response,), codec, limits)
    if isinstance(fitted, str):
        return fitted
    prompt, (answer,) = fitted
    ids = np.concatenate([prompt.ids, answer])
    marks = np.zeros(len(ids), dtype=bool)
    marks[0 if train_on == "all" else len(prompt.ids) :] = True
    if train_on == "assistant":
        for span in prompt.spans:
            marks[span.start : span.stop] = True
    marks[:1] = False
    targets = np.flatnonzero(marks).astype(np.int32)
    return Example(ids, targets) if len(targets) else NO_TARGET


def encode_ranking(
    record: Ranking,
    codec: Codec,
    limits: Limits,
    *,
    ties: str = "drop",
    margin: Any = 0.0,
) -> Group | str:
    """A prompt with its K ranked answers; answers without a rank are no part of K.

    Args:
        record: the ranking.
        codec: tokenizer and template.
        limits: what is too long.
        ties: ``drop`` needs at least one strict pair, ``half`` does without.
        margin: a number, ``{per_rank: x}``, ``data``, or for odpo the ``score`` of each answer,
            which with ``score above 0`` must order them as the ranks do.
    """
    ranked = ranked_responses(record)
    if len(ranked) < 2:
        return UNRANKED
    ranks = tuple(int(rank) for _, rank in ranked)
    if ties == "drop" and len(set(ranks)) == 1:
        return NO_STRICT_PAIR
    answers = tuple(response for response, _ in ranked)
    fitted = fit(record.prompt, answers, codec, limits)
    if isinstance(fitted, str):
        return fitted
    prompt, encoded = fitted
    if not len(prompt.ids) and not all(map(len, encoded)):
        return EMPTY_PROMPT
    return Group(prompt.ids, encoded, ranks, _margins(record, answers, ranks, margin))


def encode_labelled(record: Labelled | Ranking, codec: Codec, limits: Limits) -> Group | str:
    """A prompt with answers of rank 1, the desirable ones, and of rank 2, the undesirable ones.

    In a ranking an answer that wins more of its strict pairs than it loses is desirable, one that
    loses more undesirable; what wins as often as it loses is left out. Of two answers that makes
    the preferred one desirable and the other not (Ethayarajh et al. 2024, §4.3).
    """
    answers: tuple[Response, ...]
    ranks: tuple[int, ...]
    if isinstance(record, Labelled):
        answers, ranks = (record.response,), (DESIRABLE if record.desirable else UNDESIRABLE,)
    else:
        ranked = ranked_responses(record)
        if len(ranked) < 2:
            return UNRANKED
        sides = [sum((k > rank) - (k < rank) for _, k in ranked) for _, rank in ranked]
        decided = [(r, side) for (r, _), side in zip(ranked, sides, strict=True) if side]
        if not decided:
            return NO_STRICT_PAIR
        answers = tuple(r for r, _ in decided)
        ranks = tuple(DESIRABLE if side > 0 else UNDESIRABLE for _, side in decided)
    fitted = fit(record.prompt, answers, codec, limits)
    if isinstance(fitted, str):
        return fitted
    prompt, encoded = fitted
    if not len(prompt.ids) and not all(map(len, encoded)):
        return EMPTY_PROMPT
    return Group(prompt.ids, encoded, ranks)


def encode_prompt(
    record: Prompt, codec: Codec, limits: Limits, *, reserve: int = 0
) -> EncodedPrompt | str:
    """A prompt that leaves ``reserve`` positions for its answer."""
    room = None if limits.positions is None else limits.positions - reserve
    fitted = fit_prompt(record.prompt, codec, limits, room)
    if isinstance(fitted, EncodedPrompt) and not len(fitted.ids):
        return EMPTY_PROMPT
    return fitted


def encode_document(
    record: Document | Demonstration, codec: Codec, max_tokens: int | None
) -> list[Example]:
    """Pieces of at most ``max_tokens`` of a text and its end token; every token but a first counts.

    A demonstration is read as the text of its prompt and answer. A last piece of one token has
    nothing to learn and is left out.
    """
    if isinstance(record, Document):
        start = np.array(codec.prefix, dtype=np.int32)
        body = codec.encode_response(record.text, end=codec.eos_id)
    else:
        start = codec.encode_prompt(record.prompt).ids
        body = response_ids(record.response, codec, codec.end_of(record.prompt))
    return list(_pieces(np.concatenate([start, body]), max_tokens))


def _pieces(ids: np.ndarray, max_tokens: int | None) -> Iterator[Example]:
    width = max_tokens or len(ids)
    for start in range(0, len(ids), width):
        piece = ids[start : start + width]
        if len(piece) > 1:
            yield Example(piece, np.arange(1, len(piece), dtype=np.int32))


def ranked_responses(record: Ranking) -> list[tuple[Response, int]]:
    """The answers that have a rank, or, where none has, those with a score, ranked by it."""
    ranked = [(r, r.rank) for r in record.responses if r.rank is not None]
    if ranked:
        return ranked
    scored = [(r, r.score) for r in record.responses if r.score is not None]
    return [(r, 1 + sum(other > score for _, other in scored)) for r, score in scored]


def best_response(record: Ranking) -> Response | None:
    """The best-ranked answer (the first of equals); a single unranked answer is the best."""
    ranked = ranked_responses(record)
    if ranked:
        return min(ranked, key=lambda pair: pair[1])[0]
    return record.responses[0] if len(record.responses) == 1 else None


def _margins(
    record: Ranking, answers: tuple[Response, ...], ranks: tuple[int, ...], margin: Any
) -> np.ndarray | None:
    """``[K, K]`` margin of each pair (preferred, other), 0 elsewhere; None where all are 0."""
    gaps = np.array(ranks)[None, :] - np.array(ranks)[:, None]
    better = gaps > 0
    per_rank = margin.get("per_rank") if isinstance(margin, Mapping) else None
    per_rank = getattr(margin, "per_rank", per_rank)
    if per_rank is not None:
        return np.where(better, gaps * float(per_rank), 0.0)
    if margin == "data":
        return np.where(better, _data_margin(record, answers), 0.0)
    if margin in ("score", "score above 0"):
        return _score_gaps(record, answers, better, above_zero=margin != "score")
    return np.where(better, float(margin), 0.0) if margin else None


def _data_margin(record: Ranking, answers: tuple[Response, ...]) -> np.ndarray | float:
    """The line's own margin, else the difference of the scores of each pair."""
    if record.margin is not None and len(answers) == 2:
        return record.margin
    return _differences(
        record,
        answers,
        lacks="ranking.margin is data, but this record has neither a margin nor a score per answer",
        do="add margin (two answers) or scores to the records, or set ranking.margin to 0.0",
    )


def _differences(
    record: Ranking, answers: tuple[Response, ...], *, lacks: str, do: str
) -> np.ndarray:
    """``[K, K]`` score of the first less that of the second.

    Raises:
        DataError: an answer has no score; ``lacks`` and ``do`` say what that means.
    """
    scores = [answer.score for answer in answers]
    if any(score is None for score in scores):
        raise DataError(lacks, where=record.origin, do=do)
    values = np.array(scores, dtype=np.float64)
    return values[:, None] - values[None, :]


def _score_gaps(
    record: Ranking, answers: tuple[Response, ...], better: np.ndarray, *, above_zero: bool
) -> np.ndarray:
    gaps = _differences(
        record,
        answers,
        lacks="odpo.offset is score, but this record has not a score for every answer",
        do="add scores to the records, or set odpo.offset to rank",
    )
    if above_zero and (gaps[better] <= 0).any():
        raise DataError(
            "an answer of better rank has no higher score, and the logarithm of the difference is "
            "the offset",
            where=record.origin,
            do="correct rank or score, or set odpo.scale to identity or odpo.offset to rank",
        )
    return np.where(better, gaps, 0.0)
