"""Limits: how large a body may be, how many are read and answered at once."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.served import Served
from tests.fakes.proxies.settings import MIB, settings_of

from rollbook.edge import bodies as body_room
from rollbook.edge import memory
from rollbook.edge.bodies import BodyBudget
from rollbook.store.errors import LimitError, RequestError

MOST = 4096
CHAT = PATHS["chat"]


@pytest.fixture(scope="module")
def small(played: Callable[..., InProcess]) -> InProcess:
    """A proxy for small bodies, two at a time."""
    return played(max_body_mb=MOST / MIB, max_running=2)


OF_ONE = ("finish", "rewards", "labels", "launches", "launches/l/end", "launches/l/leaks")
OTHERS = ["/v1/trajectories", "/v1/evaluations", *(f"/v1/trajectories/x/{rest}" for rest in OF_ONE)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_is_too_large_is_a_413(small: InProcess, kind: str) -> None:
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
def test_every_route_has_the_limit(small: InProcess, path: str) -> None:
    """Also those that take little: nobody fills the memory through them."""
    reply = small.ask(path, b'{"id": "' + b"x" * MOST + b'"}')
    assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")


def test_more_than_max_running_are_sent_away(small: InProcess) -> None:
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
    """A request whose body comes when the test says, in parts of `PART_BYTES`."""

    def __init__(self, size: int, client: str = "a", declared: bool = True) -> None:
        self.headers = {"content-length": str(size)} if declared else {}
        self.client = SimpleNamespace(host=client)
        self.left, self.parts = size, asyncio.Semaphore(0)
        self.done = self.waited_for = False

    def send(self, parts: int = 1000) -> None:
        """Let so many parts come."""
        for _ in range(parts):
            self.parts.release()

    async def receive(self) -> Any:
        """The next part."""
        self.waited_for = True
        await self.parts.acquire()
        self.waited_for = False
        if self.left is None:
            raise TypeError("no number")
        size = min(self.left, body_room.PART_BYTES)
        self.left -= size
        return {"type": "http.request", "body": b"x" * size, "more_body": self.left > 0}

    async def run(self, room: BodyBudget, leave: asyncio.Event) -> bytes:
        """Read it, and keep it until `leave`."""
        async with room.body(self) as raw:  # type: ignore[arg-type]
            self.done = True
            await leave.wait()
            return raw


PART = body_room.PART_BYTES
SIZE = 10 * PART


def _room(bodies: int) -> BodyBudget:
    """Room for so many bodies of `SIZE`, and for one beyond."""
    return BodyBudget(SIZE, (bodies + 1) * SIZE, free=0)


async def _settled() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


@pytest.mark.parametrize("declared", [True, False])
def test_many_large_bodies_are_taken_in_turn(declared: bool) -> None:
    """Never more bytes in memory than allowed, though all send at once; everybody gets in."""

    async def scenario() -> tuple[int, list[bytes]]:
        room, leave = _room(3), asyncio.Event()
        uploads = [Upload(SIZE, f"{i % 4}", declared) for i in range(20)]
        tasks = [asyncio.create_task(u.run(room, leave)) for u in uploads]
        for upload in uploads:
            upload.send()
        await asyncio.sleep(0.05)
        held = sum(SIZE - u.left for u in uploads)
        leave.set()
        return held, await asyncio.gather(*tasks)

    held, bodies = asyncio.run(scenario())
    assert 3 * SIZE <= held <= 4 * SIZE
    assert [len(b) for b in bodies] == [SIZE] * 20


def test_what_is_only_declared_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many connections declare the largest body and send nothing: others are read at once."""

    async def scenario() -> bytes:
        room, leave = _room(2), asyncio.Event()
        leave.set()
        idle = [asyncio.create_task(Upload(SIZE).run(room, leave)) for _ in range(50)]
        await _settled()
        honest = Upload(SIZE, "b")
        honest.send()
        async with asyncio.timeout(30):
            raw = await honest.run(room, leave)
        for task in idle:
            task.cancel()
        return raw

    assert len(asyncio.run(scenario())) == SIZE


