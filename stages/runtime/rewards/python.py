"""Rewards of type ``python``: a function of the user's file.

Its code runs in this process, as the user asked.
"""

from __future__ import annotations

import copy
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from stages.config.problems import suggestion
from stages.config.rewards import Placed, PythonReward
from stages.data.records import to_json
from stages.errors import ConfigError, RlhfError
from stages.runtime.rewards.foreign import as_found
from stages.runtime.rewards.texts import Absent, Answer, Score, Scorer, failed, is_score, told

Function = Callable[[list[Any], list[Any], list[Any]], Any]


class _Returned(NamedTuple):
    """What the function returned, and the values read out of it; None where it holds none."""

    whole: Any
    values: list[Any] | None


def scorer(placed: Placed, function: Function) -> Scorer:
    """The function as a scorer: one number or None for each answer."""
    return lambda answers: _scored(placed, function, answers)


def load(placed: Placed) -> Function:
    """The function of a term; its file is run.

    Raises:
        ConfigError: no such file or function, the file fails, or it cannot be called so.
    """
    term = placed.term
    assert isinstance(term, PythonReward)
    module = _run(placed, term)
    function: Function | None = getattr(module, term.function, None)
    named = f"{placed.key}.function: {term.function}"
    if not callable(function):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"{term.path} has no such function{suggestion(term.function, known)}",
            where=named,
            do=f"define {term.function}(prompts, answers, records) in it, or name another function",
        )
    with suppress(ValueError):  # what is written in C may not tell its arguments
        signature = inspect.signature(function)
        try:
            signature.bind([], [], [])
        except TypeError as error:
            raise ConfigError(
                f"cannot be called with three lists ({error})",
                where=named,
                do=f"let it be {term.function}(prompts, answers, records)",
            ) from None
    return function


def _run(placed: Placed, term: PythonReward) -> ModuleType:
    """The file as a module; nothing is written beside it."""
    path = Path(term.path)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}",
            where=f"{placed.key}.path: {path}",
            do="name a Python file with a function that scores answers",
        ) from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"is no Python: {getattr(error, 'msg', error)}",
            where=f"{path}:{getattr(error, 'lineno', None) or 1}",
            do="correct the file",
        ) from None
    module = ModuleType(f"rlhf_reward_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    if (beside := str(path.resolve().parent)) not in sys.path:
        sys.path.append(beside)  # what it imports may lie beside it
    try:
        with _no_bytecode(), as_found():
            exec(code, vars(module))
    except (Exception, SystemExit, GeneratorExit) as error:
        raise ConfigError(
            f"raised {_named(error)} when it was loaded",
            where=_place(error, path),
            do="correct the file",
        ) from error
    return module


@contextmanager
def _no_bytecode() -> Iterator[None]:
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _scored(placed: Placed, function: Function, answers: Sequence[Answer]) -> list[Score]:
    term = placed.term
    assert isinstance(term, PythonReward)
    place = f"{term.path}:{_line_of(function)}"
    returned, listed = _called(placed, function, answers)
    if listed is None:
        raise failed(
            placed,
            f"returned {_shown(returned)} for {_counted(answers)}",
            where=place,
            do="let it return a list with a number or None for each answer",
        )
    if len(listed) != len(answers):
        raise failed(
            placed,
            f"returned {_number(listed, len(answers))} scores for {_counted(answers)}",
            where=place,
            do="let it return a list with a number or None for each answer, in their order",
        )
    return [_score(placed, v, a, place) for v, a in zip(listed, answers, strict=True)]


def _called(placed: Placed, function: Function, answers: Sequence[Answer]) -> _Returned:
    try:
        return _call(function, answers)
    except (Exception, SystemExit, GeneratorExit) as error:
        if isinstance(error, RlhfError):
            raise
        term = placed.term
        assert isinstance(term, PythonReward)
        raise failed(
            placed,
            f"raised {_named(error)} for {_blamed(function, answers)}",
            where=_place(error, Path(term.path)),
            do=f"correct {term.path}, then run the same command again (a stage: with --resume)",
        ) from error


def _call(function: Function, answers: Sequence[Answer]) -> _Returned:
    """One call, its values read out: those of a generator are the user's code as well."""
    with as_found():
        returned = function(
            [to_json(answer.prompt) for answer in answers],
            [answer.text for answer in answers],
            [copy.deepcopy(dict(answer.record)) for answer in answers],
        )
        return _Returned(returned, _values(returned, len(answers) + 1))


def _values(returned: Any, most: int) -> list[Any] | None:
    """The first values of what was returned, which may have no end; None where it holds none."""
    if isinstance(returned, str | bytes | dict):
        return None
    try:
        iterator = iter(returned)
    except TypeError:
        return None
    return list(islice(iterator, most))


def _number(listed: Sequence[Any], wanted: int) -> str:
    """How many values there are, as far as they were read."""
    return f"more than {wanted}" if len(listed) > wanted else str(len(listed))


def _blamed(function: Function, answers: Sequence[Answer]) -> str:
    """The prompt of the first answer that fails alone, or how many answers failed together."""
    for answer in answers:
        try:
            _call(function, [answer])
        except (Exception, SystemExit, GeneratorExit):
            return told(answer)
    return f"{_counted(answers)} together, the first to {told(answers[0])}"


def _score(placed: Placed, value: Any, answer: Answer, place: str) -> Score:
    if value is None:
        return Absent("its function returned None")
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except Exception:  # whatever the conversion of a class of the user's raises
        number = None
    if number is None or not is_score(number):
        raise failed(
            placed,
            f"returned {_shown(value)} for {told(answer)}",
            where=place,
            do="let it return a finite number that fp32 holds, or None where it has no judgement",
        )
    return number


def _counted(answers: Sequence[Answer]) -> str:
    return f"{len(answers)} answer" if len(answers) == 1 else f"{len(answers)} answers"


def _shown(value: object) -> str:
    return _short(repr, value)


def _named(error: BaseException) -> str:
    text = _short(str, error, most=200)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(write: Callable[[Any], str], value: object, most: int = 60) -> str:
    """A value in one short line; one that cannot be written is named by its type."""
    try:
        text = " ".join(write(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _place(error: BaseException, path: Path) -> str:
    """The last line of the user's file that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines and lines[-1] else str(path)


def _line_of(function: Function) -> int:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return getattr(code, "co_firstlineno", 1)
