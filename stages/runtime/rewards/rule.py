"""Rewards of type ``rule``: a few things that can be said of a text without a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from stages.config.rewards import RuleReward
from stages.runtime.rewards.texts import Absent, Answer, Score, Scorer

Rule = Callable[[RuleReward], Callable[[Answer], Score]]


def scorer(term: RuleReward) -> Scorer:
    """The rule of a term, applied to one answer after the other."""
    rule = _RULES[term.rule](term)
    return lambda answers: [rule(answer) for answer in answers]


def _length(term: RuleReward) -> Callable[[Answer], Score]:
    """``-|n - target| / target``, or ``-(n - max) / max`` above ``max`` and 0 below it."""
    if term.target is not None:
        target = term.target
        return lambda answer: -abs(len(answer.text) - target) / target
    limit = term.max
    assert limit is not None
    return lambda answer: -max(0, len(answer.text) - limit) / limit


def _regex(term: RuleReward) -> Callable[[Answer], Score]:
    pattern = re.compile(term.pattern or "")
    return lambda answer: float(pattern.search(answer.text) is not None)


def _exact_match(term: RuleReward) -> Callable[[Answer], Score]:
    pattern = None if term.extract is None else re.compile(term.extract)
    field = term.field or ""

    def judge(answer: Answer) -> Score:
        right = answer.record.get(field)
        if right is None:
            return Absent(f"the line has no {field}")
        given = _extracted(pattern, answer.text)
        texts = right if isinstance(right, list) else [right]
        known = (_extracted(pattern, str(text)) or str(text).strip() for text in texts)
        return float(given is not None and given in set(known))

    return judge


def _extracted(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """The last match, or its first group; the whole text without a pattern, None without match."""
    if pattern is None:
        return text.strip()
    found = max(pattern.finditer(text), key=lambda match: match.end(), default=None)
    if found is None:
        return None
    return (found[1] if pattern.groups and found[1] is not None else found[0]).strip()


def _forbidden_words(term: RuleReward) -> Callable[[Answer], Score]:
    """Whole words: ``art`` is not in ``party``."""
    listed = "|".join(re.escape(word) for word in term.words or ())
    pattern = re.compile(rf"(?<!\w)(?:{listed})(?!\w)", re.IGNORECASE)
    return lambda answer: -float(len(pattern.findall(answer.text)))


def _repetition(term: RuleReward) -> Callable[[Answer], Score]:
    """``-(1 - distinct / all)`` over the runs of n words; 0 for an answer of fewer words."""
    n = term.n or 1
    return lambda answer: _repeated(answer.text.split(), n)


def _repeated(words: Sequence[str], n: int) -> float:
    runs = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return len(set(runs)) / len(runs) - 1 if runs else 0.0


_RULES: dict[str, Rule] = {
    "length": _length,
    "regex": _regex,
    "exact_match": _exact_match,
    "forbidden_words": _forbidden_words,
    "repetition": _repetition,
}
