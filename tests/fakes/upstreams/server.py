"""An HTTP server that says exactly what a test gives it, byte by byte, and keeps what it was sent."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """A request as it arrived."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of a header, or None."""
        values = [v for k, v in self.headers if k.lower() == name.encode()]
        return values[0].decode("latin-1") if values else None

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


@dataclass
class Answer:
    """What to answer: the body in packets, chunked, or with a length where there is one packet alone.

    `hold` is waited for before the packet of number `held` (-1: before the status); `broken` ends the
    connection without an end of the body.
    """

    packets: Sequence[bytes]
    status: str = "200 OK"
    headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),)
    chunked: bool = True
    hold: threading.Event | None = None
    held: int = -1
    broken: bool = False
    pause_s: float = 0.003


def whole(body: Any, status: str = "200 OK", **headers: str) -> Answer:
    """A JSON reply."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return Answer([data], status, list(named.items()), chunked=False)


def streamed(data: bytes, cuts: Sequence[int] = (), **options: Any) -> Answer:
    """An event stream, cut into packets at these places."""
    edges = [0, *cuts, len(data)]
    packets = [data[a:b] for a, b in itertools.pairwise(edges)]
    return Answer(packets, headers=[("content-type", "text/event-stream; charset=utf-8")], **options)


def sse(*events: Any, named: bool = False, done: bool = True) -> bytes:
    """Events as a stream's bytes; `named` as Anthropic and Responses write them, else ended by [DONE]."""
    parts = []
    for event in events:
        head = f"event: {event['type']}\n" if named else ""
        parts.append(f"{head}data: {json.dumps(event, ensure_ascii=False)}\n\n")
    if done and not named:
        parts.append("data: [DONE]\n\n")
    return "".join(parts).encode()


def chat_reply(text: str = "Hi", **more: Any) -> dict[str, Any]:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return {
        "id": "chatcmpl-up1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "big",
        "choices": [choice],
        "usage": usage,
    } | more


@dataclass
class HttpUpstream:
    """Answers requests in turn with `answers`; with a chat reply where there are none left."""

    answers: list[Answer] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client closes its connection before the whole answer was sent."""

    def start(self) -> None:
        """Listen."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as stream:
            while (request := _read(stream)) is not None:
                self.asked.append(request)
                answer = self.answers.pop(0) if self.answers else whole(chat_reply())
                if not self._say(connection, answer, head_only=request.method == "HEAD"):
                    return

    def _say(self, connection: socket.socket, answer: Answer, *, head_only: bool) -> bool:
        if answer.held == -1 and answer.hold is not None and not self._wait(connection, answer.hold):
            return False
        framing = (
            ("transfer-encoding", "chunked")
            if answer.chunked
            else ("content-length", str(sum(map(len, answer.packets))))
        )
        lines = [f"HTTP/1.1 {answer.status}", *(f"{k}: {v}" for k, v in [*answer.headers, framing])]
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("utf-8"))
        if head_only:
            return True
        for number, packet in enumerate(answer.packets):
            if number == answer.held and answer.hold is not None and not self._wait(connection, answer.hold):
                return False
            framed = b"%x\r\n%s\r\n" % (len(packet), packet) if answer.chunked else packet
            if packet:
                connection.sendall(framed)
            time.sleep(answer.pause_s)
        if answer.broken:
            return False
        if answer.chunked:
            connection.sendall(b"0\r\n\r\n")
        return True

    def _wait(self, connection: socket.socket, hold: threading.Event) -> bool:
        """Whether the client is still there once the test lets go."""
        connection.settimeout(0.02)
        while not hold.is_set():
            try:
                if connection.recv(1, socket.MSG_PEEK) == b"":
                    self.left.set()
                    return False
            except TimeoutError:
                continue
            except OSError:
                self.left.set()
                return False
        connection.settimeout(None)
        return True


def _read(stream: Any) -> Asked | None:
    line = stream.readline()
    if not line:
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers: list[tuple[bytes, bytes]] = []
    while (line := stream.readline().rstrip(b"\r\n")) != b"":
        name, _, value = line.partition(b":")
        headers.append((name, value.strip()))
    size = next((int(v) for k, v in headers if k.lower() == b"content-length"), 0)
    return Asked(method, target, headers, stream.read(size))
