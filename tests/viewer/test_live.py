"""The live pages: one reader for all of them, lines as they become durable, and what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.viewer import live
from rollbook.viewer.live import LiveReader
from rollbook.viewer.snapshots import Snapshots


@pytest.fixture
def reader(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveReader]:
    """A reader of a store, whose thread ends soon after its pages."""
    monkeypatch.setattr(live, "IDLE_S", 0.1)
    shared = Snapshots(store)
    yield LiveReader(shared, "/view")
    shared.close()


def _append(log: Store, *records: Any, run: str = "r") -> None:
    with log.writer("serve") as writer:
        writer.append([Event(record, run) for record in records]).result(30)


async def _lines(reader: LiveReader, wanted: int, after: int = -1, run: str | None = None) -> list[Any]:
    """Messages until there were so many lines."""
    messages, count = [], 0
    async with asyncio.timeout(20):
        async for message in reader.lines(after, run, False):
            messages.append(orjson.loads(message.split(b"data: ")[1]) | {"id": int(message.split()[1])})
            count += len(messages[-1]["lines"])
            if count >= wanted:
                return messages
    return messages


def test_lines_come_as_they_are_durable(store: Store, reader: LiveReader) -> None:
    """What was there at first, then what comes; each once, of each page that is open."""
    _append(store, kinds.TrajectoryOpened("t1", "alpha <b>"), turn_requested("t1", "u1"))

    async def watch() -> tuple[list[Any], list[Any], list[Any]]:
        first = await _lines(reader, 2)
        both = asyncio.gather(_lines(reader, 1, first[-1]["id"]), _lines(reader, 1, first[-1]["id"], "other"))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(_append, store, turn_completed("t1", "u1", reply={"content": "hello"}))
        await asyncio.to_thread(_append, store, kinds.TurnFailed("t9", "u9", "no"), run="other")
        return first, *(await both)

    first, mine, others = asyncio.run(watch())
    text = "".join(line for message in first for line in message["lines"])
    assert "alpha &lt;b&gt;" in text
    assert "<b>" not in text
    assert '<a href="/view/trajectories/t1">' in text
    assert "hello" in mine[0]["lines"][0]
    assert "failed: no" in "".join(line for message in others for line in message["lines"])


def test_what_waits_longest_is_first(store: Store, reader: LiveReader) -> None:
    """Of what is open, with the turns that were answered; what has finished is not there."""
    _append(
        store,
        *(
            kinds.TrajectoryOpened("t1", "a"),
            kinds.TrajectoryOpened("t2", "b"),
            kinds.TrajectoryOpened("t3", "c"),
        ),
        *(turn_requested("t2", "u2"), turn_requested("t1", "u1"), turn_completed("t1", "u1")),
        kinds.TrajectoryFinished("t3", "completed"),
    )

    async def watch() -> None:
        await _lines(reader, 5)

    asyncio.run(watch())
    opened = reader.open_trajectories(None)
    assert [(t.name, t.turns, t.waiting_since is not None) for t in opened] == [
        ("b", 0, True),
        ("a", 1, False),
    ]
    assert reader.open_trajectories("other") == []


def test_a_page_that_falls_behind_is_told(
    store: Store, reader: LiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many lines went by."""
    monkeypatch.setattr(live, "KEPT", 2)
    short = LiveReader(reader._snapshots, "/view")
    _append(store, *(kinds.TrajectoryOpened(f"t{i}", f"n{i}") for i in range(6)))

    async def watch() -> list[Any]:
        begun = await _lines(short, 1)
        return await _lines(short, 2, after=begun[-1]["id"] - 5)

    [message] = asyncio.run(watch())[-1:]
    assert (len(message["lines"]), message["missed"]) == (2, 3)


def test_the_reader_ends_with_its_pages(
    store: Store, reader: LiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread, and what it remembers, are gone a while after the last page."""
    _append(store, kinds.TrajectoryOpened("t1", "a"))

    async def watch() -> None:
        await _lines(reader, 1)

    asyncio.run(watch())
    thread = reader._thread
    if thread is not None:
        thread.join(10)
    assert reader._thread is None
    assert reader.open_trajectories(None) == []
