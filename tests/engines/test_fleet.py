"""Several engines as one: who gets a request, who may get none, and what becomes of those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollbook.engines import fleet as fleets
from rollbook.engines.engine import Generation, Prompt, Sampling
from rollbook.engines.fleet import Fleet
from rollbook.engines.weights.log import OWN
from rollbook.store.errors import EngineError, EngineLostError
from rollbook.store.events import SyncFailed, SyncFinished, SyncStarted, token_ids

SAMPLING = Sampling(8, 1.0, 0)


class Server:
    """An engine that answers when it is told to."""

    name, takes_images = "fake", True

    def __init__(self, version: int | None = None, honoured: str = "stop seed") -> None:
        self.version, self.honoured = version, frozenset(honoured.split())
        self.reachable = True
        self.starts = self.closes = self.verified = 0
        self.strange: str | None = None
        self.running: dict[str, asyncio.Future[Generation]] = {}
        self.aborted: list[str] = []

    async def start(self, activated: Any) -> None:
        self.starts += 1
        if not self.reachable:
            raise EngineLostError("nothing answers")

    async def look(self) -> list[Any]:
        await self.verify()
        return []

    def held(self) -> None:
        return None

    async def verify(self) -> None:
        self.verified += 1
        if not self.reachable:
            raise EngineLostError("nothing answers")

    def unverified(self) -> str | None:
        return self.strange

    def doubtful(self) -> bool:
        return self.strange is not None

    def synced(self, version: int) -> None:
        self.strange = None

    async def close(self) -> None:
        self.closes += 1

    async def ready(self) -> None:
        pass

    async def generate(self, prompt: Prompt, sampling: Sampling, on_tokens: Any) -> Generation:
        answer = self.running[prompt.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self.running[prompt.request_id]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def policy_version(self) -> int | None:
        return self.version

    def failure(self) -> str | None:
        return None

    def control(self) -> None:
        return None

    def ends(self, error: Exception | None = None) -> None:
        """Answer whatever runs."""
        for answer in self.running.values():
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(Generation(token_ids([1]), np.zeros(1, np.float32), (), "stop", {}))


def prompt(request: str, trajectory: str = "") -> Prompt:
    """A request of a trajectory."""
    return Prompt(token_ids([1]), [], None, request, trajectory)


def url(number: int) -> str:
    """Address of a server."""
    return f"http://127.0.0.1:{3000 + number}"


def started(number: int, version: int = 1, sync: str = "s", host: str = "localhost") -> SyncStarted:
    """A trainer begins to write to a server, which it knows by another name of this host."""
    return SyncStarted("actor", version, sync, f"http://{host}:{3000 + number}/", "disk")


def finished(number: int, version: int = 1, sync: str = "s") -> SyncFinished:
    """It is done."""
    return SyncFinished("actor", version, sync, url(number), 1, 0.1)


def failed(number: int, version: int = 1, sync: str = "s") -> SyncFailed:
    """It could not."""
    return SyncFailed("actor", version, sync, url(number), "half of it came")


def run(scenario: Callable[[SimpleNamespace], Awaitable[None]], *servers: Server, lost: int = 0) -> None:
    """Run a scenario with a fleet of these, of which the first `lost` answer only later."""

    async def activated(*_: Any) -> None:
        pass

    async def whole() -> None:
        members = servers or (Server(), Server())
        for server in members[:lost]:
            server.reachable = False
        fleet = Fleet({url(i): server for i, server in enumerate(members)})
        await fleet.start(activated)
        asks: dict[str, asyncio.Task[Generation]] = {}

        async def ask(request: str, trajectory: str = "") -> int | None:
            """Begin a request; which server has it."""
            asks[request] = asyncio.create_task(fleet.generate(prompt(request, trajectory), SAMPLING))
            await pause()
            return next((i for i, member in enumerate(members) if request in member.running), None)

        try:
            await scenario(SimpleNamespace(fleet=fleet, servers=members, ask=ask, asks=asks))
        finally:
            await fleet.close()
            for task in asks.values():
                task.cancel()
            await asyncio.gather(*asks.values(), return_exceptions=True)

    asyncio.run(whole())


async def pause() -> None:
    """Let everybody go on."""
    for _ in range(5):
        await asyncio.sleep(0)


async def opens(fleet: Fleet) -> bool:
    """Whether it lets requests in now."""
    ready = asyncio.create_task(fleet.ready())
    await pause()
    ready.cancel()
    return ready.done() and not ready.cancelled()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are asked often whether they are back."""
    monkeypatch.setattr(fleets, "PROBE_S", 0.01)


