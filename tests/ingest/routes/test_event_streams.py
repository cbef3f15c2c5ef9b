"""Streams of events whose clients do not read: what they hold is bounded, given back, and let go."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.clients.exchange import Exchange
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.edge import memory
from rollbook.edge.errors import add_error_replies
from rollbook.edge.server_sent_events import read_messages
from rollbook.ingest.endpoints.registry import error_body
from rollbook.ingest.routes import event_feed
from rollbook.ingest.routes.event_feed import ArrowFeed, EventStreams, Feed, SseFeed
from rollbook.store import Event, Store
from rollbook.store.events import TurnFailed
from rollbook.store.events.codec import as_json
from rollbook.store.sealed import parquet
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.compact import merge, remove_superseded

SYSTEM = "You are terse. " * 1000


def _turns(count: int, seed: int) -> list[Event]:
    """Requests with a body that they share, and completions; every fifth event is small."""
    rng = random.Random(seed)
    events: list[Event] = []
    for i in range(count):
        key = f"t{rng.randrange(10)}"
        text = f"{seed} {i} " + "x" * rng.randrange(2000)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        request = turn_requested(
            key, f"u{i}", root_reason="first_turn", messages=messages, requested_model="m", context_key="k"
        )
        ids = np.arange(rng.randrange(50), dtype=np.int32)
        done = turn_completed(
            key,
            f"u{i}",
            policy_version=0,
            prompt_ids=ids,
            completion_ids=ids,
            prompt_length=len(ids),
            prompt_sha256="0" * 64,
            reply={"role": "assistant", "content": text},
        )
        events += [Event(request, "r"), Event(done, "r")]
        if i % 2:
            events.append(Event(TurnFailed(key, f"v{i}", "x"), "r"))
    return events


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of two lanes: one sealed, its units merged to one of many segments; one of WAL files alone."""
    log = rb.open(tmp_path_factory.mktemp("streams") / "store", create=True)
    small = AppendSettings(segment_bytes=20_000, linger_ms=0)
    for lane in ("sealed", "wal"):
        with log.writer(lane, small) as writer:
            for seed in range(10):
                writer.append(_turns(6, seed)).result(30)
    keep_nothing = SealSettings(keep_wal_bytes=0)
    unit = merge(log.path, list(seal_closed(log.path, "sealed", keep_nothing, all_of_it=True)), keep_nothing)
    remove_superseded(log.path, "sealed")
    remove_sealed_wal(log.path, "sealed", [unit], 0)
    assert len(unit.segments) > 5
    return log


def _local(log: Store) -> list[Any]:
    return orjson.loads(orjson.dumps([as_json(e) for e in log.tail().poll()]))


def _sse(parts: list[bytes]) -> list[Any]:
    messages = read_messages(iter(parts))
    return [event for m in messages if m.type == "message" for event in orjson.loads(m.data)]


def _arrow(parts: list[bytes]) -> list[Any]:
    return pa.ipc.open_stream(b"".join(parts)).read_all().select(["lane", "seq", "extra"]).to_pylist()


