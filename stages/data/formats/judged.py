"""Rankings by votes, ratings and scores, each in the columns of the data set that coined them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stages.data import fields as f
from stages.data.formats import asked, pairs
from stages.data.records import Message, Ranking, Record, Response, Row, Turns, Useless

_OUTCOMES = ("winner_model_a", "winner_model_b", "winner_tie")


def nectar(row: Row, as_messages: bool) -> Ranking:
    """Nectar: a dialogue prompt and ``answers`` with ranks from 1, written as floats."""
    written = f.text(f.get(row, "prompt"), row.at("prompt"))
    prompt: str | Turns = written
    if as_messages and written.lstrip().startswith("Human:"):
        prompt = pairs.turns_of(written)
    where = row.at("answers")
    given = f.items(f.get(row, "answers"), where)
    answers = [f.mapping(answer, f"{where}[{n}]") for n, answer in enumerate(given)]
    responses = tuple(
        Response(
            f.text(answer.get("answer"), f"{where}[{n}].answer"),
            f.rank(answer.get("rank"), f"{where}[{n}].rank"),
            model=f.name(answer.get("model")),
        )
        for n, answer in enumerate(answers)
    )
    return Ranking(prompt, responses, row.origin)


def ultrafeedback(row: Row) -> Ranking:
    """UltraFeedback: ``completions`` with ratings of several aspects, and an overall score.

    The mean of the ratings counts: in the first version of the data set an overall score of 1 was
    written as 10 (OpenBMB/UltraFeedback, issue 8).
    """
    prompt = f.prompt(f.get(row, "instruction"), row.at("instruction"))
    where = row.at("completions")
    given = f.items(f.get(row, "completions"), where)
    responses = tuple(_completion(answer, f"{where}[{n}]") for n, answer in enumerate(given))
    return Ranking(prompt, responses, row.origin, source=_source(row))


def _completion(value: object, where: str) -> Response:
    given = f.mapping(value, where)
    text = f.text(given.get("response"), f"{where}.response")
    aspects = f.unfolded(given.get("annotations"))
    judged = list(aspects.values()) if isinstance(aspects, dict) else []
    rated = [_rating(_first(aspect).get("Rating")) for aspect in judged]
    known = [rating for rating in rated if rating is not None]
    score = sum(known) / len(known) if known else _rating(given.get("overall_score"))
    return Response(text, score=score, model=f.name(given.get("model")))


def _first(aspect: object) -> dict[str, Any]:
    """The judgement of an aspect, which one version of the data set has in a list."""
    found = aspect[0] if isinstance(aspect, list) and aspect else aspect
    return found if isinstance(found, dict) else {}


def _rating(value: object) -> float | None:
    """A rating that may be written as a string, with "N/A" where there is none."""
    try:
        rating = float(str(value))
    except ValueError:
        return None
    return rating if math.isfinite(rating) else None


def is_distilabel(fields: Mapping[str, Any]) -> bool:
    """Generations of one instruction with a rating each."""
    has_prompt = "instruction" in fields or "input" in fields
    return has_prompt and "generations" in fields and ("ratings" in fields or "rating" in fields)


def distilabel(row: Row) -> Ranking:
    """distilabel: ``generations`` and ``ratings`` side by side, null where a step has failed."""
    field = "instruction" if "instruction" in row.fields else "input"
    rated = "ratings" if "ratings" in row.fields else "rating"
    prompt = asked.in_turns(row, f.prompt(f.get(row, field), row.at(field)))
    texts = _list_or_none(f.get(row, "generations"), row.at("generations")) or []
    ratings = _list_or_none(f.get(row, rated), row.at(rated))
    ratings = [None] * len(texts) if ratings is None else ratings
    if len(texts) != len(ratings):
        f.wrong(f"{len(ratings)} ratings for {len(texts)} generations", row.at(rated))
    responses = tuple(
        Response(f.text(text, row.at(f"generations[{n}]")), score=_rating(rating))
        for n, (text, rating) in enumerate(zip(texts, ratings, strict=True))
        if text is not None
    )
    return Ranking(prompt, responses, row.origin)


def _list_or_none(value: object, where: str) -> list[Any] | None:
    return None if value is None else f.items(value, where)


def summarize_from_feedback(row: Row) -> Ranking:
    """Summaries of a Reddit post or an article, ``choice`` 0 or 1 the better (Stiennon 2020)."""
    info = f.mapping(f.get(row, "info"), row.at("info"))
    where = row.at("summaries")
    given = [
        f.mapping(summary, f"{where}[{n}]")
        for n, summary in enumerate(f.items(f.get(row, "summaries"), where))
    ]
    texts = [f.text(summary.get("text"), f"{where}[{n}].text") for n, summary in enumerate(given)]
    choice = f.choice(f.get(row, "choice"), row.at("choice"))
    if len(texts) != 2:
        f.wrong(f"must be two summaries, not {len(texts)}", where)
    names = [f.name(summary.get("policy")) for summary in given]
    found = _two(row, _post(info, row.at("info")), texts, winner=choice, models=names)
    return replace(found, labeler=f.name(row.fields.get("worker")))


def _post(info: dict[str, Any], where: str) -> str:
    heads = {"subreddit": "SUBREDDIT: r/", "title": "TITLE: ", "post": "POST: ", "article": ""}
    texts = {name: f.optional_text(info.get(name), f"{where}.{name}") for name in heads}
    parts = [head + text for name, head in heads.items() if (text := texts[name])]
    return "\n\n".join([*parts, "TL;DR:"])


def is_arena(fields: Mapping[str, Any]) -> bool:
    """Two conversations and a winner, or the table of two answers with a column per outcome."""
    return {"conversation_a", "conversation_b", "winner"} <= fields.keys() or {
        "prompt",
        "response_a",
        "response_b",
        *_OUTCOMES,
    } <= fields.keys()


def arena(row: Row) -> Record:
    """Chatbot Arena: two conversations, and the ``winner`` model_a, model_b or a tie."""
    if "conversation_a" not in row.fields:
        return _arena_table(row)
    sides = [
        f.turns(f.get(row, name), row.at(name)) for name in ("conversation_a", "conversation_b")
    ]
    written = f.text(f.get(row, "winner"), row.at("winner"))
    known = {"model_a": 0, "model_b": 1}
    tied = written.startswith("tie") or written in ("both_bad", "bothbad")
    if written not in known and not tied:
        f.wrong(f"must be model_a, model_b or a tie, not {written!r}", row.at("winner"))
    return _battle(row, sides, known.get(written))


def _arena_table(row: Row) -> Record:
    """The arena's table: lists of the user's turns and of each side's answers, as JSON."""
    questions = f.items(f.get(row, "prompt"), row.at("prompt"))
    sides = []
    for side in ("response_a", "response_b"):
        answers = f.items(f.get(row, side), row.at(side))
        if len(answers) != len(questions):
            f.wrong(f"{len(answers)} answers to {len(questions)} prompts", row.at(side))
        if None in answers or None in questions:
            return Useless("an answer is missing", row.origin)
        texts = [text for pair in zip(questions, answers, strict=True) for text in pair]
        roles = ("user", "assistant") * len(answers)
        spoken = zip(roles, texts, strict=True)
        sides.append(tuple(Message(role, f.text(t, row.at(side))) for role, t in spoken))
    won = [f.choice(f.get(row, name), row.at(name)) for name in _OUTCOMES]
    if sum(won) != 1:
        f.wrong("exactly one of the three outcomes must be 1", row.at(_OUTCOMES[0]))
    return _battle(row, sides, (0, 1, None)[won.index(1)])