# Who gets a request -------------------------------------------------------------------------------


def test_new_trajectories_go_where_the_fewest_run() -> None:
    """Each to the server with the fewest requests then; what has ended does not count."""

    async def scenario(it: Any) -> None:
        assert [await it.ask(f"r{i}", f"t{i}") for i in range(4)] == [0, 1, 0, 1]
        it.servers[1].ends()
        await pause()
        assert [await it.ask(f"s{i}", f"u{i}") for i in range(3)] == [1, 1, 0]

    run(scenario)


def test_a_trajectory_stays_where_it_was() -> None:
    """However much runs there, while that takes requests; else it moves, and stays there."""

    async def scenario(it: Any) -> None:
        assert [await it.ask(f"r{i}", "t") for i in range(3)] == [0, 0, 0]
        it.fleet.on_sync(started(0))
        assert await it.ask("r3", "t") == 1
        it.fleet.on_sync(finished(0))
        assert await it.ask("r4", "t") == 1
        assert await it.ask("r5") == 1, "2 run there, and 3 on the other"

    run(scenario)


def test_the_memory_of_trajectories_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was heard of least lately is forgotten."""
    monkeypatch.setattr(fleets, "STICKY_KEPT", 2)

    async def scenario(it: Any) -> None:
        for name in ("a", "b", "a", "c"):
            await it.ask(f"{name}{len(it.asks)}", name)
        assert list(it.fleet._assigned) == ["a", "c"]

    run(scenario)


def test_an_abort_goes_where_the_request_runs() -> None:
    """And nowhere once it has ended."""

    async def scenario(it: Any) -> None:
        for i in range(2):
            await it.ask(f"r{i}")
        await it.fleet.abort("r1")
        assert [server.aborted for server in it.servers] == [[], ["r1"]]
        it.servers[1].ends()
        await pause()
        await it.fleet.abort("r1")
        assert it.servers[1].aborted == ["r1"]

    run(scenario)


def test_what_a_fleet_says_of_itself() -> None:
    """What all honour; the oldest version that may be asked; the name of the first."""

    async def scenario(it: Any) -> None:
        fleet = it.fleet
        assert (fleet.name, fleet.honoured, fleet.takes_images) == ("fake", frozenset({"seed"}), True)
        assert fleet.policy_version() == 4
        fleet.on_sync(finished(1, 7))
        assert fleet.policy_version() == 5
        fleet.on_sync(failed(0, 7))
        assert fleet.policy_version() == 7
        assert fleet.failure() is None
        fleet.on_sync(failed(1, 8))
        assert fleet.failure() is not None
        assert fleet.failure().count("half of it came") == 2

    run(scenario, Server(5, "stop seed"), Server(4, "seed"))


# Syncs --------------------------------------------------------------------------------------------


def test_a_server_that_is_synced_takes_no_new_requests() -> None:
    """What runs there goes on; while all are synced requests wait; that of another server changes nothing."""

    async def scenario(it: Any) -> None:
        assert await it.ask("r0", "t") == 0
        it.fleet.on_sync(started(0))
        it.fleet.on_sync(started(9, host="elsewhere"))
        assert await it.ask("r1", "u") == 1
        it.fleet.on_sync(started(1))
        assert not await opens(it.fleet)
        assert await it.ask("r2") is None
        assert isinstance(it.asks["r2"].exception(), EngineLostError)
        it.fleet.on_sync(finished(0))
        assert await opens(it.fleet)
        it.servers[0].ends()
        assert (await it.asks["r0"]).finish_reason == "stop"

    run(scenario)


def test_a_sync_that_failed_takes_a_server_out() -> None:
    """What it was answering fails at once and names why; only a whole sync brings it back."""

    async def scenario(it: Any) -> None:
        assert await it.ask("r0", "t") == 0
        assert await it.ask("r1", "u") == 1
        it.fleet.on_sync(started(0))
        it.fleet.on_sync(failed(0, 3))
        await pause()
        error = it.asks["r0"].exception()
        assert isinstance(error, EngineLostError)
        assert "the sync of version 3 failed: half of it came" in str(error)
        assert not it.asks["r1"].done()
        it.fleet.on_sync(started(0, sync="again"))
        assert await it.ask("r2", "t") == 1
        it.fleet.on_sync(finished(0, sync="again"))
        assert await it.ask("r3", "v") == 0
        assert it.servers[0].starts == 1, "its connection was whole all the time"

    run(scenario)


def test_a_failed_sync_and_the_one_that_mends_it_in_one_breath() -> None:
    """Those who waited fail, and the server is back all the same."""

    async def scenario(it: Any) -> None:
        await it.ask("r0")
        for record in (started(0), failed(0), started(0, sync="2"), finished(0, sync="2")):
            it.fleet.on_sync(record)
        await pause()
        assert isinstance(it.asks["r0"].exception(), EngineLostError)
        assert "half of it came" in str(it.asks["r0"].exception())
        assert await it.ask("r1") == 0

    run(scenario, Server())


def test_who_waits_since_before_a_sync_hears_of_the_next_failure() -> None:
    """A request may run through several syncs."""

    async def scenario(it: Any) -> None:
        await it.ask("r0")
        for record in (started(0), finished(0), started(0, 2, "2"), failed(0, 2, "2")):
            it.fleet.on_sync(record)
        await pause()
        assert isinstance(it.asks["r0"].exception(), EngineLostError)

    run(scenario, Server())


def test_a_trainer_that_died_in_a_sync_is_followed_by_another() -> None:
    """The sync that finishes counts, though an earlier one never ended."""

    async def scenario(it: Any) -> None:
        for record in (started(0, sync="dead"), started(0, sync="2")):
            it.fleet.on_sync(record)
        assert not await opens(it.fleet)
        it.fleet.on_sync(finished(0, sync="2"))
        assert await opens(it.fleet)

    run(scenario, Server())


def test_what_the_log_says_at_the_beginning() -> None:
    """A server's syncs are remembered; an engine in this process began with this process."""

    async def scenario(it: Any) -> None:
        it.fleet.remember([started(0), failed(0), started(1)])
        assert not await opens(it.fleet)
        it.servers[1].version = 4
        it.fleet.remember([finished(1, 4)])
        assert await opens(it.fleet)
        assert it.fleet.policy_version() == 4

    run(scenario)

    async def own() -> None:
        fleet = Fleet({OWN: Server(2)})
        fleet.remember([SyncFailed("actor", 1, "s", "http://10.0.0.1:8000/engine", "no")])
        assert await opens(fleet)
        fleet.on_sync(SyncStarted("actor", 3, "t", "http://10.0.0.1:8000/engine/", "disk"))
        assert not await opens(fleet)
        fleet.on_sync(SyncFinished("actor", 3, "t", "http://10.0.0.1:8000/engine", 1, 0.1))
        assert fleet.policy_version() == 2, "it knows by itself what it serves"

    asyncio.run(own())


