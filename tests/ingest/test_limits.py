"""Limits: how large a body may be, how many are read and answered at once."""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any

import httpx
import orjson
import pytest
from streamed import KINDS, PATHS, asked

from rollbook.ingest.body_room import BodyRoom
from rollbook.ingest.options import ProxyOptions
from rollbook.store.errors import RequestError

MOST = 4096
CHAT = PATHS["chat"]


@pytest.fixture(scope="module")
def small(played: Any) -> Any:
    """A proxy for small bodies, two at a time."""
    return played(options=ProxyOptions(max_body_bytes=MOST, max_running=2))


OTHERS = [f"/v1/trajectories{rest}" for rest in ("", "/x/finish", "/x/rewards", "/x/labels")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_is_too_large_is_a_413(small: Any, kind: str) -> None:
    """In the API's own form, final, whether its size was declared or not; one byte less is taken."""
    body = orjson.dumps(asked(kind, "x", user=""))
    body = orjson.dumps(asked(kind, "x", user="y" * (MOST - len(body))))
    assert len(body) == MOST
    path = f"/t/size-{kind}{PATHS[kind]}"
    assert small.ask(path, body).status == 200
    for length in (str(MOST + 1), ""):
        headers = (
            {"content-length": length} if length else {"content-length": "", "transfer-encoding": "chunked"}
        )
        reply = small.ask(path, body + b" ", headers=headers)
        assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")
        assert reply.headers["x-should-retry"] == "false"
        if kind == "messages":
            assert reply.json["error"]["type"] == "request_too_large"
    assert len(small.trajectories()[f"size-{kind}"].turns) == 1


@pytest.mark.parametrize("path", [*OTHERS, "/v1/messages/count_tokens"])
def test_every_route_has_the_limit(small: Any, path: str) -> None:
    """Also those that take little: nobody fills the memory through them."""
    reply = small.ask(path, b'{"id": "' + b"x" * MOST + b'"}')
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")


def test_more_than_max_running_are_sent_away(small: Any) -> None:
    """429 at once, worth trying again; who ends makes room, however it ended."""
    engine = small.engine
    engine.prompts.clear()
    engine.pace = asyncio.Semaphore(0)

    async def scenario() -> Any:
        running = [small.exchange(f"/t/run-{i}{CHAT}", asked("chat", stream=bool(i))) for i in range(2)]
        await running[0].until(lambda: len(engine.prompts) == 2)
        refused = [await small.exchange(f"/t/run-{kind}{PATHS[kind]}", asked(kind)).end() for kind in KINDS]
        running[0].leave()
        await running[0].end()
        bad = await small.exchange(f"/t/bad{CHAT}", b"{").end()
        later = small.exchange(f"/t/run-later{CHAT}", asked("chat"))
        for _ in range(99):
            engine.pace.release()
        return refused, bad, await running[1].end(), await later.end()

    refused, bad, other, later = small.run(scenario())
    engine.pace = None
    for kind, reply in zip(KINDS, refused, strict=True):
        assert (reply.status, reply.json["error"]["code"]) == (429, "too_many_requests")
        assert reply.json["error"]["type"] == "rate_limit_error"
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["x-should-retry"] == "true"
        assert f"run-{kind}" not in small.trajectories()
    assert (bad.status, other.status, later.status) == (400, 200, 200)
    for number in range(5):
        assert small.ask(f"/t/bad{CHAT}", b"{").status == 400, number
    assert small.ask(f"/t/after{CHAT}", asked("chat")).status == 200


# Room for bodies ------------------------------------------------------------------------------------


class Upload:
    """A request whose body comes when the test says."""

    def __init__(self, size: int, declared: bool = True) -> None:
        self.headers = {"content-length": str(size)} if declared else {}
        self.size, self.send = size, asyncio.Event()
        self.reading = self.done = False

    async def stream(self) -> Any:
        """The body."""
        self.reading = True
        await self.send.wait()
        yield b"x" * self.size

    async def run(self, room: BodyRoom, leave: asyncio.Event) -> bytes:
        """Read it, and keep it until `leave`."""
        async with room.body(self) as raw:  # type: ignore[arg-type]
            await leave.wait()
            self.done = True
            return raw


@pytest.mark.parametrize("declared", [True, False])
def test_many_large_bodies_are_taken_in_turn(declared: bool) -> None:
    """Never more bytes in memory than allowed; everybody gets in."""
    size, most = 100, 350
    leave, inside = asyncio.Event(), []

    async def scenario() -> list[bytes]:
        room = BodyRoom(ProxyOptions(max_body_bytes=size, max_bodies_bytes=most))
        uploads = [Upload(size, declared) for _ in range(20)]
        tasks = [asyncio.create_task(u.run(room, leave)) for u in uploads]
        for upload in uploads:
            upload.send.set()
        await asyncio.sleep(0.01)
        inside.append(sum(u.reading for u in uploads))
        leave.set()
        return await asyncio.gather(*tasks)

    bodies = asyncio.run(scenario())
    assert inside == [3]
    assert [len(b) for b in bodies] == [size] * 20


def test_room_comes_back_however_a_body_ends() -> None:
    """Read, refused, cancelled or broken off: what it took is given back."""

    async def scenario() -> None:
        room = BodyRoom(ProxyOptions(max_body_bytes=100, max_bodies_bytes=100))
        leave = asyncio.Event()
        leave.set()
        for ending in itertools.islice(itertools.cycle(["too large", "cancelled", "fails", "fine"]), 12):
            upload = Upload(101 if ending == "too large" else 100, declared=ending != "too large")
            task = asyncio.create_task(upload.run(room, leave))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if ending == "cancelled":
                task.cancel()
            if ending == "fails":
                upload.size = "no"  # type: ignore[assignment]
            upload.send.set()
            [result] = await asyncio.gather(task, return_exceptions=True)
            kinds = {
                "too large": RequestError,
                "cancelled": asyncio.CancelledError,
                "fails": TypeError,
                "fine": bytes,
            }
            assert isinstance(result, kinds[ending]), ending

    asyncio.run(scenario())


def test_a_body_larger_than_all_room_is_taken_alone() -> None:
    """Limits that contradict each other lock nobody out."""

    async def scenario() -> int:
        room = BodyRoom(ProxyOptions(max_body_bytes=100, max_bodies_bytes=10))
        leave, upload = asyncio.Event(), Upload(100)
        leave.set()
        upload.send.set()
        return len(await upload.run(room, leave))

    assert asyncio.run(scenario()) == 100


def test_a_burst_of_large_bodies(played: Any) -> None:
    """64 of 500 kB at once, room for four: all are answered, and each is in the log as it was sent."""
    proxy = played(options=ProxyOptions(max_bodies_bytes=2 * 2**20))

    async def scenario() -> Any:
        sent = [
            proxy.exchange(f"/t/burst-{i}{CHAT}", asked("chat", user=f"{i:03}" * 170_000)) for i in range(64)
        ]
        return [await one.end() for one in sent]

    assert {reply.status for reply in proxy.run(scenario())} == {200}
    found = proxy.trajectories()
    for i in range(64):
        (turn,) = found[f"burst-{i}"].turns.values()
        assert turn.requested.request["user"] == f"{i:03}" * 170_000


# Over TCP -------------------------------------------------------------------------------------------


def test_lengths_that_are_none_end_the_request(serve: Any, text_model: Any, script: Any) -> None:
    """A Content-Length that is no number, or a head that is no HTTP: 400, and the server lives on."""
    server = serve(
        *("--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"),
        *("--max-body-mb", "0.01"),
    )
    for length in ("-1", "1e3", "²", "0x10", "9" * 5000, "99999999999999999999"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
            sock.sendall(head.encode())
            answer = sock.recv(1000)
        assert answer.split(b" ")[1:2] in ([b"400"], [b"413"]), (length, answer)
    with httpx.Client(base_url=server.url) as http:
        large = http.post(CHAT, content=b'{"user": "' + b"x" * 20_000 + b'"}')
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        pieces = http.post(CHAT, content=(b"x" * 4000 for _ in range(9)))
        assert pieces.status_code == 413
        assert http.get("/healthz").status_code == 200
    assert "Traceback" not in server.log.read_text()
