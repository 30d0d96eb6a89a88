"""The terms of a reward → one score for each answer.

    R = Σ_k w_k·clip(r̂_k)

over the terms that judged the answer; r̂_k is r_k, or normalised by the moments that run over all
rollouts. Evaluations use these moments and leave them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages.config.rewards import Placed
from stages.data.kinds import PromptItem
from stages.data.templates import Codec
from stages.errors import RlhfError, TrainingError
from stages.models.generate import Answer as Sampled
from stages.moments import Moments, joined, standardised
from stages.runtime.rewards.texts import Absent, Answer, Score, Scorer, told

Kept = dict[str, list[float]]  # name of a term → the moments of its scores, as JSON keeps them


class Weighed(NamedTuple):
    """Scores ``[B]``, and the moments that hold them."""

    scores: Tensor
    moments: Kept


class Failure(NamedTuple):
    """Why a term could not judge, as one process tells the others."""

    what: str
    do: str
    where: str

    def error(self) -> TrainingError:
        """The error that ends the run on every process."""
        return TrainingError(self.what, do=self.do, where=self.where)


@dataclass(frozen=True)
class Judge:
    """How the answers of a rollout are judged.

    Attributes:
        names: of the terms, in the order of their columns.
        texts: the terms that read texts, by name; all others read the policy's token ids.
        answer: the text of the n-th prompt's answer; needed where there are ``texts``.
        weigh: from the terms ``[B, J]`` and whether each judged to scores.
    """

    names: tuple[str, ...]
    weigh: Callable[[Tensor, Tensor], Weighed]
    texts: Mapping[str, Scorer] = field(default_factory=dict)
    answer: Callable[[int, Sampled], Answer] | None = None

    @classmethod
    def alone(cls, names: Sequence[str]) -> Judge:
        """Models that read token ids, each as it is."""
        return cls(tuple(names), lambda raw, judged: Weighed(raw.sum(dim=1), {}))

    def read(
        self, places: Sequence[int], sampled: Sequence[Sampled]
    ) -> dict[str, list[Score]] | Failure:
        """What each term that reads texts says of some prompts' answers."""
        if not self.texts or not places:
            return {name: [] for name in self.texts}
        assert self.answer is not None
        pairs = zip(places, sampled, strict=True)
        answers = [self.answer(int(n), answer) for n, answer in pairs]
        try:
            return {name: scorer(answers) for name, scorer in self.texts.items()}
        except RlhfError as error:
            return Failure(error.what, error.do, error.where)

    def told(self, n: int, sampled: Sampled) -> str:
        """The n-th prompt, as a message names it."""
        return told(self.answer(n, sampled)) if self.answer else f"prompt {n + 1}"


def judge(
    terms: Sequence[Placed],
    texts: Mapping[str, Scorer],
    items: Sequence[PromptItem],
    codec: Codec,
    moments: Kept,
    *,
    learn: bool,
) -> Judge:
    """The judge of a rollout.

    Args:
        terms: of the reward.
        texts: those that read texts.
        items: the prompt of each answer.
        codec: turns the policy's token ids into text.
        moments: of normalised terms so far.
        learn: whether this rollout moves them.
    """

    def answer(n: int, sampled: Sampled) -> Answer:
        item = items[n]
        return Answer(
            prompt=item.prompt,
            text=codec.decode(sampled.ids),
            cut=not sampled.ended,
            rendered=item.text,
            record=item.record,
            origin=item.origin,
            whole=bool((sampled.ids < len(codec.tokenizer)).all()),
            ids=tuple(sampled.ids.tolist()),
            vocabulary=codec.vocabulary_hash,
        )

    def weigh(raw: Tensor, judged: Tensor) -> Weighed:
        return weighed(terms, raw, judged, moments, learn=learn)

    return Judge(tuple(each.name for each in terms), weigh, texts, answer)


def weighed(
    terms: Sequence[Placed], raw: Tensor, judged: Tensor, moments: Kept, *, learn: bool
) -> Weighed:
    """The weighted sum of what the terms say.

    Args:
        terms: J terms.
        raw: ``[B, J]`` what each says of each answer.
        judged: ``[B, J]`` bool, False = no judgement.
        moments: of normalised terms so far.
        learn: whether these answers count among them.
    """
    total, kept = torch.zeros_like(raw[:, 0]), dict(moments)
    for column, there, (_, name, term) in zip(raw.unbind(1), judged.unbind(1), terms, strict=True):
        if term.normalise:
            known = Moments(*moments.get(name, ()))
            if learn:
                known = joined(known, column[there])
                kept[name] = [known.count, known.mean, known.squares]
            column = standardised(column, known)
        if term.clip is not None:
            column = column.clamp(-term.clip, term.clip)
        total = total + torch.where(there, term.weight * column, 0.0)
    return Weighed(total, kept)


def columns(
    found: Mapping[str, list[Score]], names: Sequence[str], raw: Tensor, judged: Tensor
) -> list[str]:
    """Write the scores of texts into their columns; why each answer lacks some.

    Args:
        found: name → a score for each of b answers.
        names: of all J columns.
        raw: ``[b, J]``, 0 where nothing was read yet.
        judged: ``[b, J]`` bool, True everywhere.

    Returns:
        A text for each answer, empty where no term lacks.
    """
    why: list[list[str]] = [[] for _ in range(len(raw))]
    for name, scores in found.items():
        column = names.index(name)
        for n, score in enumerate(scores):
            if isinstance(score, Absent):
                judged[n, column] = False
                why[n].append(f"{name}: {score.why}")
            else:
                raw[n, column] = score
    return ["; ".join(reasons) for reasons in why]


def means(terms: Sequence[Placed], raw: Tensor, judged: Tensor) -> dict[str, float]:
    """The mean of each term over the answers that it judged; left out where it judged none."""
    return {
        each.name: float(column[there].double().mean())
        for each, column, there in zip(terms, raw.unbind(1), judged.unbind(1), strict=True)
        if bool(there.any())
    }


def figures(
    terms: Sequence[Placed], raw: Tensor, judged: Tensor, texts: Collection[str]
) -> dict[str, float]:
    """Metrics of a rollout: the mean of each term, and how many answers it did not judge.

    Args:
        terms: J terms.
        raw: ``[B, J]`` what each says of each answer.
        judged: ``[B, J]`` bool, False = no judgement.
        texts: the terms that read texts; the others judge every answer.
    """
    found = {f"score/{name}": mean for name, mean in means(terms, raw, judged).items()}
    for (_, name, _), there in zip(terms, judged.unbind(1), strict=True):
        if name in texts:
            found[f"score/{name}_missing"] = float((~there).sum())
    return found


def of_answer(terms: Sequence[Placed], raw: Tensor, judged: Tensor) -> dict[str, Any]:
    """What each of several terms says of an answer, null where it has no judgement.

    Args:
        terms: J terms; nothing is told of a single one.
        raw: ``[J]``.
        judged: ``[J]`` bool.
    """
    if len(terms) == 1:
        return {}
    pairs = zip(terms, raw.tolist(), judged.tolist(), strict=True)
    return {"scores": {each.name: score if there else None for each, score, there in pairs}}
