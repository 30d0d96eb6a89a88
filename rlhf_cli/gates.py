"""``--require 'eval/accuracy>=0.7'``: a bound that a finished run must keep."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stages.errors import ConfigError, GateError

GROUPS = (
    "eval",
    "loss",
    "objective",
    "optim",
    "policy",
    "reward_model",
    "rollout",
    "time",
    "value",
)
"""The groups of metrics, as in docs/metrics.md."""

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
PATTERN = re.compile(r"\s*(?P<name>[^\s<>=]+)\s*(?P<operator>>=|<=|==|>|<)\s*(?P<bound>\S+)\s*")


@dataclass(frozen=True)
class Gate:
    """A metric, a comparison and the bound it is compared with."""

    metric: str
    comparison: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.bound:g}"

    def objection(self, metrics: Mapping[str, float]) -> str | None:
        """Why the run does not pass, or None; a metric that is not a number never passes."""
        if self.metric not in metrics:
            return f"{self.metric} was not measured (required: {self})"
        value = metrics[self.metric]
        if OPERATORS[self.comparison](value, self.bound):
            return None
        return f"{self.metric} is {value:g} (required: {self})"


def parse(text: str) -> Gate:
    """Read one requirement.

    Raises:
        ConfigError: the text is not a metric, a comparison and a finite number.
    """
    match = PATTERN.fullmatch(text)
    if match is None:
        raise _error(text, "not of the form metric>=number", "write it like 'eval/accuracy>=0.7'")
    _check_name(text, match["name"])
    try:
        bound = float(match["bound"])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise _error(text, f"{match['bound']} is not a finite number", "give a number as the bound")
    return Gate(match["name"], match["operator"], bound)


def check(gates: Sequence[Gate], metrics: Mapping[str, float]) -> None:
    """Compare the figures of a finished run with what was required of it.

    Raises:
        GateError: at least one requirement is not met; all of them are named.
    """
    objections = [text for gate in gates if (text := gate.objection(metrics)) is not None]
    if objections:
        raise GateError(
            "; ".join(objections),
            do="train longer or on better data, or change the bound; the model is saved",
            where="--require",
        )


def _check_name(text: str, name: str) -> None:
    group, slash, rest = name.partition("/")
    if not slash or not re.fullmatch(r"[A-Za-z0-9_.]+", rest):
        raise _error(text, f"{name} is not a metric", "name it as group/name")
    if group not in GROUPS:
        close = difflib.get_close_matches(group, GROUPS, n=1)
        hint = f"write {close[0]}/{rest}" if close else f"name one of a group: {', '.join(GROUPS)}"
        raise _error(text, f"{name} is not a metric", hint)


def _error(text: str, what: str, do: str) -> ConfigError:
    return ConfigError(f"{text!r}: {what}", do=do, where="command line: --require")