def test_room_is_lost_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fills the room with halves of bodies and stops is turned out with a 408 once others wait for it."""
    monkeypatch.setattr(body_room, "PRESSED_S", 0.1)

    async def scenario() -> tuple[list[Any], bytes]:
        room, leave = _room(2), asyncio.Event()
        leave.set()
        halves = [Upload(SIZE, f"{i}") for i in range(6)]
        tasks = [asyncio.create_task(u.run(room, leave)) for u in halves]
        for half in halves:
            half.send(5)
        await _settled()
        honest = Upload(SIZE, "honest")
        honest.send()
        async with asyncio.timeout(30):
            raw = await honest.run(room, leave)
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True), raw

    ends, raw = asyncio.run(scenario())
    assert len(raw) == SIZE
    refused = [e for e in ends if isinstance(e, LimitError)]
    assert refused
    assert {(e.status, e.code) for e in refused} == {(408, "body_too_slow")}


def test_all_begun_and_none_whole_come_to_their_end() -> None:
    """Bodies that fill all room together, each with a part of it, are finished one after another."""

    async def scenario() -> list[bytes]:
        room, leave = _room(2), asyncio.Event()
        leave.set()
        uploads = [Upload(SIZE, f"{i}") for i in range(30)]
        tasks = [asyncio.create_task(u.run(room, leave)) for u in uploads]
        for _ in range(SIZE // PART):
            for upload in uploads:
                upload.send(1)
            await _settled()
        return await asyncio.wait_for(asyncio.gather(*tasks), 30)

    assert [len(b) for b in asyncio.run(scenario())] == [SIZE] * 30


def test_who_waits_for_room_when_the_proxy_ends() -> None:
    """It is told to come again, and so is who comes; what has its room is read on."""

    async def scenario() -> list[Any]:
        room, leave = _room(2), asyncio.Event()
        uploads = [Upload(SIZE, f"{i}") for i in range(4)]
        tasks = [asyncio.create_task(u.run(room, leave)) for u in uploads]
        for upload in uploads:
            upload.send()
        await _settled()
        room.stop()
        uploads.append(Upload(SIZE, "late"))
        uploads[-1].send()
        tasks.append(asyncio.create_task(uploads[-1].run(room, leave)))
        await _settled()
        leave.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ends = asyncio.run(scenario())
    assert sorted(type(end).__name__ for end in ends) == ["EndingError"] * 2 + ["bytes"] * 3


def test_one_address_leaves_room_for_others() -> None:
    """Bodies of one address that are all being answered leave a quarter of the room."""

    async def scenario() -> bool:
        room, leave = _room(4), asyncio.Event()
        greedy = [Upload(SIZE, "greedy") for _ in range(9)]
        tasks = [asyncio.create_task(u.run(room, leave)) for u in greedy]
        for upload in greedy:
            upload.send()
        await asyncio.sleep(0.05)
        assert sum(u.done for u in greedy) == 4  # three in the room and one beyond
        other = Upload(SIZE // 2, "other")
        other.send()
        tasks.append(asyncio.create_task(other.run(room, leave)))
        await asyncio.sleep(0.05)
        done = other.done
        leave.set()
        await asyncio.gather(*tasks)
        return done

    assert asyncio.run(scenario())


@pytest.mark.parametrize("sent", [0, 3])
def test_a_silent_sender_is_a_408(sent: int) -> None:
    """Nobody waits for the rest of a body for ever."""

    async def scenario() -> None:
        settings = settings_of(max_body_mb=SIZE / MIB, max_bodies_mb=4 * SIZE / MIB, body_timeout_s=0.1)
        leave, upload = asyncio.Event(), Upload(SIZE)
        leave.set()
        upload.send(sent)
        await upload.run(BodyBudget(**settings.body_limits), leave)

    with pytest.raises(LimitError, match=f"{sent * PART} bytes of the body came in 0 s") as caught:
        asyncio.run(scenario())
    assert (caught.value.status, caught.value.code) == (408, "body_too_slow")


def test_a_trickle_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a little just before the time is over does not go on so for ever."""
    monkeypatch.setattr(body_room, "PACE", 100 * PART)

    async def scenario() -> float:
        settings = settings_of(max_body_mb=SIZE / MIB, max_bodies_mb=4 * SIZE / MIB, body_timeout_s=0.2)
        leave, upload = asyncio.Event(), Upload(SIZE)
        task = asyncio.create_task(upload.run(BodyBudget(**settings.body_limits), leave))
        begun = time.monotonic()
        while not task.done():
            upload.send(1)
            await asyncio.sleep(0.1)
        assert isinstance(task.exception(), LimitError)
        return time.monotonic() - begun

    assert asyncio.run(scenario()) < 20


