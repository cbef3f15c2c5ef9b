"""A proxy that loses answers: what it passes on takes effect, and some of those who asked are told 503."""

from __future__ import annotations

import http.client
import itertools
import random
import threading
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

_HOP = ("host", "connection", "content-length", "transfer-encoding", "date", "server")
LOST = b'{"detail": "the answer is lost"}'


class LossyProxy:
    """Passes requests on to servers in turn; of each POST that was accepted it loses the answer by chance.

    Args:
        ports: of the servers, on this host; one that does not answer is passed over.
        share: of the answers that are lost; seed: of the chance.
        spared: parts of paths of which none is lost.

    Attributes:
        lost: how many, by the last part of their path.
    """

    def __init__(self, ports: Sequence[int], share: float, seed: int, spared: tuple[str, ...] = ()) -> None:
        self.lost = Counter[str]()
        self._ports, self._share, self._spared = itertools.cycle(ports), share, spared
        self._count = len(ports)
        self._chance, self._lock = random.Random(seed), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LossyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def loses(self, path: str) -> bool:
        """Whether the answer to a request that was accepted is lost."""
        if any(part in path for part in self._spared):
            return False
        with self._lock:
            lost = self._chance.random() < self._share
            self.lost[path.rpartition("/")[2]] += lost
        return lost

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any, bytes]:
        """(status, headers, body) of a server's answer; 503 where none of them answers."""
        for _ in range(self._count):
            connection = http.client.HTTPConnection("127.0.0.1", next(self._ports), timeout=60)
            try:
                connection.request(method, path, body, headers)
                reply = connection.getresponse()
                return reply.status, reply.getheaders(), reply.read()
            except (OSError, http.client.HTTPException):
                continue
            finally:
                connection.close()
        return 503, [], LOST

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                passed = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
                status, headers, answer = proxy.answer(self.command, self.path, passed, body)
                if self.command == "POST" and status < 300 and proxy.loses(self.path):
                    status, headers, answer = 503, [("retry-after-ms", "20")], LOST
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                if status != 204:
                    self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        return Handler
