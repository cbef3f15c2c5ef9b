"""Connections that go from worker to worker: no byte is lost, doubled or answered by the wrong one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rollbook.edge import connections
from rollbook.edge.connections import Connections
from rollbook.ingest.cluster.bus import Bus, Inboxes
from rollbook.ingest.cluster.shared_connections import (
    ElsewhereError,
    give_away,
    shared_http,
    take_connections,
)
from rollbook.ingest.cluster.siblings import Siblings
from rollbook.ingest.trajectories.place import Place, owner_of

OF = {number: next(f"n{i}" for i in range(99) if owner_of(f"n{i}", 2) == number) for number in range(2)}
"""A name of each worker's."""


class Worker:
    """A server in a thread; it says who it is, and what it was sent."""

    def __init__(self, number: int, inboxes: Inboxes, listener: socket.socket, most: int) -> None:
        self.refused: Counter[str] = Counter()
        self.place = Place(number, 2)
        self.siblings = Siblings(self.place, Bus(self.place, inboxes))
        places = Connections(most, lambda code: self.refused.update([code]))
        self.app = Starlette(exception_handlers={ElsewhereError: give_away})
        for path in ("/t/{name}/v1/x", "/v1/x", "/v1/elsewhere"):
            self.app.add_route(path, self.answer, methods=["GET", "POST"])
        http: Any = shared_http(places, self.siblings)
        config = uvicorn.Config(self.app, http=http, ws="none", log_level="critical", lifespan="off")
        self.server = Server(config)
        self.server.worker = self
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()

    async def answer(self, request: Request) -> Response:
        """Who answers, and the length and sum of the body; `/v1/elsewhere` knows whose it is by its body."""
        body = await request.body()
        if request.url.path == "/v1/elsewhere" and not self.place.owns(body[:9].decode().strip()):
            raise ElsewhereError(1 - self.place.number, body)
        data = orjson.dumps([self.place.number, len(body), sum(body), request.headers.get("x-mark")])
        if request.headers.get("x-stream"):

            async def pieces() -> Any:
                for byte in data:
                    yield bytes([byte])
                    await asyncio.sleep(0.002)

            return StreamingResponse(pieces())
        return Response(data)


class Server(uvicorn.Server):
    """uvicorn's, with a bus."""

    worker: Worker

    async def startup(self, sockets: Any = None) -> None:
        """Begin."""
        self.lifespan.state = getattr(self.lifespan, "state", {})
        take_connections(self, self.worker.siblings)
        self.worker.siblings.bus.start()
        await super().startup(sockets)


class Pair:
    """Two workers; a connection begins at the first, so that it is known where it is."""

    def __init__(self, most: int = 100) -> None:
        inboxes = Inboxes.made(2)
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.port = listeners[0].getsockname()[1]
        self.workers = [Worker(number, inboxes, listeners[number], most) for number in range(2)]
        while not all(worker.server.started for worker in self.workers):
            time.sleep(0.005)

    def connect(self) -> Client:
        """A connection, to the first worker."""
        return Client(self.port)

    def stop(self) -> None:
        """Stop both."""
        for worker in self.workers:
            worker.server.should_exit = worker.server.force_exit = True
        for worker in self.workers:
            worker.thread.join(20)
            assert not worker.thread.is_alive()


class Client:
    """A connection of a client."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def read(self) -> tuple[int, Any]:
        """(status, JSON) of the next reply."""
        status = int(self.file.readline().split()[1])
        fields = {}
        while line := self.file.readline().strip():
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip()
        if fields.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(self.file.readline(), 16):
                body += self.file.read(size)
                self.file.readline()
            self.file.readline()
        else:
            body = self.file.read(int(fields[b"content-length"]))
        return status, orjson.loads(body)

    def close(self) -> None:
        """Close it."""
        self.file.close()
        self.socket.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs of workers."""
    pairs: list[Pair] = []

    def make(**options: Any) -> Pair:
        pairs.append(Pair(**options))
        return pairs[-1]

    yield make
    for workers in pairs:
        workers.stop()


def request(number: int, body: bytes = b"", *more: bytes, chunks: int = 0, mark: str = "m") -> bytes:
    """A request that is a worker's, with its body in chunks of a size perhaps."""
    head = [b"POST /t/%s/v1/x HTTP/1.1" % OF[number].encode(), b"host: x", b"x-mark: " + mark.encode(), *more]
    if not chunks:
        return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])
    parts = [body[i : i + chunks] for i in range(0, len(body), chunks)]
    framed = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"\r\n".join([*head, b"transfer-encoding: chunked", b"", framed + b"0\r\n\r\n"])


def told(number: int, body: bytes = b"", mark: str = "m") -> tuple[int, Any]:
    """What its worker says."""
    return 200, [number, len(body), sum(body), mark]


