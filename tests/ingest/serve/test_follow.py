"""The proxy follows the trainer through the log: what it holds, for how long, and what lets it in."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.clients.streamed import KINDS, PATHS, asked
from tests.fakes.engines.played import PlayedEngine
from tests.fakes.proxies.in_process import InProcess
from tests.fakes.proxies.settings import MIB
from tests.fakes.stories.training import RUN, answered, begins, committed, dropped, opened, planned

from rollbook import store
from rollbook.engines.fleet import Fleet
from rollbook.ingest.recording.restore import RunReader
from rollbook.ingest.serve.proxy import Follower
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError
from rollbook.store.events import Record, SyncFinished, TrajectoryFinished
from rollbook.store.log.tail import Filter, Tail


class Trainer:
    """Writes what a trainer says, in a lane of its own."""

    def __init__(self, log: Store, lane: str = "train") -> None:
        self.writer = log.writer(lane)

    def tells(self, *records: Record, run: str = RUN) -> None:
        """Durable once this returns."""
        self.writer.append([Event(record, run) for record in records]).result(10)


@pytest.fixture
def proxy(played: Any) -> Iterator[Any]:
    """A proxy whose engine always serves what the trainer trains, and the trainer."""
    proxy = played()
    proxy.engine.version = None
    proxy.trainer = Trainer(proxy.store)
    yield proxy
    proxy.trainer.writer.close()


async def until(condition: Any) -> None:
    """Wait for something to come true."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def fold(proxy: Any) -> Any:
    """What the proxy knows of the training."""
    return proxy.recorder.known_run.outstanding


def chat(proxy: Any, name: str, group: str | None = None, kind: str = "chat", **body: Any) -> Any:
    """A first request of a trajectory."""
    headers = {} if group is None else {"x-rollbook-group": group}
    return proxy.exchange(f"/t/{name}{PATHS[kind]}", asked(kind, **body), headers=headers)


def names(proxy: Any) -> set[str]:
    """Trajectories of the log."""
    return set(proxy.trajectories())


async def begun(proxy: Any, *records: Record) -> None:
    """The training begins, and the proxy has heard of it."""
    proxy.trainer.tells(*(records or [begins(2, 1, 0)]))
    await until(lambda: fold(proxy).training is not None)


def test_held_and_let_in_by_a_step(proxy: Any) -> None:
    """A second group waits, whichever way it comes, until the step that used the first one commits."""

    async def scenario() -> Any:
        await begun(proxy)
        first = [await chat(proxy, f"a{i}", "g").end() for i in range(2)]
        asks = [chat(proxy, "b0", "h"), chat(proxy, "b1", "h", stream=True)]
        opens = proxy.exchange("/v1/trajectories", {"id": "b2", "group": "i"})
        turns = [await chat(proxy, "a0", "g", text="go on").end()]
        await asyncio.sleep(0.05)
        assert not any(exchange.status for exchange in [*asks, opens])
        ids = [exchange.headers["x-rollbook-trajectory-id"] for exchange in first]
        proxy.trainer.tells(planned(0, ids), committed(0))
        for exchange in asks:
            await exchange.end()
        assert not opens.status
        proxy.trainer.tells(dropped(asks[1].headers["x-rollbook-trajectory-id"]))
        return first + turns + asks + [await opens.end()]

    replies = proxy.run(scenario())
    assert [exchange.status for exchange in replies] == [200] * 5 + [201]
    assert names(proxy) == {"a0", "a1", "b0", "b1", "b2"}


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_held_too_long_is_told_to_come_again(proxy: InProcess, kind: str) -> None:
    """503, worth trying again in a while; nothing of it is in the log."""

    async def scenario() -> Any:
        await begun(proxy)
        assert (await chat(proxy, "a", "g").end()).status == 200
        gate(proxy).hold_s = 0.05
        both = [chat(proxy, f"b{i}", f"h{i}", kind, stream=bool(i)) for i in range(2)]
        opens = proxy.exchange("/v1/trajectories", {"id": "c", "group": "i"})
        return [await exchange.end() for exchange in [*both, opens]]

    for reply in proxy.run(scenario()):
        assert reply.status == 503
        assert 1 <= int(reply.headers["retry-after"]) <= 50
        assert reply.headers["x-should-retry"] == "true"
        assert reply.json["error"]["code"] == "trajectory_held"
    assert names(proxy) == {"a"}
    assert not gate(proxy)._waiting
    assert not gate(proxy)._reserved


