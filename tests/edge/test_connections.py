"""Connections: heads too large or too slow, and clients who hold many, ask for nothing or take nothing."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from tests.fakes.proxies.served import Served

from rollbook.edge import connections
from rollbook.edge.connections import Connections, bounded_http, connections_for

LARGE = b"x" * (8 << 20)
waited = threading.Event()
"""What `/wait` waits for, and not longer than its test."""


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Says how long its body was; `/refuse` without reading it, `/large` sends much, `/wait` waits."""
    if scope["type"] != "http":
        return
    size, more = 0, scope["path"] != "/refuse"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/wait":
        while not waited.is_set():
            await asyncio.sleep(0.01)
    body = LARGE if scope["path"] == "/large" else b"%d" % size
    length = (b"content-length", b"%d" % len(body))
    status = 413 if scope["path"] == "/refuse" else 200
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class Bounded:
    """A server of that application in this process, and what it refused."""

    def __init__(self, most: int) -> None:
        self.refused: Counter[str] = Counter()
        places = Connections(most, lambda code: self.refused.update([code]))
        http: Any = bounded_http(places)
        config = uvicorn.Config(application, port=0, http=http, ws="none", log_level="critical")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def connect(self, data: bytes = b"") -> socket.socket:
        """A connection that has sent something."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        return client

    def ask(self, data: bytes) -> tuple[int, Any]:
        """(status, body) of what is answered; the connection is closed by the server."""
        with self.connect(data) as client:
            return answer(client)

    def get(self) -> int:
        """The status of an honest request on a connection of its own."""
        return httpx.get(f"http://127.0.0.1:{self.port}/").status_code

    def stop(self) -> None:
        """Stop it."""
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


def answer(client: socket.socket) -> tuple[int, Any]:
    """(status, body), read until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), orjson.loads(body) if body else None


@pytest.fixture
def bounded() -> Iterator[Callable[..., Bounded]]:
    """Makes servers; stops them."""
    servers: list[Bounded] = []
    waited.clear()

    def make(most: int = 100) -> Bounded:
        servers.append(Bounded(most))
        return servers[-1]

    yield make
    waited.set()
    for server in servers:
        server.stop()


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (GET + b"a: %s\r\n" % (b"x" * 70_000) + b"\r\n", 431, "head_too_large"),
        (GET + b"a: %s" % (b"x" * 200_000), 431, "head_too_large"),
        (GET + b"".join(b"h%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431, "too_many_headers"),
        (
            GET + b"".join(b"h%d: %s\r\n" % (i, b"x" * 900) for i in range(100)) + b"\r\n",
            431,
            "head_too_large",
        ),
        (b"GET /%s HTTP/1.1\r\n" % (b"x" * 20_000), 414, "url_too_long"),
        (b"no HTTP at all\r\n\r\n", 400, "bad_http"),
    ],
)
def test_a_head_beyond_its_bounds(
    bounded: Callable[..., Bounded], data: bytes, status: int, code: str
) -> None:
    """It is refused in the API's form before the application hears of it, and counted; others go on."""
    server = bounded()
    got, body = server.ask(data)
    assert (got, body["error"]["code"]) == (status, code)
    assert server.refused == {code: 1}
    assert server.get() == 200


def test_a_head_within_its_bounds(bounded: Callable[..., Bounded]) -> None:
    """A hundred headers, and a large one, byte by byte and pipelined, are what they always were."""
    server = bounded()
    head = GET + b"".join(b"h%d: %s\r\n" % (i, b"x" * 300) for i in range(100)) + b"\r\n"
    with server.connect() as client:
        for i in range(0, len(head), 1000):
            client.sendall(head[i : i + 1000])
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall((GET + b"\r\n") * 3)
        data = b""
        while data.count(b"200 OK") < 3:
            data += client.recv(1000)
    assert not server.refused