def test_an_engine_that_began_with_a_proxy_in_the_middle_of_a_training() -> None:
    """It began with its first weights: it waits for the sync, and only while a training goes on."""

    async def activated(*_: Any) -> None:
        pass

    async def scenario() -> None:
        synced = SyncFinished("actor", 5, "s", "http://10.0.0.1:8000/engine", 1, 0.1)
        idle = Fleet({OWN: Server(0)})
        idle.remember([synced])
        assert await opens(idle)
        server = Server(0)
        fleet = Fleet({OWN: server})
        await fleet.start(activated)
        fleet.remember([synced], trained=True)
        assert not await opens(fleet)
        fleet.on_sync(SyncStarted("actor", 5, "t", "http://10.0.0.1:8000/engine", "disk"))
        server.version = 5
        fleet.on_sync(SyncFinished("actor", 5, "t", "http://10.0.0.1:8000/engine", 1, 0.1))
        assert await opens(fleet)
        assert fleet.policy_version() == 5
        await fleet.close()
        alone = Fleet({OWN: Server(0)}, patience_s=0.1)
        await alone.start(activated)
        alone.remember([synced], trained=True)
        await until(lambda: alone.members[0].usable)  # its trainer is gone
        assert alone.policy_version() == 0
        await alone.close()
        await idle.close()

    asyncio.run(scenario())


# Connections --------------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something to come true."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def test_a_server_that_is_gone_is_asked_until_it_is_back() -> None:
    """Whatever it was answering fails at once; others take the rest."""

    async def scenario(it: Any) -> None:
        for request, trajectory in (("r0", "t"), ("r1", "u"), ("r2", "t")):
            await it.ask(request, trajectory)
        first = it.servers[0]
        first.reachable = False
        first.running["r0"].set_exception(EngineLostError("connection reset"))
        await until(it.asks["r2"].done)
        assert isinstance(it.asks["r0"].exception(), EngineLostError)
        assert "waits for it to answer: nothing answers" in str(it.asks["r2"].exception())
        assert not it.asks["r1"].done()
        assert await it.ask("r3", "t") == 1
        await until(lambda: first.starts > 3)
        assert await it.ask("r4", "w") == 1
        first.reachable = True
        await until(lambda: it.fleet.members[0].usable)
        assert await it.ask("r5", "w2") == 0
        assert len(it.fleet._probing) == 0

    run(scenario)