def test_who_is_held_when_the_proxy_ends(proxy: InProcess) -> None:
    """503 at once, and whoever comes then; there is nothing of them in the log."""

    async def scenario() -> Any:
        await begun(proxy)
        assert (await chat(proxy, "a", "g").end()).status == 200
        held = [chat(proxy, "b", "h"), proxy.exchange("/v1/trajectories", {"id": "c", "group": "i"})]
        await until(lambda: gate(proxy).waiting == 2)
        proxy.app.state.stop()
        return [await exchange.end() for exchange in [*held, chat(proxy, "d", "j")]]

    for reply in proxy.run(scenario()):
        assert (reply.status, reply.headers["x-should-retry"]) == (503, "true")
        assert reply.json["error"]["code"] == "proxy_ends"
    assert names(proxy) == {"a"}
    assert not gate(proxy)._waiting
    assert not gate(proxy)._reserved


def gate(proxy: Any) -> Any:
    """The proxy's gate."""
    return proxy.recorder.on_unopened.__self__


def test_who_is_never_held(proxy: InProcess) -> None:
    """Evaluations, unnamed traffic, what is in no group, what is open already, and the rest of a group."""

    async def scenario() -> Any:
        await begun(proxy)
        asks = [chat(proxy, "a0", "g"), chat(proxy, "a1", "g"), chat(proxy, "a1", "g", text="more")]
        body = asked("chat")
        asks += [
            proxy.exchange("/t/e/split/eval/group/h/v1/chat/completions", body),
            proxy.exchange("/v1/chat/completions", body),
            proxy.exchange("/v1/trajectories", {"id": "o", "split": "eval", "group": "h"}),
            chat(proxy, "alone"),
        ]
        return [(await exchange.end()).status for exchange in asks]

    assert proxy.run(scenario()) == [200, 200, 200, 200, 200, 201, 200]


def test_without_admission_nothing_is_held(played: Callable[..., InProcess]) -> None:
    """As its options say."""
    proxy = played(admission=False)
    trainer = Trainer(proxy.store)

    async def scenario() -> Any:
        trainer.tells(begins(2, 1, 0))
        await until(lambda: fold(proxy).training is not None)
        return [(await chat(proxy, f"a{i}", f"g{i}").end()).status for i in range(3)]

    assert proxy.run(scenario()) == [200] * 3
    trainer.writer.close()


@pytest.mark.parametrize("path", ["/t/b/v1/chat/completions", "/v1/trajectories"])
def test_a_client_that_leaves_while_it_is_held_opens_nothing(proxy: Any, path: str) -> None:
    """Though there is room a moment later; and the next one gets that room."""

    async def scenario() -> Any:
        await begun(proxy)
        first = await chat(proxy, "a", "g").end()
        body = asked("chat") if path.startswith("/t") else {"id": "b", "group": "h"}
        gone = proxy.exchange(path, body, headers={"x-rollbook-group": "h"})
        await until(lambda: gate(proxy)._waiting)
        gone.leave()
        await gone.end()
        proxy.trainer.tells(dropped(first.headers["x-rollbook-trajectory-id"]))
        return gone, await chat(proxy, "c", "i").end()

    gone, last = proxy.run(scenario())
    assert (gone.status, gone.json["error"]["code"]) == (499, "client_left")
    assert last.status == 200
    assert names(proxy) == {"a", "c"}


def test_a_request_that_is_refused_gives_its_place_back(proxy: InProcess) -> None:
    """Nothing of it is in the log, so that nothing else would."""

    async def scenario() -> Any:
        await begun(proxy)
        bad = await proxy.exchange("/t/x/group/g/v1/chat/completions", asked("chat", tools=3)).end()
        assert bad.status == 400
        wrong = await chat(proxy, "y", "h", messages=[{"role": "user", "content": [{"type": "?"}]}]).end()
        assert wrong.status == 400
        assert not gate(proxy)._reserved
        return await chat(proxy, "z", "i").end()

    assert proxy.run(scenario()).status == 200
    assert names(proxy) == {"z"}