def test_a_head_that_does_not_come(bounded: Callable[..., Bounded], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a head is a 408, on a kept connection too; a connection without a byte is closed."""
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    server = bounded()
    silent, slow, kept = server.connect(), server.connect(GET), server.connect(GET + b"\r\n")
    assert kept.recv(1000).startswith(b"HTTP/1.1 200")
    kept.sendall(b"GET / ")
    assert answer(slow)[0] == answer(kept)[0] == 408
    assert silent.recv(10) == b""
    assert server.refused == {"head_too_slow": 2, "idle_connection_closed": 1}


def test_idle_connections_make_place(bounded: Callable[..., Bounded]) -> None:
    """Twenty places and 300 connections that ask for nothing: whoever asks is answered, at once."""
    server = bounded(20)
    working = httpx.Client(base_url=f"http://127.0.0.1:{server.port}")
    assert working.get("/").status_code == 200
    idle = []
    for i in range(300):
        idle.append(server.connect())
        if i % 50 == 0:
            assert working.get("/").status_code == 200
            assert server.get() == 200
    assert len(server.server.server_state.connections) <= 21
    assert working.get("/").status_code == 200
    assert set(server.refused) == {"idle_connection_closed"}
    for client in idle:
        client.close()
    working.close()


def test_where_all_are_busy_a_new_one_is_refused(bounded: Callable[..., Bounded]) -> None:
    """429 for an address that has its share; what runs goes on, and afterwards there is place again."""
    server = bounded(4)
    waiting = [
        server.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") for _ in range(3)
    ]
    time.sleep(0.2)
    status, body = server.ask(GET + b"\r\n")
    assert (status, body["error"]["code"]) == (429, "too_many_connections")
    waited.set()
    assert [answer(client)[0] for client in waiting] == [200] * 3
    assert server.get() == 200


def test_a_reply_that_nobody_takes(bounded: Callable[..., Bounded], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes nothing is let go; who takes a little now and then is not."""
    monkeypatch.setattr(connections, "TAKE_S", 0.5)
    server = bounded()
    request = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
    stuck, slow = server.connect(), server.connect()
    for client in (stuck, slow):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(request)
    taken = 0
    deadline = time.monotonic() + 30
    while not server.refused and time.monotonic() < deadline:
        taken += len(slow.recv(1 << 18))
        time.sleep(0.05)
    assert server.refused == {"reply_not_taken": 1}
    while taken < len(LARGE):
        part = slow.recv(1 << 20)
        assert part
        taken += len(part)
    stuck.close()
    slow.close()


def test_a_body_is_answered_before_it_ends(
    bounded: Callable[..., Bounded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client can read why, and use the connection; who sends for ever is cut off."""
    monkeypatch.setattr(connections, "LINGER_S", 0.3)
    server = bounded()
    head = b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n"
    with server.connect(head) as client:
        client.sendall(b"x" * 300_000)
        assert client.recv(1000).startswith(b"HTTP/1.1 413")
        client.sendall(GET + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    with server.connect(head) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 413")
        assert _cut_off(client)


def _cut_off(client: socket.socket) -> bool:
    """Whether the server ends a connection on which byte after byte is sent."""
    for _ in range(250):
        try:
            client.sendall(b"x")
        except ConnectionError:
            return True
        time.sleep(0.02)
    return False


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "rest",
    [b"1\r\nx\r\n" * 100_000, b"1\r\nx\r\n0\r\na: " + b"x" * 300_000, b"5;" + b"e" * 300_000],
    ids=["tiny chunks", "a trailer", "an extension"],
)
def test_what_is_between_a_bodys_bytes_is_bounded(bounded: Callable[..., Bounded], rest: bytes) -> None:
    """Chunks of a byte, endless trailers and extensions end the connection."""
    server = bounded()
    with server.connect(CHUNKED) as client, contextlib.suppress(ConnectionError):
        client.sendall(rest)
        while client.recv(1000):
            pass
    assert server.refused == {"head_too_large": 1}
    honest = b"".join(b"%x\r\n%s\r\n" % (1000, b"x" * 1000) for _ in range(300)) + b"0\r\nt: 1\r\n\r\n"
    with server.connect(CHUNKED + honest) as client:
        assert client.recv(1000).endswith(b"300000")


def test_pipelining_is_bounded(bounded: Callable[..., Bounded]) -> None:
    """Ten thousand requests at once on one connection are not kept."""
    server = bounded()
    with server.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        time.sleep(0.1)
        with contextlib.suppress(ConnectionError):
            client.sendall((GET + b"\r\n") * 10_000)
            while client.recv(1000):
                pass
    assert server.refused == {"too_many_pipelined": 1}
    assert server.get() == 200


def test_how_many_connections_there_may_be() -> None:
    """Some descriptors are left for files, and one for each connection to an engine."""
    assert connections_for(1024, 1, None) == 768
    assert connections_for(1024, 2, None) == 384
    assert connections_for(100, 1, None) == 75
    assert connections_for(2**20, 2, None) == 8192
    assert connections_for(2**20, 1, 50) == 50
    assert connections_for(2, 2, None) == 1


def test_descriptors_are_not_exhausted(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
    """300 descriptors, 1,100 connections that ask for nothing: agents are answered and recorded meanwhile."""
    arguments = ["--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"]
    server = serve(*arguments, descriptors=300)
    idle = []
    with httpx.Client(base_url=server.url, timeout=20) as http:
        for i in range(1100):
            idle.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            if i % 200 == 0:
                body = {"messages": [{"role": "user", "content": "hi"}]}
                path = f"/t/agent-{i}/v1/chat/completions"
                assert http.post(path, json=body).status_code == 200
                assert httpx.post(server.url + path, json=body, timeout=20).status_code == 200
                assert http.post(f"/v1/trajectories/agent-{i}/finish", json={}).status_code == 200
        metrics = http.get("/metrics").text
        assert 'rollbook_refusals_total{code="idle_connection_closed"}' in metrics
    for client in idle:
        client.close()
    assert "Traceback" not in server.log.read_text()


def test_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service starts with 1,024 descriptors though it may have more."""
    seen: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: seen.append(limits))
    assert connections.raise_descriptors() == 4096
    assert seen == [(4096, 4096)]