def _battle(row: Row, sides: list[Turns], winner: int | None) -> Record:
    """The last answers of two conversations that are alike before them."""
    if sides[0][:-1] != sides[1][:-1] or len(sides[0]) < 2:
        return Useless(pairs.DIFFER, row.origin)
    if any(side[-1].role != "assistant" for side in sides):
        f.wrong("the last turn must be the assistant's", row.at("conversation_a"))
    texts = [side[-1].content for side in sides]
    models = [f.name(row.fields.get(name)) for name in ("model_a", "model_b")]
    return _two(row, sides[0][:-1], texts, winner=winner, models=models)


def shp(rows: Iterable[Row]) -> Iterator[Record]:
    """Stanford Human Preferences: the comments of a post, compared in pairs, as one ranking.

    A comment's score is its votes. A row without votes stays a pair: ``labels`` 1 where A is the
    better, else 0. The comments are held in memory until all rows are read.
    """
    posts: dict[str, Ranking] = {}
    for row in rows:
        pair = _comments(row)
        if isinstance(pair, Useless) or any(c.score is None for c in pair.responses):
            yield pair
            continue
        name = pair.id or str(pair.prompt)
        known = posts.setdefault(name, replace(pair, responses=()))
        seen = {comment.text for comment in known.responses}
        new = tuple(comment for comment in pair.responses if comment.text not in seen)
        posts[name] = replace(known, responses=known.responses + new)
    yield from posts.values()


def _comments(row: Row) -> Ranking | Useless:
    """One row: two comments on a post, by votes where the row has them, else by its label."""
    label = f.choice(f.get(row, "labels"), row.at("labels"))
    texts = [f.text(f.get(row, n), row.at(n)) for n in ("human_ref_A", "human_ref_B")]
    prompt = f.text(f.get(row, "history"), row.at("history"))
    name = f.name(row.fields.get("post_id"))
    a, b = (f.number(row.fields.get(n), row.at(n)) for n in ("score_A", "score_B"))
    if a is None or b is None or a == b:
        return replace(_two(row, prompt, texts, 1 - label), id=name)
    if (a > b) != bool(label):
        return Useless("the label contradicts the votes", row.origin)
    responses = (Response(texts[0], score=a), Response(texts[1], score=b))
    return Ranking(prompt, responses, row.origin, id=name)


def webgpt(row: Row) -> Ranking:
    """WebGPT comparisons: two answers with scores around 0."""
    question = f.unfolded(f.get(row, "question"))
    if isinstance(question, dict):
        question = question.get("full_text")
    responses = tuple(
        Response(
            f.text(f.get(row, f"answer_{n}"), row.at(f"answer_{n}")),
            score=f.number(f.get(row, f"score_{n}"), row.at(f"score_{n}")),
        )
        for n in (0, 1)
    )
    return Ranking(f.text(question, row.at("question")), responses, row.origin)


def _two(
    row: Row,
    prompt: str | Turns,
    texts: list[str],
    winner: int | None,
    models: Sequence[str | None] = (None, None),
) -> Ranking:
    """Two answers of which one won, or a tie."""
    ranks = [1 if winner is None or winner == n else 2 for n in (0, 1)]
    sides = zip(texts, ranks, models, strict=True)
    responses = tuple(Response(text, rank, model=model) for text, rank, model in sides)
    return Ranking(prompt, responses, row.origin)


def _source(row: Row) -> str | None:
    source = row.fields.get("source")
    return source if isinstance(source, str) else None