def test_two_first_requests_at_once_are_one_trajectory(proxy: Any) -> None:
    """Held, let in and recorded as one; its place counts once."""

    async def scenario() -> Any:
        await begun(proxy)
        first = await chat(proxy, "a", "g").end()
        both = [chat(proxy, "b", "h", text=str(i)) for i in range(2)]
        await until(lambda: len(gate(proxy)._waiting) == 2)
        proxy.trainer.tells(dropped(first.headers["x-rollbook-trajectory-id"]))
        ends = [(await exchange.end()).status for exchange in both]
        assert fold(proxy).count == 1
        assert not gate(proxy)._reserved
        return ends

    assert proxy.run(scenario()) == [200, 200]
    assert len(proxy.trajectories()["b"].turns) == 2


def test_who_is_held_keeps_nobody_from_finishing(played: Callable[..., InProcess]) -> None:
    """Held requests are none of those that may run at once; their bodies take no more room than they need."""
    proxy = played(max_running=2, max_body_mb=1000 / MIB, max_bodies_mb=2500 / MIB)
    proxy.engine.version = None
    trainer = Trainer(proxy.store)

    async def scenario() -> Any:
        trainer.tells(begins(2, 1, 0))
        await until(lambda: fold(proxy).training is not None)
        assert (await chat(proxy, "a", "g").end()).status == 200
        # Of unknown length, so each might have been as large as may be.
        unknown = {"content-length": "", "x-rollbook-group": "h"}
        held = [proxy.exchange(f"/t/b{i}{PATHS['chat']}", asked("chat"), headers=unknown) for i in range(5)]
        await until(lambda: len(gate(proxy)._waiting) == 5)
        more = await chat(proxy, "a", "g", text="go on").end()
        for exchange in held:
            exchange.leave()
            await exchange.end()
        return more

    assert proxy.run(scenario()).status == 200
    trainer.writer.close()


def test_a_sync_lets_in(
    played: Callable[..., InProcess],
    in_process: Callable[..., InProcess],
    chat: Callable[[str], ChatTokenizer],
) -> None:
    """Engines that serve an older version leave less room; a sync makes it, with no other event."""
    engine = PlayedEngine(chat("chatml"))
    engine.version = 0
    proxy = in_process(Fleet({"http://127.0.0.1:3000": engine}), chat("chatml"))
    trainer = Trainer(proxy.store)

    async def scenario() -> Any:
        trainer.tells(begins(1, 1, 0), planned(0, []), committed(0))
        await until(lambda: fold(proxy).version == 1)
        ask = proxy.exchange("/t/a/v1/chat/completions", asked("chat"))
        await until(lambda: gate(proxy)._waiting)
        trainer.tells(SyncFinished("actor", 1, "s", "http://127.0.0.1:3000", 1, 0.1))
        return await ask.end()

    assert proxy.run(scenario()).status == 200
    trainer.writer.close()