def test_a_connection_alternates(pair: Callable[..., Pair]) -> None:
    """Each request on a kept connection is answered by its own worker, streamed or not."""
    both = pair()
    client = both.connect()
    for turn in range(20):
        more = [b"x-stream: 1"] if turn % 5 == 4 else []
        client.send(request(turn // 2 % 2, b"%d" % turn, *more, mark=f"{turn}"))
        assert client.read() == told(turn // 2 % 2, b"%d" % turn, f"{turn}")
    client.close()
    time.sleep(0.1)
    assert [len(worker.server.server_state.connections) for worker in both.workers] == [0, 0]
    assert not any(worker.refused for worker in both.workers)


def test_pipelined_requests_are_answered_in_order(pair: Any) -> None:
    """Also where the next is another worker's, or its chunks hold empty lines, or it comes byte by byte."""
    client = pair().connect()
    draw = random.Random(5)
    bodies = [b"a\r\n\r\n0\r\n\r\nb" * draw.randint(0, 40) for _ in range(30)]
    data = [
        request(draw.randint(0, 1), body, chunks=draw.choice([0, 7, 500]), mark=f"{turn}")
        for turn, body in enumerate(bodies)
    ]
    owners = [0 if OF[0].encode() in raw.splitlines()[0] else 1 for raw in data]
    for size in (1 << 20, 1, 11):
        whole = b"".join(data[: 4 if size == 1 else 30])
        sender = threading.Thread(
            target=lambda whole=whole, size=size: [
                client.send(whole[i : i + size]) for i in range(0, len(whole), size)
            ]
        )
        sender.start()
        for turn in range(4 if size == 1 else 30):
            assert client.read() == told(owners[turn], bodies[turn], f"{turn}")
        sender.join()
    client.close()


@pytest.mark.parametrize("chunks", [0, 60_000])
def test_large_bodies(pair: Callable[..., Pair], chunks: int) -> None:
    """They come whole, and the request behind them too."""
    client = pair().connect()
    body = random.Random(1).randbytes(5 << 20)
    for number in (1, 0, 1):
        sender = threading.Thread(
            target=client.send, args=[request(number, body, chunks=chunks) + request(1 - number)]
        )
        sender.start()
        assert client.read() == told(number, body)
        assert client.read() == told(1 - number)
        sender.join()
    client.close()


def test_what_a_body_says(pair: Callable[..., Pair]) -> None:
    """A request whose body says whose it is goes there whole, with what came behind it."""
    client = pair().connect()
    head = b"POST /v1/elsewhere HTTP/1.1\r\nhost: x\r\nx-mark: m\r\n"
    for size in (10, 3_000_000):
        for number in (1, 1, 0, 1):
            body = f"{OF[number]:9}".encode() + b"x" * size
            whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
            sender = threading.Thread(target=client.send, args=[whole + request(0) + whole])
            sender.start()
            assert [client.read() for _ in range(3)] == [told(number, body), told(0), told(number, body)]
            sender.join()
    body = f"{OF[1]:9}".encode()
    client.send(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
    assert client.file.readline() == b"HTTP/1.1 100 Continue\r\n"
    client.file.readline()
    client.send(body)
    assert client.read() == told(1, body)
    client.close()


def test_bounds_hold_wherever_a_connection_is(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow, a large and a broken head are refused, before and after a connection went to another worker."""
    both = pair()
    for first in (None, 1):
        for data, status, code in (
            (b"GET / HTTP/1.1\r\na: %s\r\n\r\n" % (b"x" * 70_000), 431, "head_too_large"),
            (b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 20_000), 414, "url_too_long"),
            (b"none\r\n\r\n", 400, "bad_http"),
        ):
            client = both.connect()
            if first is not None:
                client.send(request(first))
                assert client.read() == told(first)
            with contextlib.suppress(ConnectionError):
                client.send(data)
            got, body = client.read()
            assert (got, body["error"]["code"]) == (status, code)
            client.close()
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    client = both.connect()
    client.send(request(1)[:-30])
    assert client.read()[0] == 408
    client.close()
    assert both.workers[1].refused == {"head_too_large": 1, "url_too_long": 1, "bad_http": 1}


def test_a_full_worker_refuses(pair: Callable[..., Pair]) -> None:
    """A connection counts where it is: a worker whose places are all busy refuses one that is given to it."""
    both = pair(most=2)
    held = both.connect()
    held.send(request(1, b"x" * 9)[:-3])  # busy: its body is not whole
    time.sleep(0.2)
    client = both.connect()
    client.send(request(1))
    status, body = client.read()
    assert (status, body["error"]["code"]) == (429, "too_many_connections")
    assert both.workers[1].refused["too_many_connections"] == 1
    held.send(b"xxx")
    assert held.read() == told(1, b"x" * 9)
    held.close()
    client.close()


def test_a_worker_that_is_away_is_waited_for(pair: Callable[..., Pair]) -> None:
    """What was sent to it is answered when it takes messages again."""
    both = pair()
    away = both.workers[1]
    loop: Any = away.server.servers[0].get_loop()
    loop.call_soon_threadsafe(away.siblings.bus.stop)
    clients = [both.connect() for _ in range(60)]
    for client in clients:
        client.send(request(1, b"x" * 20_000))
    time.sleep(0.3)
    loop.call_soon_threadsafe(away.siblings.bus.start)
    for client in clients:
        assert client.read() == told(1, b"x" * 20_000)
        client.close()
