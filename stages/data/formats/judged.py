"""Rankings by votes, ratings and scores, each in the columns of the data set that coined them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.data import fields as f
from stages.data.formats import pairs
from stages.data.records import Ranking, Record, Response, Row, Turns, Useless

NO_RATING = "no rating"


def nectar(row: Row, as_messages: bool) -> Ranking:
    """Nectar: a dialogue prompt and ``answers`` with ranks from 1, written as floats."""
    prompt: str | Turns = f.text(f.get(row, "prompt"), row.at("prompt"))
    if as_messages and prompt.lstrip().startswith("Human:"):
        prompt = pairs.turns_of(prompt)
    where = row.at("answers")
    given = f.items(f.get(row, "answers"), where)
    answers = [f.mapping(answer, f"{where}[{n}]") for n, answer in enumerate(given)]
    responses = tuple(
        Response(
            f.text(answer.get("answer"), f"{where}[{n}].answer"),
            f.rank(answer.get("rank"), f"{where}[{n}].rank"),
            model=answer.get("model"),
        )
        for n, answer in enumerate(answers)
    )
    return Ranking(prompt, responses, row.origin)


def ultrafeedback(row: Row) -> Ranking:
    """UltraFeedback: ``completions`` with an overall score, or with a rating per aspect."""
    prompt = f.text(f.get(row, "instruction"), row.at("instruction"))
    where = row.at("completions")
    given = f.items(f.get(row, "completions"), where)
    responses = tuple(_completion(answer, f"{where}[{n}]") for n, answer in enumerate(given))
    return Ranking(prompt, responses, row.origin, source=_source(row))


def _completion(value: object, where: str) -> Response:
    given = f.mapping(value, where)
    text = f.text(given.get("response"), f"{where}.response")
    aspects = given.get("annotations")
    if not isinstance(aspects, dict):
        return Response(text, score=_rating(given.get("overall_score")), model=given.get("model"))
    rated = [_rating(a.get("Rating")) for a in aspects.values() if isinstance(a, dict)]
    known = [rating for rating in rated if rating is not None]
    mean = sum(known) / len(known) if known else None
    return Response(text, score=mean, model=given.get("model"))


def _rating(value: object) -> float | None:
    """A rating that may be written as a string, with "N/A" where there is none."""
    try:
        return float(str(value))
    except ValueError:
        return None


def is_distilabel(fields: Mapping[str, Any]) -> bool:
    """Generations of one instruction with a rating each."""
    asked = "instruction" in fields or "input" in fields
    return asked and "generations" in fields and ("ratings" in fields or "rating" in fields)


def distilabel(row: Row) -> Ranking:
    """distilabel: ``generations`` and ``ratings`` side by side."""
    asked = "instruction" if "instruction" in row.fields else "input"
    rated = "ratings" if "ratings" in row.fields else "rating"
    prompt = f.text(f.get(row, asked), row.at(asked))
    texts = f.items(f.get(row, "generations"), row.at("generations"))
    ratings = f.items(f.get(row, rated), row.at(rated))
    if len(texts) != len(ratings):
        f.wrong(f"{len(ratings)} ratings for {len(texts)} generations", row.at(rated))
    responses = tuple(
        Response(f.text(text, row.at(f"generations[{n}]")), score=_rating(rating))
        for n, (text, rating) in enumerate(zip(texts, ratings, strict=True))
    )
    return Ranking(prompt, responses, row.origin)


def summarize_from_feedback(row: Row) -> Ranking:
    """Summaries of a Reddit post or an article, ``choice`` 0 or 1 the better (Stiennon 2020)."""
    info = f.mapping(f.get(row, "info"), row.at("info"))
    where = row.at("summaries")
    texts = [
        f.text(f.mapping(s, f"{where}[{n}]").get("text"), f"{where}[{n}].text")
        for n, s in enumerate(f.items(f.get(row, "summaries"), where))
    ]
    choice = f.get(row, "choice")
    if choice not in (0, 1) or len(texts) != 2:
        f.wrong(f"must be 0 or 1 for two summaries, not {choice!r}", row.at("choice"))
    return _two(row, _post(info, row.at("info")), texts, winner=int(choice))


def _post(info: dict, where: str) -> str:
    heads = {"subreddit": "SUBREDDIT: r/", "title": "TITLE: ", "post": "POST: ", "article": ""}
    texts = {name: f.optional_text(info.get(name), f"{where}.{name}") for name in heads}
    parts = [head + texts[name] for name, head in heads.items() if texts[name]]
    return "\n\n".join([*parts, "TL;DR:"])


def arena(row: Row) -> Record:
    """Chatbot Arena: two conversations, and the ``winner`` model_a, model_b or a tie."""
    sides = [
        f.turns(f.get(row, name), row.at(name)) for name in ("conversation_a", "conversation_b")
    ]
    winner = f.text(f.get(row, "winner"), row.at("winner"))
    known = {"model_a": 0, "model_b": 1}
    if winner not in known and not winner.startswith("tie"):
        f.wrong(f"must be model_a, model_b or a tie, not {winner!r}", row.at("winner"))
    if sides[0][:-1] != sides[1][:-1] or len(sides[0]) < 2:
        return Useless(pairs.DIFFER, row.origin)
    if any(side[-1].role != "assistant" for side in sides):
        f.wrong("the last turn must be the assistant's", row.at("conversation_a"))
    texts = [side[-1].content for side in sides]
    return _two(row, sides[0][:-1], texts, winner=known.get(winner))


def shp(row: Row) -> Ranking:
    """Stanford Human Preferences: ``labels`` 1 where answer A is the better, else 0."""
    label = f.get(row, "labels")
    if label not in (0, 1):
        f.wrong(f"must be 0 or 1, not {label!r}", row.at("labels"))
    texts = [f.text(f.get(row, n), row.at(n)) for n in ("human_ref_A", "human_ref_B")]
    return _two(row, f.text(f.get(row, "history"), row.at("history")), texts, 1 - int(label))


def webgpt(row: Row) -> Ranking:
    """WebGPT comparisons: two answers with scores around 0."""
    question = f.get(row, "question")
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


def _two(row: Row, prompt: str | Turns, texts: list[str], winner: int | None) -> Ranking:
    """Two answers of which one won, or a tie."""
    ranks = [1 if winner is None or winner == n else 2 for n in (0, 1)]
    responses = tuple(Response(text, rank) for text, rank in zip(texts, ranks, strict=True))
    return Ranking(prompt, responses, row.origin)


def _source(row: Row) -> str | None:
    source = row.fields.get("source")
    return source if isinstance(source, str) else None