def test_routes_that_read_by_themselves_have_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that stops is over for them; one that comes, and what is heard after it, is as ever."""
    seen: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            seen.append((await receive())["type"])

    async def scenario(path: str, parts: int) -> None:
        upload = Upload(2 * PART)
        upload.send(parts)
        paced = body_room.PacedBodies(application, "/engine", 0.05)
        async with asyncio.timeout(0.3):
            await paced({"type": "http", "path": path}, upload.receive, None)

    with pytest.raises(TimeoutError):  # after its last part nothing is hurried: it is when a client leaves
        asyncio.run(scenario("/engine/x", 2))
    assert seen == ["http.request"] * 2
    seen.clear()
    asyncio.run(scenario("/engine/x", 1))
    assert seen == ["http.request", "http.disconnect", "http.disconnect"]
    seen.clear()
    with pytest.raises(TimeoutError):
        asyncio.run(scenario("/v1/x", 1))
    assert seen == ["http.request"]


def test_memory_goes_back_after_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a burst of them, and not for small ones."""
    calls: list[None] = []
    monkeypatch.setattr(body_room, "give_back", lambda: calls.append(None))
    monkeypatch.setattr(memory, "GIVE_BACK_S", 0.05)

    async def scenario(size: int) -> None:
        room, leave = BodyBudget(), asyncio.Event()
        leave.set()
        for _ in range(5):
            upload = Upload(size)
            upload.send()
            await upload.run(room, leave)
        await asyncio.sleep(0.2)

    asyncio.run(scenario(10_000))
    assert calls == []
    asyncio.run(scenario(1 << 20))
    assert calls == [None]


def test_room_comes_back_however_a_body_ends() -> None:
    """Read, refused, cancelled or broken off: what it took is given back."""

    async def scenario() -> None:
        room, leave = _room(1), asyncio.Event()
        leave.set()
        for ending in itertools.islice(itertools.cycle(["too large", "cancelled", "fails", "fine"]), 12):
            upload = Upload(SIZE + 1 if ending == "too large" else SIZE, declared=ending != "too large")
            task = asyncio.create_task(upload.run(room, leave))
            upload.send(5)
            await _settled()
            if ending == "cancelled":
                task.cancel()
            if ending == "fails":
                upload.left = None  # type: ignore[assignment]
            upload.send()
            [result] = await asyncio.gather(task, return_exceptions=True)
            kinds = {
                "too large": RequestError,
                "cancelled": asyncio.CancelledError,
                "fails": TypeError,
                "fine": bytes,
            }
            assert isinstance(result, kinds[ending]), ending
            assert not room._taken
            assert not room._held

    asyncio.run(scenario())


def test_a_body_larger_than_all_room_is_taken_alone() -> None:
    """Limits that contradict each other lock nobody out."""

    async def scenario() -> list[int]:
        room, leave = (
            BodyBudget(SIZE, 10, free=0),
            asyncio.Event(),
        )
        leave.set()
        uploads = [Upload(SIZE) for _ in range(3)]
        for upload in uploads:
            upload.send()
        return [len(raw) for raw in await asyncio.gather(*(u.run(room, leave) for u in uploads))]

    assert asyncio.run(scenario()) == [SIZE] * 3


def test_a_burst_of_large_bodies(played: Callable[..., InProcess]) -> None:
    """64 of 500 kB at once, room for four: all are answered, and each is in the log as it was sent."""
    proxy = played(max_bodies_mb=2)

    async def scenario() -> Any:
        sent = [
            proxy.exchange(f"/t/burst-{i}{CHAT}", asked("chat", user=f"{i:03}" * 170_000)) for i in range(64)
        ]
        return [await exchange.end() for exchange in sent]

    assert {reply.status for reply in proxy.run(scenario())} == {200}
    trajectories = proxy.trajectories()
    for i in range(64):
        (turn,) = trajectories[f"burst-{i}"].turns.values()
        assert turn.requested.request["user"] == f"{i:03}" * 170_000


# Over TCP -------------------------------------------------------------------------------------------


def test_lengths_that_are_none_end_the_request(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
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
