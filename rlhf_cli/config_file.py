"""From a config file and ``KEY=VALUE`` overrides to a config, or to all that is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from rlhf_cli.config_text import document, in_file
from rlhf_cli.yaml_source import Mark, NotYaml, Place, read_yaml
from stages.config import (
    STAGES,
    InvalidConfig,
    ScoreConfig,
    StageConfig,
    preset_values,
    resolve,
    resolve_reward,
)
from stages.config.base import Path, dotted, leaves
from stages.config.problems import Problem
from stages.errors import ConfigError

COMMANDS = {word: word for word in STAGES}
COMMANDS |= {"reward_model": "train-rm", "online_dpo": "online-dpo"}
_TOP = Mark(1, 1)
_LAST = Mark(sys.maxsize, 0)  # where overrides stand among findings: behind those of the file


class Loaded(NamedTuple):
    """A resolved config, and dotted key → where its value comes from.

    An origin is ``file.yaml:4:3``, ``override``, ``preset NAME`` or ``default``.
    """

    config: StageConfig
    origins: dict[str, str]


class _Source(NamedTuple):
    """What the user gave: values, where they stand in the file, and which came as overrides."""

    name: str
    values: dict[str, Any]
    places: dict[Path, Place]
    overridden: dict[Path, str]


class _Finding(NamedTuple):
    """One error with its place; ``order`` sorts findings as the file reads, overrides last."""

    order: Mark
    where: str
    what: str


def load(path: str, overrides: Iterable[str] = (), *, stage: str | None) -> Loaded:
    """Read a config file, lay the overrides over it, and resolve it.

    Args:
        path: the file, or ``-`` for standard input.
        overrides: ``KEY=VALUE``, the key dotted, the value YAML 1.2.
        stage: the stage that will run it, or None where any config will do.

    Raises:
        ConfigError: with everything that is wrong at once, each with its place.
    """
    source = _read(path)
    findings = [found for text in overrides if (found := _override(source, text))]
    _refuse_other_stage(source, stage)
    config, problems = _resolved(source.values, stage)
    findings += [_placed(problem, source) for problem in problems]
    if config is None or findings:
        raise _all_of(findings, source.values.get("stage"))
    return Loaded(config, _origins(config, source))


def _resolved(
    values: dict[str, Any], stage: str | None
) -> tuple[StageConfig | None, list[Problem]]:
    """The config, or None and its problems; ``stage`` stands in for a stage that is not given."""
    try:
        return resolve(values), []
    except InvalidConfig as error:
        problems = error.problems
    if stage and not _is_stage(values.get("stage")):
        problems = problems + _resolved({**values, "stage": stage}, None)[1]
    return None, problems


def _is_stage(word: object) -> bool:
    return isinstance(word, str) and word in STAGES


def _refuse_other_stage(source: _Source, stage: str | None) -> None:
    given = source.values.get("stage")
    if stage and isinstance(given, str) and given in STAGES and given != stage:
        article = "an" if given in ("sft", "odpo", "orpo", "online_dpo") else "a"
        raise ConfigError(
            f"this is {article} {given} config; run rlhf {COMMANDS[given]} {source.name}",
            where=_placed(Problem(("stage",), "", "value"), source).where,
            do=f"or give rlhf {COMMANDS[stage]} a config with stage: {stage}",
        )


def load_reward(path: str) -> ScoreConfig:
    """The reward in a YAML file: its ``reward:`` section, as in a stage's config, or its terms.

    Raises:
        ConfigError: with everything that is wrong at once, each with its place.
    """
    name, (values, places) = document(path)
    within = isinstance(values, dict) and "reward" in values
    if not within and isinstance(values, dict) and "stage" in values:
        raise ConfigError(
            f"a config of {values['stage']} without a reward",
            where=name,
            do="name a config with reward:, a YAML file of terms or a reward model's folder",
        )
    reward = values["reward"] if within else values
    if not within:
        places = {("reward", *place): mark for place, mark in places.items()}
    source = _Source(name, {"reward": reward}, places, {})
    try:
        return resolve_reward(reward)
    except InvalidConfig as error:
        raise _all_of([_placed(problem, source) for problem in error.problems], "ppo") from None


def _read(path: str) -> _Source:
    name, (values, places) = document(path)
    if not isinstance(values, dict):
        what = "the file is empty" if values is None else "the file is not a mapping of keys"
        raise ConfigError(
            what,
            where=in_file(name, _TOP),
            do=f"begin it with stage: and one of {', '.join(STAGES)}; "
            "rlhf init writes complete examples",
        )
    return _Source(name, values, places, {})


def _override(source: _Source, text: str) -> _Finding | None:
    """Lay one override over the values in place, or say what is wrong with it."""
    key, equals, written = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        wanted = "expected KEY=VALUE, such as train.learning_rate=1e-5"
        return _Finding(_LAST, f"override {text}", wanted)
    where = f"override {key.strip()}"
    try:
        value = read_yaml(written).value
    except NotYaml as error:
        return _Finding(_LAST, where, f"{error} (put text with special characters in quotes)")
    try:
        path = _put(source.values, _of_its_terms(parts, source.values.get("reward")), value)
        source.overridden[path] = key.strip()
    except LookupError as error:
        return _Finding(_LAST, where, str(error.args[0]))
    return None


def _of_its_terms(parts: list[str], reward: Any) -> list[str]:
    """The parts of a key; the one term of a reward goes by its number and without it."""
    if parts[0] != "reward" or len(parts) == 1:
        return parts
    if isinstance(reward, list):
        alone = len(reward) == 1 and not parts[1].isdecimal()
        return ["reward", "0", *parts[1:]] if alone else parts
    return [parts[0], *parts[2:]] if parts[1] == "0" else parts


def _put(container: Any, parts: list[str], value: Any) -> Path:
    """Set ``value`` below ``container`` and return its path.

    Raises:
        LookupError: the key leads into a list that has no such item, or below a plain value.
    """
    key: Any = parts[0]
    if isinstance(container, list):
        if not (key.isdecimal() and int(key) < len(container)):
            raise LookupError(f"the list has {len(container)} items, counted from 0, and no {key}")
        key = int(key)
    if len(parts) == 1:
        container[key] = value
        return (key,)
    inner = container[key] if isinstance(container, list) else container.get(key)
    if inner is None:
        inner = container[key] = {}
    if not isinstance(inner, dict | list):
        raise LookupError(f"{key} holds a value, so there is no {parts[1]} in it")
    return (key, *_put(inner, parts[1:], value))


def _placed(problem: Problem, source: _Source) -> _Finding:
    """A problem at its key, its value or its section, or at the override that brought it."""
    key = dotted(problem.path)
    target = problem.path[:-1] if problem.at == "section" else problem.path
    label = _overriding(target, source)
    if label is not None:
        where = f"override {label}" if label == key else f"override {label}: {key}"
        return _Finding(_LAST, where, problem.message)
    present = target
    while present and present not in source.places:
        present = present[:-1]
    place = source.places.get(present, Place(_TOP, _TOP))
    mark = place.value if problem.at == "value" and present == target else place.key
    return _Finding(mark, f"{in_file(source.name, mark)}: {key}", problem.message)


def _overriding(path: Path, source: _Source) -> str | None:
    """The key of the override that brought the value at a path, itself or as part of a section."""
    around = (path[:n] for n in range(len(path), 0, -1))
    label = next((source.overridden[p] for p in around if p in source.overridden), None)
    if label is not None or not path or path in source.places:
        return label
    within = (label for p, label in source.overridden.items() if p[: len(path)] == path)
    return next(within, None)


def _all_of(findings: list[_Finding], stage: object) -> ConfigError:
    """One error for all findings, each on its line with its place."""
    word = stage if _is_stage(stage) else "STAGE"
    do = f"correct it; rlhf config schema {word} prints every key with its meaning"
    if len(findings) == 1:
        return ConfigError(findings[0].what, where=findings[0].where, do=do)
    ordered = sorted(findings, key=lambda finding: finding.order)
    lines = "\n".join(f"{finding.where}: {finding.what}" for finding in ordered)
    return ConfigError(lines, do=do)


def _origins(config: StageConfig, source: _Source) -> dict[str, str]:
    preset = preset_values(config.stage, config.preset)
    return {
        dotted(path): _origin(path, source, f"preset {config.preset}", preset)
        for path, _ in leaves(config)
    }


def _origin(path: Path, source: _Source, preset_name: str, preset: dict[str, Any]) -> str:
    if _has(source.values, path):
        if _overriding(path, source) is not None:
            return "override"
        return in_file(source.name, source.places[path].value)
    return preset_name if _has(preset, path) else "default"


def _has(values: Any, path: Path) -> bool:
    for part in path:
        inside = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if not inside and not (isinstance(values, dict) and part in values):
            return False
        values = values[part]
    return True
