"""The live pages: one reader for all of them, lines as they become durable, and what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.viewer import live
from rollbook.viewer.launches import last_lines
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


def started(trajectory_id: str, launch_id: str) -> kinds.LaunchStarted:
    """An agent that was started."""
    place = {"epoch": 0, "task": "x", "sample": 0}
    return kinds.LaunchStarted(trajectory_id, launch_id, "math", place, 1, "subprocess", {}, "me", {})


def test_agents_that_run_and_that_ended(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last lines that each printed; what leads out of its folder is not read."""
    monkeypatch.setattr(live, "IDLE_S", 0.1)
    (tmp_path / "secret").write_text("a secret")
    for folder, stream, text in (
        ("one-launch-1", "stdout", "1\n2\n3\n4\n5\n6\n"),
        ("two-launch-2", "stderr", "oh"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{stream}.log").write_text(text)
    (tmp_path / "two-launch-2" / "stdout.log").symlink_to(tmp_path / "secret")
    _append(store, kinds.TrajectoryOpened("t1", "one"), started("t1", "a-launch-1"))
    shared = Snapshots(store)
    reader = LiveReader(shared, "/view", tmp_path)

    async def watch() -> Any:
        await _lines(reader, 1)
        later = [kinds.TrajectoryOpened("t2", "two"), started("t2", "a-launch-2")]
        await asyncio.to_thread(_append, store, *later)
        async with asyncio.timeout(20):
            while len((board := reader.launches("r")).running) < 2:
                await asyncio.sleep(0.02)
        end = kinds.LaunchEnded("t1", "a-launch-1", "agent_error", "exit code 1")
        await asyncio.to_thread(_append, store, end)
        async with asyncio.timeout(20):
            while not (after := reader.launches(None)).ended:
                await asyncio.sleep(0.02)
        return board, after, reader.launches("other")

    async def open_page() -> Any:
        page = asyncio.create_task(_lines(reader, 99))
        try:
            return await watch()
        finally:
            page.cancel()

    board, after, other = asyncio.run(open_page())
    assert [(launch.name, launch.rollout, launch.printed) for launch in board.running] == [
        ("one", "math", "2\n3\n4\n5\n6"),
        ("two", "math", "oh"),
    ]
    [ended] = after.ended
    assert (ended.name, ended.status, ended.why, after.count) == ("one", "agent_error", "exit code 1", 1)
    assert (other.count, other.ended) == (0, [])
    assert last_lines(tmp_path / "two-launch-2", "../one", "a-launch-1") == ""
    shared.close()


def test_what_cannot_be_printed_ends_no_page(
    store: Store, reader: LiveReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and what comes behind it is shown."""
    lines = live.Traffic.lines

    def refuse(traffic: Any, event: Event) -> Any:
        if event.kind == "turn.requested":
            raise AttributeError("no such field")
        return lines(traffic, event)

    monkeypatch.setattr(live.Traffic, "lines", refuse)
    _append(store, kinds.TrajectoryOpened("t1", "first"), turn_requested("t1", "u1"))
    _append(store, kinds.TrajectoryOpened("t2", "second"))
    messages = asyncio.run(_lines(reader, 3))
    text = "".join(line for message in messages for line in message["lines"])
    assert "turn.requested" in text
    assert "it cannot be shown" in text
    assert "second" in text


def test_what_pages_ask_again_and_again_makes_no_snapshot(view: Any, store: Store) -> None:
    """A growing log would cost a connection each second for as long as a page is open."""
    viewer = view(store)

    def refuse() -> Any:
        raise AssertionError("a snapshot was made")

    viewer.snapshots.reading = refuse
    for part in ("open", "launches"):
        assert viewer.get(f"/live/{part}").status_code == 200
    assert viewer.get("/live").status_code == 500
