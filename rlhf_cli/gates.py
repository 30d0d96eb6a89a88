"""``--require 'eval/accuracy>=0.7'``: a bound that a finished run must keep."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stages.errors import ConfigError, GateError

_PREFERENCES = {
    "loss": "preference",
    "preference": ("accuracy margin reward_chosen reward_rejected logp_chosen logp_rejected"),
    "eval": "accuracy margin length_accuracy loss",
    "optim": "lr grad_norm",
    "time": "train tokens_per_second",
}
_LABELLED = {
    **_PREFERENCES,
    "preference": f"{_PREFERENCES['preference']} kl",
    "eval": "accuracy margin kl loss",
}
_SAMPLED = {
    "objective": "score score_std reward kl",
    "policy": "ratio ratio_first shift_first approx_kl_k1 approx_kl_k2 approx_kl_k3 entropy",
    "rollout": "response_length_mean response_length_min response_length_max ended cut empty",
    "optim": "lr grad_norm",
    "time": "rollout score train",
    "eval": "score kl response_length_mean",
    "score": "",  # by the names of the reward's terms
}
_REWARDED = {**_SAMPLED, "loss": "policy"}
METRICS: Mapping[str, Mapping[str, str]] = {
    "sft": {
        "loss": "sft",
        "eval": "perplexity loss",
        "optim": "lr grad_norm",
        "time": "train tokens_per_second",
    },
    "reward_model": {
        "loss": "ranking",
        "reward_model": "accuracy margin",
        "eval": "accuracy margin ece length_accuracy loss",
        "optim": "lr grad_norm",
        "time": "train tokens_per_second",
    },
    "ppo": {
        **_SAMPLED,
        "loss": "policy value ptx",
        "objective": f"{_SAMPLED['objective']} kl_coef",
        "policy": f"{_SAMPLED['policy']} clip_fraction stopped_early",
        "value": "explained_variance mean clip_fraction",
        "optim": "grad_norm_policy grad_norm_critic grad_norm_ptx lr",
    },
    **dict.fromkeys(("dpo", "odpo", "orpo", "simpo"), _PREFERENCES),
    "kto": _LABELLED,
    "grpo": {
        **_REWARDED,
        "objective": f"{_SAMPLED['objective']} frac_zero_std",
        "policy": f"{_SAMPLED['policy']} clip_fraction reference_kl",
    },
    "rloo": {**_REWARDED, "objective": f"{_SAMPLED['objective']} kl_coef frac_zero_std"},
    "reinforce": {**_REWARDED, "objective": f"{_SAMPLED['objective']} kl_coef baseline"},
    "online_dpo": {
        **_SAMPLED,
        "loss": "preference",
        "preference": _PREFERENCES["preference"],
        "objective": f"{_SAMPLED['objective']} frac_zero_std",
    },
}
"""The metrics of each stage by their groups, as in docs/metrics.md."""

GROUPS = tuple(sorted({group for groups in METRICS.values() for group in groups}))

BY_ANSWERS = re.compile(r"eval/accuracy_k[1-9][0-9]*")
"""The accuracy over prompts with K ranked answers, of what learns from their pairs."""
RANKED = ("reward_model", "dpo", "odpo", "orpo", "simpo")

BY_TERMS = re.compile(r"(score/|eval/score_)[a-z][a-z0-9_]*")
"""What the terms of a reward say, by their names, in what learns from rewards."""

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


def parse(text: str, *, stage: str | None = None) -> Gate:
    """Read one requirement.

    Args:
        text: such as ``eval/accuracy>=0.7``.
        stage: as in a config, whose metrics are meant; None allows those of all.

    Raises:
        ConfigError: the text is not a metric of the stage, a comparison and a finite number.
    """
    return _gate(text, lambda name: _check_name(text, name, stage), "eval/accuracy>=0.7")


def parse_figure(text: str, known: Sequence[str]) -> Gate:
    """Read one requirement of an evaluation, whose figures have names of one word.

    Args:
        text: such as ``accuracy>=0.7``.
        known: the figures.

    Raises:
        ConfigError: the text is not one of them, a comparison and a finite number.
    """

    def check_name(name: str) -> None:
        if name not in known:
            raise _unknown(text, name, "figure", list(known))

    return _gate(text, check_name, f"{known[0]}>=0.7")


def _gate(text: str, check_name: Callable[[str], None], example: str) -> Gate:
    match = PATTERN.fullmatch(text)
    if match is None:
        raise _error(text, "not of the form metric>=number", f"write it like '{example}'")
    check_name(match["name"])
    try:
        bound = float(match["bound"])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise _error(text, f"{match['bound']} is not a finite number", "give a number as the bound")
    return Gate(match["name"], match["operator"], bound)


IN_TRAINING = "train longer or on better data, or change the bound; the model is saved"


def check(gates: Sequence[Gate], metrics: Mapping[str, float], *, do: str = IN_TRAINING) -> None:
    """Compare the figures of a finished run with what was required of it.

    Args:
        gates: the requirements.
        metrics: the figures.
        do: what helps where one is not met.

    Raises:
        GateError: at least one requirement is not met; all of them are named.
    """
    objections = [text for gate in gates if (text := gate.objection(metrics)) is not None]
    if objections:
        raise GateError(
            "; ".join(objections),
            do=do,
            where="--require",
        )


def names(stage: str | None = None) -> list[str]:
    """Every metric of a stage, or of all of them, whose name is fixed."""
    groups = [METRICS[stage]] if stage else METRICS.values()
    found = {
        f"{name}/{rest}" for by in groups for name, all_ in by.items() for rest in all_.split()
    }
    return sorted(found)


def _check_name(text: str, name: str, stage: str | None) -> None:
    known = names(stage)
    by_answers = stage in (None, *RANKED) and BY_ANSWERS.fullmatch(name)
    online = stage is None or "score" in METRICS[stage]
    if name in known or by_answers or (online and BY_TERMS.fullmatch(name)):
        return
    if name in names():
        raise _error(text, f"{name} is no metric of this stage", "see the list in docs/metrics.md")
    raise _unknown(text, name, "metric", known)


def _unknown(text: str, name: str, what: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"write {close[0]}" if close else f"name one of {', '.join(known)}"
    return _error(text, f"{name} is not a {what}", hint)


def _error(text: str, what: str, do: str) -> ConfigError:
    return ConfigError(f"{text!r}: {what}", do=do, where="command line: --require")