def test_a_server_that_comes_later() -> None:
    """One that answers is enough to begin with; that none does is an error."""

    async def scenario(it: Any) -> None:
        assert [await it.ask("r0"), await it.ask("r1")] == [1, 1]
        it.servers[0].reachable = True
        await until(lambda: it.fleet.members[0].usable)
        assert await it.ask("r2") == 0

    run(scenario, Server(), Server(), lost=1)
    with pytest.raises(EngineLostError, match="nothing answers"):
        run(scenario, Server(), Server(), lost=2)


@pytest.mark.parametrize("version", [3, 0, None])
def test_a_synced_server_that_was_gone(version: int | None) -> None:
    """With the weights that it was given it goes on; one that began anew waits for a sync."""

    async def scenario(it: Any) -> None:
        server = it.servers[0]
        it.fleet.on_sync(finished(0, 3))
        await it.ask("r0")
        server.version = version
        server.ends(EngineLostError("connection reset"))
        await until(lambda: server.verified > 0)
        await pause()
        assert await opens(it.fleet) == (version == 3)
        it.fleet.on_sync(finished(0, 4))
        assert await it.ask("r1") == 0

    run(scenario, Server())


def test_a_server_that_began_anew_before_this_proxy() -> None:
    """It has its first weights, whatever the log says that it was given; a sync gives it others."""

    async def scenario(it: Any) -> None:
        server = it.servers[0]
        server.version = 0
        it.fleet.remember([finished(0, 5)])
        assert not await opens(it.fleet)
        await until(lambda: server.verified > 2)
        assert not await opens(it.fleet)
        assert it.fleet.states()[0]["state"].startswith(
            "waits for a sync: it has other weights than version 5"
        )
        it.fleet.on_sync(started(0, 6))
        it.fleet.on_sync(finished(0, 6))
        assert await it.ask("r0") == 0
        await until(lambda: not it.fleet._probing)

    run(scenario, Server())


def test_a_sync_finishes_while_the_connection_is_made() -> None:
    """The version that was read then is an old one: it is read again."""

    async def scenario(it: Any) -> None:
        server = it.servers[0]
        it.fleet.on_sync(finished(0, 3))
        await it.ask("r0")

        async def verify() -> None:
            server.version = 3
            if it.fleet.members[0].version == 4:
                server.version = 4
            else:
                it.fleet.on_sync(finished(0, 4))

        server.verify = verify
        server.ends(EngineLostError("connection reset"))
        await pause()
        await until(lambda: it.fleet.members[0].usable)
        assert (it.fleet.policy_version(), await it.ask("r1")) == (4, 0)

    run(scenario, Server())


def test_a_sync_finishes_before_the_connection_is_back() -> None:
    """It is asked once it can be."""

    async def scenario(it: Any) -> None:
        server = it.servers[0]
        it.fleet.on_sync(finished(0, 3))
        await it.ask("r0")
        server.reachable = False
        server.ends(EngineLostError("connection reset"))
        await until(lambda: server.starts > 2)
        it.fleet.on_sync(started(0, 4))
        it.fleet.on_sync(finished(0, 4))
        assert not await opens(it.fleet)
        server.version, server.reachable = 4, True
        await until(lambda: it.fleet.members[0].usable)
        assert await it.ask("r1") == 0

    run(scenario, Server())


def test_a_failed_sync_outlasts_a_new_connection() -> None:
    """That a server answers again says nothing of its weights."""

    async def scenario(it: Any) -> None:
        server = it.servers[0]
        it.fleet.on_sync(finished(0, 3))
        server.version = 3
        await it.ask("r0")
        server.ends(EngineLostError("connection reset"))
        await pause()
        it.fleet.on_sync(failed(0, 4))
        await until(lambda: server.verified > 0 and not it.fleet._probing)
        assert not await opens(it.fleet)

    run(scenario, Server())


