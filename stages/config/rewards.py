"""Where rewards come from: one term, or a list of terms whose weighted sum is the score."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from stages.config.base import (
    Count,
    Flag,
    Number,
    Place,
    Positive,
    Section,
    Text,
    Whole,
    disagreement,
    kind,
)
from stages.config.problems import shown, suggestion

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_HIDDEN = "***"  # what is shown in place of a password


def _usable_name(value: str) -> str:
    if not _NAME.fullmatch(value) or value.endswith("_missing"):
        raise PydanticCustomError(
            "kind", "expected small letters, digits and _, without _missing at the end"
        )
    return value


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise PydanticCustomError(
            "kind", "no regular expression ({why})", {"why": str(error)}
        ) from None
    return value


def _reachable(value: str) -> str:
    """A URL of a server; what is wrong with it is said without repeating it: it may hold secrets.

    Raises:
        PydanticCustomError: it has no host, another scheme, or the mark of a hidden password.
    """
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or not value.isascii() or not value.isprintable() or " " in value:
        raise PydanticCustomError(
            "secret", "expected the URL of a server, such as http://localhost:5000/score"
        )
    if parts.password == _HIDDEN:
        raise PydanticCustomError("secret", "write the password in place of ***")
    return value


def without_secrets(url: str) -> str:
    """A URL as it may be told: without user and password, and without its query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


Name = Annotated[str, AfterValidator(_usable_name)]
Pattern = Annotated[Text, AfterValidator(_compiles)]
Url = Annotated[Text, AfterValidator(_reachable)]


class _Term(Section):
    type: str

    weight: Number = 1.0
    """What the term is multiplied by in the sum."""

    name: Name | None = None
    """What its metrics are called: ``score/<name>``; null takes the type, numbered where a type
    comes more than once."""

    clip: Positive | None = None
    """The term is cut to ±clip, before its weight and after ``normalise``; null leaves it."""

    normalise: Flag = False
    """Give the term mean 0 and deviation 1 over all answers of the run so far, those of this
    rollout included."""


class ModelReward(_Term):
    """A reward model scores the whole answer."""

    type: Literal["model"] = "model"
    """What kind of reward this is."""

    path: Place
    """Reward model: a run folder, a model folder or a hub id. One of another tokenizer or template
    reads the text, in its own template."""


class PythonReward(_Term):
    """A function of a Python file scores the texts; the file's code is run."""

    type: Literal["python"]
    """What kind of reward this is."""

    path: Place
    """The Python file."""

    function: Text = "score"
    """Called as ``score(prompts, answers, records)``, three lists; returns a number or None for
    each answer."""


class HttpReward(_Term):
    """A server scores the texts."""

    type: Literal["http"]
    """What kind of reward this is."""

    url: Url
    """Where requests are posted."""

    protocol: Literal["plain", "openrlhf"] = "plain"
    """``plain``: prompts, responses and records to scores; ``openrlhf``: query and prompts to
    rewards."""

    timeout: Positive = 30.0
    """Seconds until an answer to a request must be there."""

    concurrency: Count = 4
    """Requests at the same time, of each process."""

    retries: Whole = 3
    """How often a request is sent again after status 429 or 5xx, or a broken connection."""

    @field_serializer("url")
    def _hide_password(self, value: str) -> str:
        parts = urlsplit(value)
        if parts.password is None:
            return value
        host = parts.netloc.rpartition("@")[2]
        shown = parts._replace(netloc=f"{parts.username or ''}:{_HIDDEN}@{host}")
        return urlunsplit(shown)


class RuleReward(_Term):
    """A rule scores the text."""

    type: Literal["rule"]
    """What kind of reward this is."""

    rule: Literal["length", "regex", "exact_match", "forbidden_words", "repetition"]
    """The rule; each reads the keys named with it."""

    target: Count | None = None
    """``length``: characters that an answer should have: 0 there, and minus the share of them that
    it is off."""

    max: Count | None = None
    """``length``: characters that cost nothing; what is over costs its share of them."""

    pattern: Pattern | None = None
    """``regex``: 1 for an answer in which this is found, otherwise 0."""

    field: Text | None = None
    """``exact_match``: 1 for an answer equal to this field of the prompt's line, otherwise 0; a
    list there holds several right answers."""

    extract: Pattern | None = None
    """``exact_match``: what is compared in the answer, and in the field where it is found there:
    the last match, or its first group; null compares the whole."""

    words: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """``forbidden_words``: minus the number of times that one of them stands in the answer, in
    large or small letters."""

    n: Count | None = None
    """``repetition``: minus the share of the runs of n words that came before in the answer."""

    @model_validator(mode="after")
    def _keys_of_the_rule(self) -> RuleReward:
        needed, read = RULES[self.rule]
        given = {key for keys in RULES.values() for key in keys.read if getattr(self, key)}
        if foreign := sorted(given - set(read)):
            raise disagreement(foreign[0], f"is not read by rule: {self.rule}")
        if len(given & set(needed)) != 1:
            how = "one of them" if given & set(needed) or len(needed) > 1 else "it"
            raise disagreement(
                needed[0], f"rule: {self.rule} needs {' or '.join(needed)}: give {how}"
            )
        return self


