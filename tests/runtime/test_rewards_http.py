"""Rewards of type http: what is posted, what is read, and what becomes of a server that fails."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

pytest.importorskip("urllib3")

from stages.errors import TrainingError
from stages.runtime.rewards import http
from stages.runtime.rewards.texts import Absent
from tests.runtime.asked import answer, term
from tests.runtime.reward_server import Reply, scores, serving

ANSWERS = [answer(text, f"q{n}", n=n) for n, text in enumerate(("a", "bb", "ccc", "dddd", ""))]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF", 0.01)
    monkeypatch.setattr(http, "LONGEST", 0.01)


def ask(url: str, answers: Any = ANSWERS, **keys: Any) -> Any:
    placed = term(**{"type": "http", "url": url, "concurrency": 1, "timeout": 5, **keys})
    return http.Server(placed, placed.term)(answers)  # type: ignore[arg-type]


def lengths(_: int, body: dict[str, Any]) -> Reply:
    return scores([len(text) for text in body["responses"]])


def failure(reply: Any, *, pause: float = 0.0, drip: float = 0.0, **keys: Any) -> TrainingError:
    with serving(reply, pause=pause, drip=drip) as seen, pytest.raises(TrainingError) as caught:
        ask(seen.url, **keys)
    assert caught.value.where == f"reward.url: {seen.url}"
    return caught.value


def test_the_plain_protocol_posts_texts_and_lines_and_reads_scores_and_nulls() -> None:
    with serving(lambda *_: scores([1, 2.5, None, -3, 0])) as seen:
        found = ask(seen.url)
    assert [score for score in found if not isinstance(score, Absent)] == [1.0, 2.5, -3.0, 0.0]
    assert isinstance(found[2], Absent)
    assert seen.bodies == [
        {
            "prompts": [f"q{n}" for n in range(5)],
            "responses": ["a", "bb", "ccc", "dddd", ""],
            "records": [{"prompt": f"q{n}", "n": n} for n in range(5)],
        }
    ]


def test_the_protocol_of_openrlhf_posts_whole_texts_and_reads_rewards() -> None:
    with serving(lambda *_: scores([1, 2, 3, 4, 5], "rewards")) as seen:
        assert ask(seen.url, protocol="openrlhf") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert seen.bodies[0]["query"][:2] == ["<q0>a", "<q1>bb"]
    assert seen.bodies[0]["prompts"][:2] == ["<q0>", "<q1>"]


@pytest.mark.parametrize("concurrency", [2, 3, 50])
def test_requests_at_the_same_time_give_the_scores_in_order(concurrency: int) -> None:
    with serving(lengths, pause=0.1) as seen:
        assert ask(seen.url, concurrency=concurrency) == [1.0, 2.0, 3.0, 4.0, 0.0]
    assert seen.most == len(seen.bodies) == min(concurrency, 5)


def test_no_answer_to_judge_asks_nothing() -> None:
    assert ask("http://127.0.0.1:9/", []) == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_status_that_may_pass_is_asked_again(status: int) -> None:
    """The server of the tests asks with 429 to be left alone for an hour."""

    def reply(n: int, body: dict[str, Any]) -> Reply:
        return (status, b"later") if n < 2 else lengths(n, body)

    with serving(reply) as seen:
        assert ask(seen.url, retries=2) == [1.0, 2.0, 3.0, 4.0, 0.0]
    assert len(seen.bodies) == 3


def test_a_status_that_does_not_pass_is_an_error_after_the_retries() -> None:
    reply = (503, b"<html>\nno</html>")
    with serving(lambda *_: reply) as seen, pytest.raises(TrainingError) as caught:
        ask(seen.url, retries=1)
    assert len(seen.bodies) == 2
    assert "status 503, also when asked again" in caught.value.what
    assert '"<html> no</html>"' in caught.value.what


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_another_status_is_an_error_at_once(status: int) -> None:
    refused = pytest.raises(TrainingError, match=f"status {status}: ")
    with serving(lambda *_: (status, b"no such thing")) as seen, refused:
        ask(seen.url)
    assert len(seen.bodies) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<!doctype html><p>hello", "no JSON object with scores"),
        (b"", "but nothing"),
        (b'{"score": [1]}', "no JSON object with scores"),
        (b"[1, 2, 3, 4, 5]", "no JSON object with scores"),
        (b'{"scores": 5}', "no list of scores for 5 answers"),
        (b'{"scores": [1, 2]}', "answered 2 scores for 5 answers"),
        (b'{"scores": [1, 2, "3", 4, 5]}', 'answered "3" for the prompt at p.jsonl:1 ("q2")'),
        (b'{"scores": [1, NaN, 3, 4, 5]}', 'answered NaN for the prompt at p.jsonl:1 ("q1")'),
        (b'{"scores": [true, 2, 3, 4, 5]}', "answered true for the prompt"),
        (b'{"scores": [1e999, 2, 3, 4, 5]}', "answered Infinity for the prompt"),
        (b'{"scores": [1e39, 2, 3, 4, 5]}', "answered 1e+39 for the prompt"),
        (b'{"scores": [1, 2, 3, 4, 5], "scores": []}', "the key 'scores' is given twice"),
        (b'{"scores": [' + b"9" * 400 + b", 2, 3, 4, 5]}", "answered 999"),
    ],
)
def test_an_answer_that_is_no_list_of_numbers_is_named(body: bytes, words: str) -> None:
    assert words in failure(lambda *_: (200, body)).what


def test_a_server_that_hangs_is_given_up_in_time() -> None:
    started = time.monotonic()
    error = failure(lengths, pause=1.0, timeout=0.1, retries=1)
    assert time.monotonic() - started < 0.9
    assert "did not answer within 0.1 seconds" in error.what
    assert "timeout" in error.do


def test_a_server_that_drips_its_answer_is_given_up_in_time() -> None:
    started = time.monotonic()
    error = failure(lengths, drip=0.05, timeout=0.2, retries=0)
    assert time.monotonic() - started < 1.0
    assert "did not answer within 0.2 seconds" in error.what


def test_an_answer_that_is_too_large_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_LARGEST", 100)
    error = failure(lambda n, body: (200, b" " * 1000))
    assert "answered with more than 100 bytes" in error.what


def test_a_server_that_is_not_there_is_named() -> None:
    with serving(lengths) as seen:
        pass
    with pytest.raises(TrainingError, match="cannot be asked") as caught:
        ask(seen.url, retries=1)
    assert caught.value.where == f"reward.url: {seen.url}"


def test_user_and_password_are_sent_and_never_told(caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda n, body: lengths(n, body) if n == 0 else (500, b"no")) as seen:
        url = seen.url.replace("http://", "http://me:s%40cret@") + "?key=hidden"
        assert ask(url) == [1.0, 2.0, 3.0, 4.0, 0.0]
        with pytest.raises(TrainingError) as caught:
            ask(url)
    sent = seen.headers[0]["authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent).decode() == "me:s@cret"
    told = f"{caught.value.where} {caught.value.what} {caught.value.do} {caplog.text}"
    for secret in ("s%40cret", "s@cret", "me:", "hidden"):
        assert secret not in told
