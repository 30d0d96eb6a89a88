"""Signs that a run goes wrong, in its rows of metrics: what is seen, why, what to change.

A rule looks at the newest row and at a few before it. What is remembered of them, and when a rule
last spoke, is a plain mapping, so that it outlives a stop in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stages.config import OnlineConfig

Row = Mapping[str, float]

QUIET_FOR = 20  # iterations in which a rule that has spoken does not speak again
START, RECENT = 3, 5  # rows that are remembered of the run's start, and of its last ones
SHIFT = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 0.05}
"""Largest rounding of a log-probability between two passes, nats. In bf16 its mean is 0.02 at most;
the root of its mean square, which is told here, has a heavy tail."""
NEGATIVE_KL = 0.1  # nats per answer; sampling noise of a small rollout stays above −0.1
ENTROPY_LEFT = 0.2  # share of the entropy at the start
CUT, EMPTY = 0.95, 0.2  # shares of the answers
EQUAL = 1e-6  # scores have a standard deviation of about 1
LONGER = 2.0  # times the length at the start


class Case(NamedTuple):
    """What a rule looks at.

    Attributes:
        row: the newest row.
        first: the first rows of the run, START at most.
        recent: its last rows, RECENT at most, the newest among them.
        config: of the run.
        precision: of its passes, fp64, fp32 or bf16.
    """

    row: Row
    first: Sequence[Row]
    recent: Sequence[Row]
    config: OnlineConfig
    precision: str


@dataclass(frozen=True)
class Rule:
    """One sign.

    Attributes:
        name: for the documentation and the memory of what was said.
        when: what is seen, with its threshold.
        cause: what is most likely behind it.
        changes: what to change, each way with its key.
        seen: what to say of a case, None where all is well.
    """

    name: str
    when: str
    cause: str
    changes: tuple[str, ...]
    seen: Callable[[Case], str | None]

    @property
    def change(self) -> str:
        """All that may be changed, in words."""
        return _either(self.changes)

    def told(self, seen: str, config: OnlineConfig) -> str:
        """The whole warning: of the ways to change it, those whose keys the stage has."""
        held = [text.replace("`kl.coef`", f"`{config.leash}`") for text in self.changes]
        ways = _either([text for text in held if _has_keys(config, text)])
        return f"{seen}; likely cause: {self.cause}; {ways}".replace("`", "")


def _either(ways: Sequence[str]) -> str:
    *others, last = ways
    return f"{', '.join(others)}, or {last}" if others else last


def _has_keys(config: OnlineConfig, text: str) -> bool:
    """Whether a stage has every key, in backticks with a dot, that a text names."""
    for key in re.findall(r"`([a-z_]+\.[a-z_.]+)`", text):
        section: Any = config
        for name in key.split("."):
            if not hasattr(section, name):
                return False
            section = getattr(section, name)
    return True


def diagnose(
    row: Row, memory: Mapping[str, Any], config: OnlineConfig, *, precision: str, iteration: int
) -> tuple[list[str], dict[str, Any]]:
    """Warnings on a row, and what to remember for the next one.

    Args:
        row: the means since the row before.
        memory: what this function gave back with the row before; empty for the first.
        config: of the run.
        precision: of its passes.
        iteration: rollouts finished.

    Returns:
        The warnings, each of a rule that has not spoken for QUIET_FOR iterations, and the memory.
    """
    kept = {name: row[name] for name in NAMES if name in row}
    first = [*memory.get("first", ()), kept][:START]
    recent = [*memory.get("recent", ()), kept][-RECENT:]
    spoken = dict(memory.get("spoken", {}))
    warnings = []
    for rule in RULES:
        seen = rule.seen(Case(row, first, recent, config, precision))
        if seen is not None and iteration >= spoken.get(rule.name, -QUIET_FOR) + QUIET_FOR:
            spoken[rule.name] = iteration
            warnings.append(rule.told(seen, config))
    return warnings, {"first": first, "recent": recent, "spoken": spoken}


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """The mean of a metric over the rows that have it."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


def _shift(case: Case) -> str | None:
    shift, bound = case.row.get("policy/shift_first", 0.0), SHIFT[case.precision]
    if shift <= bound:
        return None
    return (
        f"log-probabilities of the first minibatch differ by {shift:.2g} nats from those of "
        f"sampling (ratio {case.row.get('policy/ratio_first', 1.0):.6g}), and rounding in "
        f"{case.precision} explains {bound:g}"
    )


def _negative_kl(case: Case) -> str | None:
    values = [row["objective/kl"] for row in case.recent[-START:] if "objective/kl" in row]
    lasting = len(values) == START and max(values) < -NEGATIVE_KL
    if not lasting and not any(value < -10 * NEGATIVE_KL for value in values[-1:]):
        return None
    return f"the mean KL to the reference is negative, {values[-1]:.3g} nats per answer"