class Keys(NamedTuple):
    """Keys of a rule: those of which it needs exactly one, and all that it reads."""

    needed: tuple[str, ...]
    read: tuple[str, ...]


RULES = {
    "length": Keys(("target", "max"), ("target", "max")),
    "regex": Keys(("pattern",), ("pattern",)),
    "exact_match": Keys(("field",), ("field", "extract")),
    "forbidden_words": Keys(("words",), ("words",)),
    "repetition": Keys(("n",), ("n",)),
}
TYPES = ("model", "python", "http", "rule")


def _type(value: Any) -> str:
    given = value.type if isinstance(value, _Term) else value.get("type", "model")
    return f"<{given}>"


def _of_known_type(value: Any) -> Any:
    """A section whose type there is.

    Raises:
        PydanticCustomError: it is none, or of another type.
    """
    if kind(value) != "<section>":
        raise PydanticCustomError("kind", "expected a section such as {type: model, path: …}")
    given = value.get("type", "model") if isinstance(value, Mapping) else value.type
    if given not in TYPES:
        near = suggestion(given, list(TYPES)) if isinstance(given, str) else ""
        words = f"{', '.join(TYPES[:-1])} or {TYPES[-1]}"
        raise disagreement("type", f"expected {words}, got {shown(given)}{near}")
    return value


Term = Annotated[
    Annotated[ModelReward, Tag("<model>")]
    | Annotated[PythonReward, Tag("<python>")]
    | Annotated[HttpReward, Tag("<http>")]
    | Annotated[RuleReward, Tag("<rule>")],
    Discriminator(_type),
    BeforeValidator(_of_known_type),
]


class Placed(NamedTuple):
    """A term with its key in the config (``reward`` or ``reward.1``) and its name."""

    key: str
    name: str
    term: ModelReward | PythonReward | HttpReward | RuleReward


def placed(reward: Any) -> tuple[Placed, ...]:
    """The terms of a reward, each with its key and name."""
    many = isinstance(reward, Sequence)
    terms = tuple(reward) if many else (reward,)
    return tuple(
        Placed(f"reward.{n}" if many else "reward", name, term)
        for n, (name, term) in enumerate(zip(_names(terms), terms, strict=True))
    )


def _names(terms: Sequence[Any]) -> list[str]:
    types = [term.type for term in terms if term.name is None]
    numbers = dict.fromkeys(types, 0)
    found = []
    for term in terms:
        name = term.name
        if name is None:
            numbers[term.type] += 1
            repeats = types.count(term.type) > 1
            name = f"{term.type}_{numbers[term.type]}" if repeats else term.type
        found.append(name)
    return found


def _with_names_of_their_own(value: Any) -> Any:
    if not (names := [each.name for each in placed(value)]):
        raise PydanticCustomError("kind", "expected at least one term")
    for n, name in enumerate(names):
        if name in names[:n]:
            raise disagreement(f"{n}.name", f'"{name}" is the name of an earlier term')
    return value


Rewards = Annotated[
    Annotated[Term, Tag("<section>")] | Annotated[tuple[Term, ...], Tag("<list>")],
    Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message="expected a section such as {type: model, path: …}, or a list of them",
    ),
    AfterValidator(_with_names_of_their_own),
]
"""One term, or a list of them."""


class ScoreConfig(Section):
    """What ``rlhf score`` reads of a YAML file."""

    reward: Rewards
    """What scores the answers."""

    @property
    def terms(self) -> tuple[Placed, ...]:
        """The terms of the reward, each with its key and name."""
        return placed(self.reward)
