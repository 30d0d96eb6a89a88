"""Rewards of type ``http``: a server scores the texts.

``plain`` posts ``{"prompts", "responses", "records"}`` and reads ``{"scores": [number or null]}``
in the same order; ``openrlhf`` posts ``{"query", "prompts"}``, the query a prompt with its answer,
and reads ``{"rewards"}`` (OpenRLHF's remote reward models).

A URL may hold a password: it is sent as basic authentication, and no message repeats it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.util import Retry, Timeout, make_headers

from stages.config.rewards import HttpReward, Placed, without_secrets
from stages.data.json_text import GivenTwice, unique
from stages.data.records import to_json
from stages.errors import TrainingError
from stages.runtime.rewards.texts import Absent, Answer, Score, failed, is_score, told

# Its notices of what is asked again hold the URL with its query.
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)

AGAIN = (429, *range(500, 600))  # what a server may answer otherwise the next time
BACKOFF = 0.5  # seconds before the second request, doubled from then on
LONGEST = 60.0  # seconds that a server may ask to be left alone for
_LARGEST = 64 << 20  # bytes of an answer
_PIECE = 1 << 16
_SHOWN = 80  # characters of an answer in a message


class _Patience(Retry):
    """Asks again after the pause that the server wants, but never after hours of it."""

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        """Seconds that the server asks for, at most ``LONGEST``."""
        wanted = super().get_retry_after(response)
        return None if wanted is None else min(wanted, LONGEST)


class _TooLargeError(Exception):
    """An answer longer than any list of scores."""


class _Bad(NamedTuple):
    """What is wrong with an answer of the server."""

    what: str
    do: str


@dataclass(frozen=True)
class Server:
    """A scorer that asks a server."""

    placed: Placed
    term: HttpReward

    def __call__(self, answers: Sequence[Answer]) -> list[Score]:
        """The answers in as many requests as may be on their way at the same time.

        Raises:
            TrainingError: the server cannot be reached, is too slow, or answers anything but a
                number or null for each answer.
        """
        count = min(self.term.concurrency, len(answers))
        size = -(-len(answers) // count) if count else 1
        parts = [answers[start : start + size] for start in range(0, len(answers), size)]
        with self._pool() as pool, ThreadPoolExecutor(max(1, len(parts))) as threads:
            asked = [threads.submit(self._ask, pool, part) for part in parts]
            return [score for one in asked for score in one.result()]

    def _pool(self) -> urllib3.PoolManager:
        return urllib3.PoolManager(maxsize=self.term.concurrency)

    def _ask(self, pool: urllib3.PoolManager, answers: Sequence[Answer]) -> list[Score]:
        try:
            body = self._answer_to(pool, _BODIES[self.term.protocol](answers))
        except urllib3.exceptions.HTTPError as error:
            raise self._failed(_of_connection(error, self.term)) from None
        except TimeoutError:
            raise self._failed(_too_slow(self.term)) from None
        except _TooLargeError:
            what = f"answered with more than {_LARGEST} bytes"
            raise self._failed(_Bad(what, "look at what the server sends")) from None
        found = _scores(body, self.term.protocol, answers)
        if isinstance(found, _Bad):
            raise self._failed(found)
        return found

    def _answer_to(self, pool: urllib3.PoolManager, content: Mapping[str, Any]) -> bytes:
        parts = urlsplit(self.term.url)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers |= make_headers(basic_auth=secret)
        retries = _Patience(
            total=self.term.retries,
            status_forcelist=AGAIN,
            allowed_methods=None,
            backoff_factor=BACKOFF,
            redirect=False,
            raise_on_status=False,
        )
        response = pool.request(
            "POST",
            parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
            body=json.dumps(content).encode(),
            headers=headers,
            timeout=Timeout(self.term.timeout),
            retries=retries,
            preload_content=False,
        )
        try:
            body = _read(response, self.term.timeout)
        finally:
            response.close()
        if not 200 <= response.status < 300:
            raise self._failed(_of_status(response.status, body))
        return body

    def _failed(self, bad: _Bad) -> TrainingError:
        where = f"{self.placed.key}.url: {without_secrets(self.term.url)}"
        return failed(self.placed, bad.what, do=bad.do, where=where)


def _read(response: urllib3.BaseHTTPResponse, seconds: float) -> bytes:
    """The body, read within some seconds however slowly it drips.

    Raises:
        TimeoutError: it took longer.
        _TooLargeError: it is too large.
    """
    started, pieces, size = time.monotonic(), [], 0
    while piece := response.read1(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if time.monotonic() - started > seconds:
            raise TimeoutError
        if size > _LARGEST:
            raise _TooLargeError
    return b"".join(pieces)


def _plain(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "prompts": [to_json(answer.prompt) for answer in answers],
        "responses": [answer.text for answer in answers],
        "records": [dict(answer.record) for answer in answers],
    }


def _openrlhf(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "query": [answer.rendered + answer.text for answer in answers],
        "prompts": [answer.rendered for answer in answers],
    }


_BODIES = {"plain": _plain, "openrlhf": _openrlhf}
_SCORES = {"plain": "scores", "openrlhf": "rewards"}
_object = partial(json.loads, object_pairs_hook=unique)


def _scores(body: bytes, protocol: str, answers: Sequence[Answer]) -> list[Score] | _Bad:
    """The numbers in an answer of the server, or what is wrong with it."""
    key = _SCORES[protocol]
    do = f'let it answer {{"{key}": [number or null, …]}}, one for each answer in their order'
    try:
        values = _object(body)[key]
    except GivenTwice as error:
        return _Bad(f"answered an object in which {error}", do)
    except (ValueError, KeyError, TypeError, RecursionError):
        return _Bad(f"answered no JSON object with {key}, but {_start(body)}", do)
    if not isinstance(values, list) or len(values) != len(answers):
        count = len(values) if isinstance(values, list) else "no list of"
        return _Bad(f"answered {count} {key} for {len(answers)} answers", do)
    found: list[Score] = []
    for value, answer in zip(values, answers, strict=True):
        score = Absent("the server answered null") if value is None else _number(value)
        if score is None:
            return _Bad(f"answered {json.dumps(value)[:_SHOWN]} for {told(answer)}", do)
        found.append(score)
    return found


def _number(value: object) -> float | None:
    """A number that can be a score; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if is_score(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def _of_status(status: int, body: bytes) -> _Bad:
    again = status in AGAIN
    do = "look at the server's log" if again else "correct the URL, or what the server expects"
    how = ", also when asked again" if again else ""
    return _Bad(f"answered with status {status}{how}: {_start(body)}", do)


def _of_connection(error: Exception, term: HttpReward) -> _Bad:
    """Why there was no answer; the libraries' own words may repeat the URL."""
    reason = getattr(error, "reason", None) or error
    unreachable = isinstance(reason, urllib3.exceptions.NewConnectionError)
    if isinstance(reason, urllib3.exceptions.TimeoutError) and not unreachable:
        return _too_slow(term)
    name = "no connection" if unreachable else type(reason).__name__
    return _Bad(f"cannot be asked ({name})", "start the server, or correct the URL")


def _too_slow(term: HttpReward) -> _Bad:
    return _Bad(
        f"did not answer within {term.timeout:g} seconds",
        "raise timeout or concurrency of this reward, or look at the server's log",
    )


def _start(body: bytes) -> str:
    text = " ".join(body[: 4 * _SHOWN].decode("utf-8", errors="replace").split())
    return json.dumps(text[:_SHOWN], ensure_ascii=False) if text else "nothing"
