"""A server on this machine that scores texts, or does what servers do when something is wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes]


@dataclass
class Seen:
    """What a server was asked.

    Attributes:
        url: of the server.
        bodies: of the requests.
        headers: of the requests.
        most: requests that were being answered at the same time.
    """

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0
    now: int = 0
    lock: Any = field(default_factory=threading.Lock)


def scores(values: Sequence[Any], key: str = "scores") -> Reply:
    """A good answer."""
    return 200, json.dumps({key: list(values)}).encode()


@contextmanager
def serving(
    reply: Callable[[int, dict[str, Any]], Reply], *, pause: float = 0.0, drip: float = 0.0
) -> Iterator[Seen]:
    """A server whose n-th answer is ``reply(n, body)``.

    Args:
        reply: from the number of the request, from 0, and its body, to status and answer.
        pause: seconds before an answer.
        drip: seconds between the bytes of an answer.
    """
    seen = Seen()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with seen.lock:
                number = len(seen.bodies)
                seen.bodies.append(body)
                seen.headers.append({k.lower(): v for k, v in self.headers.items()})
                seen.now += 1
                seen.most = max(seen.most, seen.now)
            time.sleep(pause)
            status, content = reply(number, body)
            with seen.lock:
                seen.now -= 1
            try:
                self._send(status, content)
            except OSError:  # the client went away
                return

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            if status == 429:
                self.send_header("Retry-After", "3600")
            self.end_headers()
            for n in range(len(content) if drip else 0):
                self.wfile.write(content[n : n + 1])
                time.sleep(drip)
            if not drip:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        seen.url = f"http://127.0.0.1:{server.server_port}/score"
        try:
            yield seen
        finally:
            server.shutdown()
            thread.join()