def _kl_limit(case: Case) -> str | None:
    kl, limit = case.row.get("objective/kl", 0.0), case.config.kl.warn_above
    if limit is None or kl <= limit:
        return None
    return f"the KL to the reference is {kl:.3g} nats per answer, above kl.warn_above {limit:g}"


def _entropy(case: Case) -> str | None:
    now, start = case.row.get("policy/entropy"), _mean(case.first, "policy/entropy")
    if now is None or start is None or now >= ENTROPY_LEFT * start:
        return None
    return f"the entropy has fallen from {start:.3g} to {now:.3g} nats per token"


def _cut(case: Case) -> str | None:
    share = case.row.get("rollout/cut", 0.0)
    limit = case.config.rollout.max_new_tokens
    return f"{share:.0%} of the answers are cut off at {limit} tokens" if share >= CUT else None


def _equal_scores(case: Case) -> str | None:
    spread = case.row.get("objective/score_std")
    if spread is None or spread > EQUAL or case.config.rollout.batch_size == 1:
        return None
    return f"all answers have the same score, {case.row.get('objective/score', 0.0):.3g}"


def _empty(case: Case) -> str | None:
    share = case.row.get("rollout/empty", 0.0)
    return f"{share:.0%} of the answers are empty" if share >= EMPTY else None


def _length(case: Case) -> str | None:
    length, score = "rollout/response_length_mean", "objective/score"
    first, last = case.first, case.recent[-START:]
    before, now = _mean(first, length), _mean(last, length)
    risen = (_mean(last, score) or 0.0) - (_mean(first, score) or 0.0)
    if before is None or now is None or now < LONGER * before or risen <= 0:
        return None
    return f"scores rise by {risen:.3g} while answers grow from {before:.3g} to {now:.3g} tokens"


def _critic(case: Case) -> str | None:
    name = "value/explained_variance"
    values = [row.get(name, 0.0) for row in case.recent]
    if len(values) < RECENT or max(values) >= 0:
        return None
    return f"values explain the returns worse than a constant in {RECENT} rows ({values[-1]:.3g})"


RULES = (
    Rule(
        "ratio",
        "`policy/shift_first` is above what rounding explains: 1e-10 in fp64, 2e-5 in fp32, 0.05 "
        "in bf16",
        "sampling and update see different policies: dropout or another source of chance in the "
        "model's own code, or kernels that round in their own way",
        (
            "set `train.precision`: fp32 and `device`: cpu for a trial to tell rounding from a "
            "mistake",
        ),
        _shift,
    ),
    Rule(
        "negative_kl",
        "`objective/kl` is below −0.1 in three rows running, or below −1 in one",
        "answers are drawn from a cut distribution, or too few of them to average over",
        ("set `rollout.top_p`: 1 and `rollout.top_k`: 0", "raise `rollout.batch_size`"),
        _negative_kl,
    ),
    Rule(
        "kl_limit",
        "`objective/kl` is above `kl.warn_above`",
        "the policy leaves the reference faster than the penalty holds it",
        ("raise `kl.coef`", "lower `train.learning_rate`"),
        _kl_limit,
    ),
    Rule(
        "entropy",
        "`policy/entropy` is below a fifth of that of the first three rows",
        "the policy repeats the few answers that score best",
        ("raise `kl.coef`", "raise `ppo.ent_coef`", "lower `train.learning_rate`"),
        _entropy,
    ),
    Rule(
        "cut",
        "`rollout/cut` is 0.95 or more",
        "the policy has not learned its end token, or has too little room for it",
        ("raise `rollout.max_new_tokens`", "set `score.missing_eos.subtract`"),
        _cut,
    ),
    Rule(
        "equal_scores",
        "`objective/score_std` is 1e-6 or less over two answers or more",
        "the reward model tells no answers apart, or there is one answer left to tell",
        (
            "name a reward model with an `eval/accuracy` above 0.5 in `reward.path`",
            "raise `kl.coef`",
        ),
        _equal_scores,
    ),
    Rule(
        "empty",
        "`rollout/empty` is 0.2 or more",
        "answers begin with a stop token: the reward model likes that, or it is no end of an "
        "answer",
        ("look at `rollout.stop` and the demonstrations of sft", "raise `kl.coef`"),
        _empty,
    ),
    Rule(
        "length",
        "the last three rows have twice the `rollout/response_length_mean` of the first three, and "
        "a higher `objective/score`",
        "the reward model pays for length (Singhal et al. 2023, arXiv 2310.03716)",
        (
            "raise `kl.coef`",
            "lower `rollout.max_new_tokens`",
            "hold `eval/accuracy` of train-rm against `eval/length_accuracy`",
        ),
        _length,
    ),
    Rule(
        "critic",
        "`value/explained_variance` is negative in five rows running",
        "the critic learns slower than the policy moves, or started from other scores",
        ("raise `critic.learning_rate`", "set `critic.init`: reward"),
        _critic,
    ),
)
NAMES = (
    "objective/kl",
    "objective/score",
    "policy/entropy",
    "rollout/response_length_mean",
    "value/explained_variance",
)
"""What is remembered of a row."""