@pytest.mark.parametrize("lane", ["train", "a-trainer"])
def test_after_a_restart_it_is_as_the_log_says(played: Callable[..., InProcess], lane: str) -> None:
    """What began, ended, was used or lost counts as before, whichever lane is read first."""
    proxy = played()
    trainer, other = Trainer(proxy.store, lane), Trainer(proxy.store, "another-proxy")

    async def scenario() -> None:
        trainer.tells(begins(2, 2, 1))
        await until(lambda: fold(proxy).training is not None)
        replies = [await chat(proxy, f"a{i}", f"g{i // 2}").end() for i in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        ids = [reply.headers["x-rollbook-trajectory-id"] for reply in replies]
        trainer.tells(planned(0, ids[:2]), committed(0))
        other.tells(opened("o0", "h"), *answered("o0"), opened("o1", "h"), TrajectoryFinished("o0"))
        other.tells(opened("b0", "i"), opened("b1", "i"), TrajectoryFinished("b0"), TrajectoryFinished("b1"))
        other.tells(opened("e", "h", "eval"))
        other.tells(opened("x", "h"), run="another")
        await until(lambda: fold(proxy).count == 3 and fold(proxy).version == 1)
        await proxy.recorder.settle()

    proxy.run(scenario())
    again = RunReader(proxy.store, RUN).outstanding
    assert (again.count, again.version, again.training) == (3, 1, fold(proxy).training)
    assert (again.room("h"), again.room("g1"), again.room("i")) == (0, 0, 0)
    for each in (trainer, other):
        each.writer.close()


def test_a_trainer_that_is_done_holds_nobody(proxy: Any) -> None:
    """Its last step lets in whoever waits."""

    async def scenario() -> Any:
        await begun(proxy, begins(2, 1, 0, steps=1))
        await chat(proxy, "a", "g").end()
        held = [chat(proxy, f"b{i}", f"h{i}") for i in range(3)]
        await until(lambda: len(gate(proxy)._waiting) == 3)
        proxy.trainer.tells(planned(0, []), committed(0))
        return [(await exchange.end()).status for exchange in held]

    assert proxy.run(scenario()) == [200] * 3


# The follower itself ------------------------------------------------------------------------------


def test_it_hands_over_each_event_of_the_others_once(tmp_path: Path) -> None:
    """In order, from where the reader was, without its own lane; and it ends when it is told to."""
    log = store.open(tmp_path / "store", create=True)
    mine, other = Trainer(log, "mine"), Trainer(log, "other")
    mine.tells(opened("before"))
    other.tells(opened("known"))
    got: list[Event] = []

    async def scenario() -> None:
        follower = Follower(log, log.head(), Filter(skip_lanes=frozenset(["mine"])), got.extend, print)
        follower.start()
        for i in range(50):
            (mine if i % 2 else other).tells(opened(f"t{i}"))
        Trainer(log, "new").tells(opened("new"))
        await until(lambda: len(got) >= 26)
        await asyncio.sleep(0.05)
        await follower.stop()
        other.tells(opened("after"))
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert [e.record.name for e in got if e.lane == "other"] == [f"t{i}" for i in range(0, 50, 2)]
    assert [e.record.name for e in got if e.lane != "other"] == ["new"]


def test_it_rests_while_nothing_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its own lane holds: that is nothing to read."""
    log = store.open(tmp_path / "store", create=True)
    Trainer(log, "mine").tells(opened("a"), opened("b"))
    polls: list[Any] = []
    poll = Tail.poll

    def counted(self: Tail) -> list[Event]:
        polls.append(self._store)
        return poll(self)

    monkeypatch.setattr(Tail, "poll", counted)

    async def scenario() -> None:
        start = log.head()
        assert start == {"mine": 2}
        follower = Follower(log, start, Filter(skip_lanes=frozenset(["mine"])), lambda events: None, print)
        follower.start()
        await asyncio.sleep(0.5)
        await follower.stop()

    asyncio.run(scenario())
    assert 1 <= polls.count(log.path) <= 10, "the proxies of other tests follow their own stores"


def test_it_says_why_it_can_follow_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and it ends."""
    log = store.open(tmp_path / "store", create=True)
    reasons: list[str | None] = []
    error = CorruptionError("a lane is damaged")

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr("rollbook.store.log.tail.Tail.poll", broken)

    async def scenario() -> None:
        follower = Follower(log, {}, Filter(), lambda events: None, reasons.append)
        follower.start()
        await until(lambda: reasons)
        await follower.stop()

    asyncio.run(scenario())
    assert reasons == [f"the log cannot be followed: {error}"]


def test_what_cannot_be_read_for_a_while_is_followed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Want of descriptors makes nobody deaf for good: it says so, goes on, and nothing is left out."""
    monkeypatch.setattr("rollbook.ingest.serve.proxy.RETRY_S", 0.01)
    log = store.open(tmp_path / "store", create=True)
    reasons: list[str | None] = []
    heard: list[Event] = []
    real, polls = Tail.poll, []

    def scarce(tail: Tail, limit: int | None = None) -> list[Event]:
        ours = tail._store == log.path  # the proxies of other tests follow their own stores
        polls.extend([1] * ours)
        if ours and 1 < len(polls) < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(tail, limit)

    monkeypatch.setattr(Tail, "poll", scarce)

    async def scenario() -> None:
        follower = Follower(log, {}, Filter(), heard.extend, reasons.append)
        follower.start()
        with log.writer("other") as writer:
            for i in range(2):
                writer.append([Event(TrajectoryFinished(f"t{i}", "completed", None), RUN)]).result(10)
                await until(lambda i=i: len(heard) == i + 1)
        await until(lambda: len(polls) > 5)
        await follower.stop()

    asyncio.run(scenario())
    assert [event.seq for event in heard] == [0, 1]
    assert [*map(str, reasons)] == [
        *3 * ["the log cannot be followed now: [Errno 24] Too many open files"],
        "None",
    ]
