"""One gate for all workers: no more begin than may, and no room is lost with a worker that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fakes.stories.training import RUN, begins, opened

from rollbook.ingest.admission.gate import AdmissionGate
from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.ingest.cluster import admitting
from rollbook.ingest.cluster.admitting import GateServer, RemoteGate
from rollbook.ingest.cluster.bus import Bus, Inboxes
from rollbook.ingest.trajectories.place import Place
from rollbook.store.errors import EndingError, RequestError
from rollbook.store.events import Event, Record

HOLD_S = 0.3


@dataclass
class Live:
    """What a worker knows of a trajectory."""

    opening: Future[int] | None = None


@dataclass
class Workers:
    """A gatekeeper, and a worker that asks it."""

    inboxes: Inboxes = field(default_factory=lambda: Inboxes.made(2))
    log: list[Record] = field(default_factory=list)
    """What is durable; the gatekeeper reads it when it is told to."""
    known: dict[str, Any] = field(default_factory=dict)

    def keeper(self) -> Bus:
        """A first worker that has read the log."""
        bus = Bus(Place(0, 2), self.inboxes)
        self.gate = AdmissionGate(Outstanding(RUN), lambda: None, HOLD_S)
        self.read = 0
        self.catch_up()
        GateServer(self.gate, bus, self.caught_up)
        bus.start()
        return bus

    def asker(self) -> Bus:
        """Another worker."""
        bus = Bus(Place(1, 2), self.inboxes)
        self.far = RemoteGate(bus, self.known.get, HOLD_S)
        bus.start()
        return bus

    def catch_up(self) -> None:
        """The gatekeeper reads the log."""
        new, self.read = self.log[self.read :], len(self.log)
        self.gate.take([Event(record, RUN) for record in new])

    async def caught_up(self) -> None:
        """The same, as it is asked for."""
        self.catch_up()

    def begins(self, name: str) -> None:
        """A trajectory that the worker was let in with is in the log."""
        self.known[name] = Live()
        self.log.append(opened(name))
        self.far.leave(name)


async def never() -> None:
    """Nobody leaves."""
    await asyncio.sleep(60)


async def soon() -> None:
    """Let messages arrive."""
    await asyncio.sleep(0.05)


def run(scenario: Callable[[Workers], Awaitable[Any]]) -> None:
    """Run it."""

    async def whole() -> None:
        workers = Workers(log=[begins(1, 1, 1)])  # two may begin
        await scenario(workers)

    asyncio.run(whole())


async def held(workers: Workers, name: str) -> None:
    """See that a trajectory is not let in."""
    with pytest.raises(RequestError, match="wait for the trainer"):
        await workers.far.enter(name, None, "train", never)


def test_the_bound_holds_before_the_log_is_read() -> None:
    """What a worker began counts all the time: as kept room until the gatekeeper reads it in the log."""

    async def scenario(workers: Workers) -> None:
        keeper, asker = workers.keeper(), workers.asker()
        assert await workers.far.enter("a", None, "train", never)
        assert await workers.gate.enter("b", None, "train", never)
        await held(workers, "c")
        workers.begins("a")
        await soon()
        await held(workers, "c")
        workers.catch_up()
        await held(workers, "c")
        workers.gate.leave("b")  # it did not begin after all
        assert await workers.far.enter("c", None, "train", never)
        assert not await workers.far.enter("e", None, "eval", never)
        keeper.stop()
        asker.stop()

    run(scenario)


def test_a_worker_that_ends_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits long for the first worker's word is told to come again, and keeps no room there."""
    monkeypatch.setattr(admitting, "ANSWERED_S", 0.05)

    async def scenario(workers: Workers) -> None:
        keeper, asker = workers.keeper(), workers.asker()
        for name in ("a", "b"):
            assert await workers.far.enter(name, None, "train", never)
        waiting = asyncio.ensure_future(workers.far.enter("c", None, "train", never))
        await soon()
        workers.far.stop()
        assert not await workers.far.enter("e", None, "eval", never)  # an answer is at hand
        for refused in (waiting, workers.far.enter("d", None, "train", never)):
            with pytest.raises(EndingError):
                await refused
        await soon()
        assert workers.gate.waiting == 0
        keeper.stop()
        asker.stop()

    run(scenario)


def test_what_does_not_begin_gives_its_room_back() -> None:
    """A request that is refused, an opening that does not become durable, a client that leaves."""

    async def scenario(workers: Workers) -> None:
        keeper, asker = workers.keeper(), workers.asker()
        for name in ("a", "b"):
            assert await workers.far.enter(name, None, "train", never)
        workers.far.leave("a")  # unknown: refused
        await soon()
        assert await workers.far.enter("c", None, "train", never)
        opening: Future[int] = Future()
        workers.known["c"] = Live(opening)
        workers.far.leave("c")
        await soon()
        await held(workers, "d")
        opening.set_exception(OSError("disk full"))
        await soon()
        assert await workers.far.enter("d", None, "train", never)
        left = asyncio.Event()
        waiting = asyncio.create_task(workers.far.enter("e", None, "train", left.wait))
        await soon()
        assert workers.gate.waiting == workers.far.waiting == 1
        left.set()
        with pytest.raises(RequestError) as raised:
            await waiting
        assert raised.value.status == 499
        await soon()
        assert workers.gate.waiting == workers.far.waiting == 0
        keeper.stop()
        asker.stop()

    run(scenario)


def test_a_worker_that_dies() -> None:
    """Room that it kept is free, but for what is in the log; what it waited for waits no more."""

    async def scenario(workers: Workers) -> None:
        keeper, asker = workers.keeper(), workers.asker()
        for name in ("a", "b"):
            assert await workers.far.enter(name, None, "train", never)
        waiting = asyncio.create_task(workers.far.enter("c", None, "train", never))
        await soon()
        workers.log.append(opened("a"))  # durable, and then it dies
        asker.stop()
        asker = workers.asker()
        await soon()
        assert workers.gate.waiting == 0
        assert await workers.far.enter("d", None, "train", never)
        await held(workers, "e")
        waiting.cancel()
        keeper.stop()
        asker.stop()

    run(scenario)


def test_a_gatekeeper_that_dies() -> None:
    """The next one is told for whom room is kept, and is asked again by those who waited."""

    async def scenario(workers: Workers) -> None:
        keeper, asker = workers.keeper(), workers.asker()
        for name in ("a", "b"):
            assert await workers.far.enter(name, None, "train", never)
        waiting = asyncio.create_task(workers.far.enter("c", None, "train", never))
        await soon()
        keeper.stop()
        keeper = workers.keeper()
        await soon()
        assert workers.gate.waiting == 1
        workers.far.leave("a")
        assert await waiting
        await held(workers, "d")
        keeper.stop()
        asker.stop()

    run(scenario)
