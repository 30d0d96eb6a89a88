"""Processes that apply a function to a stream of chunks; results in order, memory bounded.

They are fresh Python processes that talk over pipes, not forks: torch and the tokenizers have
threads, which no fork survives. Nor do they import the main module again, as multiprocessing would,
so a script needs no guard.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from stages.errors import ResourceError, RlhfError

Given = TypeVar("Given")
Result = TypeVar("Result")

_MOST = 8  # more of them wait for the one process that reads
_AHEAD = 2  # chunks on their way to each process
# -I keeps modules of the current folder out; the path of this process is handed on instead.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from stages.data.worker import main; main()"
)


def usable_cores() -> int:
    """The cores that this process may use, at most as many as are of use here."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, _MOST)


def in_order(
    function: Callable[..., Result],
    fixed: Sequence[Any],
    chunks: Iterable[Given],
    count: int,
) -> Iterator[Result]:
    """``function(*fixed, chunk)`` of each chunk, by ``count`` processes, or here where it is one.

    Args:
        function: of a module that the processes can import.
        fixed: its first arguments, sent once.
        chunks: its last argument. An error in making them comes after the results before it.
        count: how many processes.

    Raises:
        RlhfError: what the function raises for the first chunk that it refuses.
        ResourceError: a process was ended from outside.
    """
    iterator = iter(chunks)
    first = next(iterator, None) if count > 1 else None
    setup = _pickled((function, *fixed)) if first is not None else b""
    with ExitStack() as stack:
        found = [stack.enter_context(_Worker(setup)) for _ in range(count if setup else 0)]
        if not found or not all(worker.is_ready() for worker in found):
            found = []
        rest = iterator if first is None else _chain(first, iterator)
        if not found:
            yield from (function(*fixed, chunk) for chunk in rest)
            return
        threads = stack.enter_context(_Threads(found))
        yield from _results(threads, rest)


def _chain(first: Given, rest: Iterator[Given]) -> Iterator[Given]:
    yield first
    yield from rest


def _pickled(value: object) -> bytes:
    """The bytes of a value, or none where it cannot be sent, as a tokenizer of foreign code."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):
        return b""


def _results(threads: _Threads, chunks: Iterator[Any]) -> Iterator[Any]:
    pending: deque[Future[Any]] = deque()
    failure: RlhfError | None = None
    while failure is None:
        try:
            chunk = next(chunks)
        except StopIteration:
            break
        except RlhfError as error:
            failure = error
        else:
            pending.append(threads.ask(chunk))
            if len(pending) > threads.ahead:
                yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
    if failure is not None:
        raise failure


class _Threads:
    """One thread for each worker, which sends it a chunk and waits for the result."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self.ahead = _AHEAD * len(workers)
        self._workers = workers
        self._pool = ThreadPoolExecutor(len(workers))
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in workers:
            self._idle.put(worker)

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave at once: a worker that is gone wakes the thread that waits for it."""
        for worker in self._workers:
            worker.end()
        self._pool.shutdown(cancel_futures=True)

    def ask(self, chunk: Any) -> Future[Any]:
        """The result that some worker will give."""
        return self._pool.submit(self._ask, chunk)

    def _ask(self, chunk: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.ask(chunk)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, setup: bytes) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._send(setup)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()

    def is_ready(self) -> bool:
        """Whether it could import and unpickle what it needs."""
        try:
            return bool(self._receive() == ("ready", None))
        except ResourceError:
            return False

    def ask(self, chunk: Any) -> Any:
        """The result of a chunk."""
        self._send(pickle.dumps(chunk, protocol=pickle.HIGHEST_PROTOCOL))
        kind, value = self._receive()
        if kind == "refused":
            error, what, do, where = value
            raise error(what, do=do, where=where)
        if kind == "bug":
            raise RuntimeError(f"a worker failed:\n{value}")
        return value

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the answer that is missing tells why

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise ResourceError(
                f"a process that tokenises records was ended (exit {self._process.wait()})",
                do="free some memory, then run the same command again",
            ) from error
