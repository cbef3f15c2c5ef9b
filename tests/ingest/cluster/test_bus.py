"""Messages between workers: each arrives once, or waits for a worker that is away."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollbook.ingest.cluster import bus as module
from rollbook.ingest.cluster.bus import AwayError, Bus, Inboxes
from rollbook.ingest.trajectories.place import Place
from rollbook.store.errors import RequestError


async def _twice(_: int, __: int, question: Any) -> tuple[Any, bytes]:
    if "error" in question:
        raise RequestError(409, "no", question["error"])
    if "bug" in question:
        raise KeyError("bug")
    return {"twice": 2 * question["number"]}, b"x" * question.get("bytes", 0)


def run(scenario: Callable[[Bus, Bus], Awaitable[Any]]) -> None:
    """Run it with two workers; the second answers `twice`."""

    async def whole() -> None:
        inboxes = Inboxes.made(2)
        bus, other = (Bus(Place(number, 2), inboxes) for number in range(2))
        other.on("twice", _twice)
        await scenario(bus, other)

    asyncio.run(whole())


def test_answers_and_errors() -> None:
    """Few bytes and many; errors come as they were raised, and a bug as a 500."""

    async def scenario(bus: Bus, other: Bus) -> None:
        with bus.running(), other.running():
            for size in (0, 10, 5 << 20):
                words, data = await bus.ask(1, "twice", {"number": 4, "bytes": size})
                assert words == {"twice": 8}
                assert data == b"x" * size
            answers = await asyncio.gather(*(bus.ask(1, "twice", {"number": n}) for n in range(3000)))
            assert [words["twice"] for words, _ in answers] == [2 * n for n in range(3000)]
            with pytest.raises(RequestError, match="because") as raised:
                await bus.ask(1, "twice", {"error": "because"})
            assert (raised.value.status, raised.value.code) == (409, "no")
            with pytest.raises(RequestError, match="KeyError") as raised:
                await bus.ask(1, "twice", {"bug": 1})
            assert raised.value.status == 500
            assert await bus.ask_all("twice", {"number": 1}) == {1: ({"twice": 2}, b"")}

    run(scenario)


def test_a_worker_that_is_away() -> None:
    """A question waits for it, and is asked again of one that took it and died before it answered."""

    async def scenario(bus: Bus, other: Bus) -> None:
        numbers: list[int] = []

        async def never(_: int, number: int, __: Any) -> tuple[Any, bytes]:
            numbers.append(number)
            await asyncio.sleep(60)
            raise AssertionError

        async def at_last(_: int, number: int, __: Any) -> tuple[Any, bytes]:
            numbers.append(number)
            return {"done": True}, b""

        with bus.running():
            with pytest.raises(AwayError):
                await bus.ask(1, "slow", {}, 0.05)
            waiting = asyncio.create_task(bus.ask(1, "slow", {}, 10.0))
            other.on("slow", never)
            other.start()
            while len(numbers) < 2:
                await asyncio.sleep(0.01)
            other.stop()  # it dies
            again = Bus(other.place, other.inboxes)
            again.on("slow", at_last)
            begun: list[int] = []
            bus.on_begun(begun.append)
            with again.running():
                assert await waiting == ({"done": True}, b"")
            assert begun == [1]
            assert {*numbers[1:]} == {numbers[-1]} != {numbers[0]}

    run(scenario)


def test_descriptors_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection's descriptor arrives with what was read of it; none is left open here, or of too many."""
    monkeypatch.setattr(module, "MOST_QUEUED", 100)

    async def scenario(bus: Bus, other: Bus) -> None:
        received: list[tuple[int, Any, bytes]] = []
        other.on_connection = lambda fd, words, data: received.append((fd, words["settled"], data))
        open_before = len(os.listdir("/proc/self/fd"))
        refused = 0
        for number in range(800):
            mine, theirs = socket.socketpair()
            try:
                data = b"%d" % number * (1 if number % 50 else 9000)
                bus.send(1, {"is": "connection", "settled": number % 2 == 0}, data, mine.detach())
            except AwayError:
                refused += 1
            theirs.close()
        assert refused > 0
        with other.running():
            while len(received) < 800 - refused:
                await asyncio.sleep(0.01)
        for number, (fd, settled, data) in enumerate(received):
            assert data == b"%d" % number * (1 if number % 50 else 9000)
            assert settled == (number % 2 == 0)
            os.close(fd)
        assert len(os.listdir("/proc/self/fd")) <= open_before

    run(scenario)