def test_a_connection_that_ends_is_nobodys_end_either() -> None:
    """A server that answers when it is looked at stays: what else it is answering comes to a good end."""

    async def scenario(it: Any) -> None:
        await it.ask("r0")
        await it.ask("r1")
        server = it.servers[0]
        server.running["r0"].set_exception(EngineLostError("connection reset"))
        await until(lambda: it.fleet.members[0].usable and it.asks["r0"].done())
        assert isinstance(it.asks["r0"].exception(), EngineLostError)
        assert (server.starts, server.verified) == (1, 1)
        server.ends()
        assert (await it.asks["r1"]).finish_reason == "stop"
        assert await it.ask("r2") == 0

    run(scenario, Server())


# Weights that nobody knows ------------------------------------------------------------------------


def test_weights_that_nobody_knows() -> None:
    """While they are found out about nothing new is asked; then it is used, and its tokens have none."""

    async def scenario(it: Any) -> None:
        server, looked = it.servers[0], asyncio.Event()
        verify = server.verify

        async def slowly() -> None:
            await looked.wait()
            await verify()

        server.verify = slowly
        await it.ask("r0")
        server.strange = "nobody has named them"
        server.ends()
        await pause()
        assert not await opens(it.fleet)
        assert it.fleet.states()[0]["state"] == "finding out which weights it has"
        looked.set()
        await until(lambda: it.fleet.members[0].usable)
        (state,) = it.fleet.states()
        assert (state["policy_version"], state["unverified"]) == (None, "nobody has named them")
        assert (state["state"], it.fleet.policy_version()) == ("usable", None)
        assert await it.ask("r1") == 0
        it.fleet.on_sync(finished(0, 3))
        assert it.fleet.policy_version() == 3

    run(scenario, Server(3))


@pytest.mark.parametrize("version", [None, 2])
def test_a_sync_that_never_comes(version: int | None) -> None:
    """One that has other weights than its trainer gave it is used in the end, as what it is."""

    async def scenario(it: Any) -> None:
        it.fleet._patience_s = 0.05
        server = it.servers[0]
        it.fleet.on_sync(finished(0, 5))
        await it.ask("r0")
        server.version, server.strange = version, None if version else "nobody has named them"
        server.ends()
        it.fleet._look(it.fleet.members[0])
        await pause()
        assert not await opens(it.fleet)
        await until(lambda: it.fleet.members[0].usable)
        assert it.fleet.policy_version() == version
        it.fleet.on_sync(finished(0, 6))
        assert it.fleet.policy_version() == 6, "its trainer is back"

    run(scenario, Server())


def test_a_router_in_front_of_a_synced_server() -> None:
    """A sync names the server, not the router: what the router serves is found out again."""

    async def scenario(it: Any) -> None:
        server = it.servers[0]
        server.strange = "nobody has named them"
        it.fleet.on_sync(finished(7, 2))
        await until(lambda: server.verified == 1)
        server.strange = None
        it.fleet.on_sync(finished(7, 3))
        await pause()
        assert server.verified == 1

    run(scenario, Server())


def test_an_engine_that_refuses_a_request_stays_in_use() -> None:
    """An engine that cannot serve this request can serve others."""

    async def scenario(it: Any) -> None:
        await it.ask("r0")
        it.servers[0].ends(EngineError("no such adapter"))
        await pause()
        assert type(it.asks["r0"].exception()) is EngineError
        assert await it.ask("r1") == 0

    run(scenario, Server())


def test_a_request_that_is_given_up_leaves_nothing() -> None:
    """Neither in the count of those that run, nor at the engine."""

    async def scenario(it: Any) -> None:
        await it.ask("r0")
        it.asks["r0"].cancel()
        await pause()
        member = it.fleet.members[0]
        assert (member.running, member.requests, it.servers[0].running) == (0, {}, {})

    run(scenario, Server())


def test_what_is_told_of_engines() -> None:
    """Each with its address, its version, what runs, and why it is not asked."""

    async def scenario(at: SimpleNamespace) -> None:
        at.fleet.on_sync(finished(0, version=4))
        await at.ask("r")
        at.fleet.on_sync(started(0, version=5))
        at.fleet.on_sync(started(1, version=5))
        at.fleet.on_sync(failed(1, version=5))
        first, second = at.fleet.states()
        expected = {"url": url(0), "running": 1, "policy_version": 4, "unverified": None, "state": "syncing"}
        assert first == expected
        wanted = "waits for a whole sync, which makes it usable again: the sync of version 5 failed: half"
        assert second["state"].startswith(wanted)

    run(scenario, Server(3), Server(3))