def _all(feed: Feed, rests: Callable[[], bool]) -> list[bytes]:
    """All of a feed up to the head, put to rest whenever it is said."""
    parts: list[bytes] = []
    while not feed.done:
        if (message := feed.next()) is None:
            break
        parts.append(message)
        if rests():
            feed.rest()
            assert feed.held == 0
    return parts


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1, 3000, 100_000]))
def test_a_feed_may_rest_at_any_time(
    log: Store, seed: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it hands out is the same: each event once, in order, requests whole, and the same head."""
    monkeypatch.setattr("rollbook.ingest.routes.event_feed.MESSAGE_BYTES", size)
    rng = random.Random(seed)
    parts = _all(SseFeed(log.tail(), None), lambda: rng.random() < 0.2)
    assert _sse(parts) == _local(log)
    assert [m.type for m in read_messages(iter(parts))][-1] == "head"
    rested = _arrow(_all(ArrowFeed(log.tail()), lambda: rng.random() < 0.2))
    assert rested == _arrow(_all(ArrowFeed(log.tail()), lambda: False))
    assert [(e["lane"], e["seq"]) for e in rested] == [(e["lane"], e["seq"]) for e in _local(log)]


def test_a_unit_is_read_a_segment_at_a_time(log: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory is about one segment, however many were merged; its bodies are its own."""
    [unit] = current_units(log.path, "sealed")
    most = max(segment.events for segment in unit.segments)
    held: list[int] = []
    real = parquet.pa.concat_tables

    def concat(tables: Any, *rest: Any) -> Any:
        table = real(tables, *rest)
        held.append(table.num_rows)
        return table

    monkeypatch.setattr(parquet.pa, "concat_tables", concat)
    assert len([e for e in log.tail().poll() if e.lane == "sealed"]) == unit.next_seq
    assert max(held) == most < unit.next_seq / 5
    held.clear()
    last = unit.segments[-1].first_seq + 1
    assert [e.seq for e in log.tail({"sealed": last, "wal": log.head()["wal"]}).poll()][:1] == [last]
    assert sum(held) <= 3 * most  # nothing before it is read


# Streams --------------------------------------------------------------------------------------------


class Streams:
    """`EventStreams` of a store behind one route, in process."""

    def __init__(self, log: Store, most: int) -> None:
        self.log, self.refused = log, list[str]()
        self.runner = asyncio.Runner()
        self.streams = EventStreams(log, most)
        self.app = FastAPI()
        add_error_replies(self.app, self.refused.append, error_body)

        @self.app.get("/events")
        async def events() -> Any:
            tail = await self.streams.run(log.tail)
            return self.streams.response(SseFeed(tail, None), "text/event-stream", follow=True)

    def exchange(self) -> Exchange:
        """Begin a stream."""
        return Exchange(self.app, "/events", method="GET")

    def close(self) -> None:
        """Let the threads go."""
        self.runner.close()
        self.streams.close()


@pytest.fixture
def streams(log: Store) -> Iterator[Callable[..., Streams]]:
    """Makes streams; closes them."""
    made: list[Streams] = []

    def make(most: int = 64) -> Streams:
        made.append(Streams(log, most))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _stuck(exchange: Exchange) -> None:
    """From now on its client takes nothing."""

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    exchange._send = send  # type: ignore[method-assign]


def test_more_consumers_than_allowed(streams: Any) -> None:
    """503, worth trying again, and counted; one that leaves makes place."""
    feed = streams(3)

    async def scenario() -> Any:
        running = [feed.exchange() for _ in range(3)]
        for exchange in running:
            await exchange.until(lambda e=exchange: b"event: head" in e.data)
        refused = await feed.exchange().end()
        running[0].leave()
        await running[0].end()
        later = feed.exchange()
        await later.until(lambda: b"event: head" in later.data)
        for exchange in (*running[1:], later):
            exchange.leave()
            await exchange.end()
        return refused, [_sse(e.parts) for e in (*running, later)]

    refused, received = feed.runner.run(scenario())
    assert (refused.status, refused.json["error"]["code"]) == (503, "too_many_consumers")
    assert refused.headers["x-should-retry"] == "true"
    assert feed.refused == ["too_many_consumers"]
    assert received == [_local(feed.log)] * 4
    assert feed.streams.open == 0


def test_many_that_do_not_read_hold_little(
    streams: Callable[..., Streams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty stuck consumers of a sealed lane: only a few keep what reading holds, and none once they left."""
    monkeypatch.setattr(event_feed, "WARM_BYTES", 200_000)
    monkeypatch.setattr("rollbook.ingest.routes.event_feed.MESSAGE_BYTES", 1000)
    feed = streams()

    async def scenario() -> tuple[int, int]:
        stuck = [feed.exchange() for _ in range(40)]
        for exchange in stuck:
            _stuck(exchange)
        await asyncio.sleep(0)
        while feed.streams._held < 40 * 1000:
            await asyncio.sleep(0.01)
        warm, count = sum(feed.streams._warm.values()), len(feed.streams._warm)
        for exchange in stuck:
            exchange.leave()
            await exchange.end()
        while feed.streams._warm:
            await asyncio.sleep(0.01)
        return warm, count

    warm, count = feed.runner.run(asyncio.wait_for(scenario(), 60))
    assert 0 < count < 5
    assert warm <= 200_000
    assert feed.streams.open == feed.streams._held == 0


def test_who_takes_nothing_is_let_go(
    streams: Callable[..., Streams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while; sooner where others wait for the room of what it does not take."""
    monkeypatch.setattr(event_feed, "TAKE_S", 0.6)
    monkeypatch.setattr(event_feed, "TAKE_PRESSED_S", 0.1)
    feed = streams()

    async def scenario() -> tuple[float, float, Any]:
        begun = time.monotonic()
        alone = feed.exchange()
        _stuck(alone)
        await alone.end()
        unpressed = time.monotonic() - begun
        monkeypatch.setattr(event_feed, "HELD_BYTES", 1)
        monkeypatch.setattr(event_feed, "TAKE_S", 30.0)
        begun = time.monotonic()
        stuck = feed.exchange()
        _stuck(stuck)
        await asyncio.sleep(0.05)
        honest = feed.exchange()
        await honest.until(lambda: b"event: head" in honest.data)
        took = time.monotonic() - begun
        await stuck.end()
        honest.leave()
        await honest.end()
        return unpressed, took, _sse(honest.parts)

    unpressed, took, received = feed.runner.run(scenario())
    assert unpressed >= 0.6
    assert took < 10
    assert received == _local(feed.log)
    assert feed.streams.open == feed.streams._held == 0


def test_memory_goes_back(streams: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after streams ended, what reading took is given back to the system, once for all of them."""
    times: list[float] = []
    monkeypatch.setattr(event_feed, "give_back", lambda: times.append(time.monotonic()))
    monkeypatch.setattr(memory, "GIVE_BACK_S", 0.1)
    feed = streams()

    async def scenario() -> None:
        for exchange in [feed.exchange() for _ in range(5)]:
            await exchange.until(lambda e=exchange: b"event: head" in e.data)
            exchange.leave()
            await exchange.end()
        await asyncio.sleep(0.5)

    feed.runner.run(scenario())
    assert 0 < len(times) <= 5 * event_feed.THREADS
