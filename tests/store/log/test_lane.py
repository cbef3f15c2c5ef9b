"""One writer per lane: order, durability before the answer, failed disks, segments and the lock."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.errors import CutError, LaneLockedError, WriteFailedError
from rollbook.store.events import Event, TurnFailed
from rollbook.store.events.codec import decode
from rollbook.store.log import writer as search
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.writer import append_future
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.wal import framer
from rollbook.store.wal.files import lane_folder, segment_numbers
from rollbook.store.wal.frame import MAGIC


def _errors(store: Store) -> list[str]:
    return [event.record.error for event in store.events()]  # type: ignore[union-attr]


def test_events_are_read_in_the_order_of_their_appends(store: Store, notes: Any, plain: Any) -> None:
    """Appends get consecutive numbers, and the events come back unchanged in that order."""
    events = notes(30)
    with store.writer("a") as writer:
        futures = [writer.append(events[i : i + 3]) for i in range(0, 30, 3)]
        assert [f.result(30) for f in futures] == list(range(0, 30, 3))
    back = list(store.events())
    assert [(e.lane, e.seq) for e in back] == [("a", i) for i in range(30)]
    assert [plain(e, place=False) for e in back] == [plain(e, place=False) for e in events]


def test_threads_share_a_writer(store: Store, notes: Any) -> None:
    """Each append's events stay together and at the number its future gave, whoever else appends."""
    got: dict[str, int] = {}

    def work(name: str) -> None:
        for i in range(20):
            got[f"{name}{i}"] = writer.append(notes(2, text=f"{name}{i}")).result(30)

    with store.writer("a") as writer:
        threads = [threading.Thread(target=work, args=(name,)) for name in "xyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = _errors(store)
    assert sorted(got.values()) == list(range(0, 120, 2))
    assert all(errors[seq : seq + 2] == [f"{name} 0", f"{name} 1"] for name, seq in got.items())


def test_one_append_is_one_frame(store: Store, notes: Any) -> None:
    """Events of one append lie in one frame, so a crash keeps all of them or none."""
    with store.writer("a") as writer:
        sizes = [1, 700, 3]
        for size in sizes:
            writer.append(notes(size)).result(30)
    batches = list(LaneReader(store.path, "a").poll())
    assert [b.num_rows for b in batches] == sizes


def test_waiting_appends_share_a_frame(store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits while the disk is busy is committed together, with one flush."""
    writer = store.writer("a")
    busy, go, flushes = threading.Event(), threading.Event(), []
    real = os.fdatasync

    def slow(fd: int) -> None:
        busy.set()
        assert go.wait(60)
        flushes.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    first = writer.append(notes(1))
    assert busy.wait(60)
    rest = [writer.append(notes(2, i)) for i in range(5)]
    go.set()
    assert first.result(30) == 0
    assert [f.result(30) for f in rest] == [1, 3, 5, 7, 9]
    writer.close()
    assert len(flushes) == 2


def test_no_future_resolves_before_its_flush(
    store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While fdatasync has not returned, the append is neither answered nor readable."""
    writer = store.writer("a")
    busy, go = threading.Event(), threading.Event()
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (busy.set(), go.wait(60), real(fd)))
    future = writer.append(notes(1))
    assert busy.wait(60)
    assert not future.done()
    assert store.head() == {}
    go.set()
    assert future.result(30) == 0
    assert store.head() == {"a": 1}
    writer.close()


@pytest.mark.parametrize("call", ["fdatasync", "pwritev", "pwrite"])
def test_a_failed_write_stops_the_lane(
    store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """All pending and later appends fail, nothing is flushed again, and only what was acknowledged stays."""
    writer = store.writer("a")
    assert writer.append(notes(2, text="kept")).result(30) == 0
    busy, go, calls = threading.Event(), threading.Event(), []

    def fail(*_: Any) -> Any:
        calls.append(call)
        busy.set()
        assert go.wait(60)
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        first = writer.append(notes(1, text="lost"))
        assert busy.wait(60)
        pending = [writer.append(notes(1, text="lost")) for _ in range(3)]
        go.set()
        for future in [first, *pending]:
            with pytest.raises(WriteFailedError, match=r"lane 'a'.*disk is gone"):
                future.result(30)
        with pytest.raises(WriteFailedError, match="disk is gone"):
            writer.append(notes(1)).result(30)
        writer.close()
    assert calls == [call]
    with store.writer("a") as writer:
        assert writer.append(notes(1, text="after")).result(30) == 2
    assert _errors(store) == ["kept 0", "kept 1", "after 0"]


def test_a_failure_at_the_roll_keeps_what_was_acknowledged(
    store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a new segment cannot be made durable, earlier segments stay whole."""
    writer = store.writer("a", AppendSettings(segment_bytes=1))
    writer.append(notes(1, text="kept")).result(30)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(WriteFailedError, match="full"):
            writer.append(notes(1, text="lost")).result(30)
        writer.close()
    with store.writer("a") as writer:
        assert writer.append(notes(1, text="after")).result(30) == 1
    assert _errors(store) == ["kept 0", "after 0"]


def test_short_writes_are_completed(store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writev or write that takes only some bytes is gone on with until all are written."""
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: os.pwrite(fd, bytes(buffers[0])[:10], at))
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:1000]))
    with store.writer("a") as writer:
        assert writer.append(notes(40)).result(30) == 0
    assert _errors(store) == [f"note {i}" for i in range(40)]
    with store.writer("a") as writer:
        assert (writer.recovered.next_seq, writer.recovered.truncated_bytes) == (40, 0)


def test_a_value_without_stored_form_fails_alone(
    store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that cannot be encoded fails its own append; others of the group and later ones go on."""
    bad = Event(TurnFailed("t", "u", "\ud800"), "run")
    writer = store.writer("a")
    busy, go = threading.Event(), threading.Event()
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (busy.set(), go.wait(60), real(fd)))
    first = writer.append(notes(1))
    assert busy.wait(60)
    before, wrong, after = writer.append(notes(1, 1)), writer.append([bad]), writer.append(notes(1, 2))
    go.set()
    assert [f.result(30) for f in (first, before, after)] == [0, 1, 2]
    with pytest.raises(ValueError, match="cannot be stored"):
        wrong.result(30)
    with pytest.raises(ValueError, match="cannot be stored"):
        writer.append([bad]).result(30)
    assert writer.append(notes(1, 3)).result(30) == 3
    writer.close()
    assert _errors(store) == [f"note {i}" for i in range(4)]


def test_a_cancelled_waiter_does_not_stop_the_lane(
    store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes away while its events are written cancels nothing: they are in the log."""
    writer = store.writer("a")
    busy, go = threading.Event(), threading.Event()
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (busy.set(), go.wait(60), real(fd)))

    async def leave() -> None:
        waiting = asyncio.wrap_future(writer.append(notes(1)))
        await asyncio.to_thread(busy.wait, 30)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    go.set()
    assert writer.append(notes(1, 1)).result(30) == 1
    writer.close()
    assert _errors(store) == ["note 0", "note 1"]


def test_segments_roll(store: Store, notes: Any) -> None:
    """A segment beyond its size is closed and the next one goes on; readers see no seam."""
    with store.writer("a", AppendSettings(segment_bytes=2000)) as writer:
        for i in range(20):
            assert writer.append(notes(1, i)).result(30) == i
    folder = lane_folder(store.path, "a")
    numbers = segment_numbers(folder)
    assert len(numbers) > 3
    assert numbers == list(range(1, len(numbers) + 1))
    assert _errors(store) == [f"note {i}" for i in range(20)]
    with store.writer("a") as writer:
        infos = writer.recovered.segments
        assert [i.number for i in infos] == numbers
        assert sum(i.events for i in infos) == 20
        assert [i.first_seq for i in infos] == [sum(j.events for j in infos[:k]) for k in range(len(infos))]
        assert [i.bytes for i in infos] == [(folder / f"{n:08d}.wal").stat().st_size for n in numbers]


def test_an_empty_append_is_refused(store: Store) -> None:
    """An append of nothing is a ValueError, not a number."""
    with store.writer("a") as writer, pytest.raises(ValueError, match="at least one"):
        writer.append([]).result(30)
    assert store.head() == {}


def test_a_closed_writer_takes_nothing(store: Store, notes: Any) -> None:
    """Closing commits what is pending; later appends fail; closing again does nothing."""
    writer = store.writer("a")
    pending = [writer.append(notes(1, i)) for i in range(10)]
    writer.close()
    assert [f.result(0) for f in pending] == list(range(10))
    writer.close()
    with pytest.raises(WriteFailedError, match="closed"):
        writer.append(notes(1)).result(30)


def test_a_second_writer_in_another_process_is_refused(
    store: Store, notes: Any, fork_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """The lock names the process that holds it; another lane is free; after close the lane is too."""
    code = (
        "import sys\nfrom rollbook import store as rb\nfrom rollbook.store.errors import LaneLockedError\n"
        "from rollbook.store.events import Event, TurnFailed\n"
        "s = rb.open(sys.argv[1])\ntry:\n    s.writer('a')\nexcept LaneLockedError as e:\n    print(e)\n"
        "with s.writer('b') as w:\n"
        "    print(w.append([Event(TurnFailed('t', 'u', 'from b'), 'r')]).result(30))\n"
    )
    with store.writer("a") as writer:
        writer.append(notes(1)).result(30)
        second = fork_python(code, store.path)
        out, err = second.communicate(timeout=60)
        assert (second.returncode, err) == (0, "")
        assert f"lane 'a' of {store.path} is being written by process {os.getpid()}:" in out
        assert "--lane" in out
        with pytest.raises(LaneLockedError, match=f"process {os.getpid()}:"):
            store.writer("a")
    assert out.endswith("\n0\n")
    assert store.head() == {"a": 1, "b": 1}
    assert [(e.lane, e.seq) for e in store.events()] == [("a", 0), ("b", 0)]
    store.writer("a").close()


@pytest.mark.parametrize("name", ["", "A", "a/b", "../x", ".hidden", "a" * 64, "a b"])
def test_lane_names_are_checked(store: Store, name: str) -> None:
    """A name that is no lane name is refused before anything is made."""
    with pytest.raises(CutError, match="lane name"):
        store.writer(name)
    assert list((store.path / "lanes").iterdir()) == []


def test_lingering_gathers_a_group(store: Store, notes: Any) -> None:
    """With linger_s, appends made soon after each other share a frame; close still answers them all."""
    with store.writer("a", AppendSettings(linger_ms=200)) as writer:
        futures = [writer.append(notes(1, i)) for i in range(5)]
        assert [f.result(30) for f in futures] == list(range(5))
    batches = list(LaneReader(store.path, "a").poll())
    assert len(batches) < 5
    assert [e.seq for b in batches for e in decode(b, "a")] == list(range(5))


def test_who_hands_over_several_is_no_company(store: Store, notes: Any) -> None:
    """Appends that came in one go share a frame, and what comes after them is not made to wait for others."""
    with store.writer("a", AppendSettings(linger_ms=1000)) as writer:
        begun = time.monotonic()
        for number in range(40):
            pair = [append_future(), append_future()]
            writer.append_each(
                [([event], future) for event, future in zip(notes(2, 2 * number), pair, strict=True)]
            )
            assert [future.result(20) for future in pair] == [2 * number, 2 * number + 1]
        assert time.monotonic() - begun < 30, "nobody lingered"
    [segment] = lane_folder(store.path, "a").glob("*.wal")
    assert segment.read_bytes().count(MAGIC) == 1 + 40, "the header, and a frame for each pair"


def test_opening_what_is_no_store(tmp_path: Path) -> None:
    """A missing folder, a foreign folder and a newer format are each refused by name."""
    from rollbook.store.errors import FormatError, NotAStoreError

    with pytest.raises(NotAStoreError, match=r"STORE\.json"):
        rb.open(tmp_path / "nothing")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("mine")
    with pytest.raises(NotAStoreError, match="new folder"):
        rb.open(tmp_path / "foreign", create=True)
    store = rb.open(tmp_path / "made", create=True)
    assert rb.open(store.path, create=True).store_id == store.store_id
    (store.path / "STORE.json").write_text('{"format": 99, "id": "x"}')
    with pytest.raises(FormatError, match="format 99"):
        rb.open(store.path)
    (store.path / "STORE.json").write_text("[]")
    with pytest.raises(NotAStoreError, match=r"STORE\.json"):
        rb.open(store.path)


@pytest.mark.parametrize("remembered", [3, 20, 1000])
def test_a_lane_opened_anew_stores_nothing_twice(
    store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    """However many ids its writer remembers: older ones are searched for."""
    monkeypatch.setattr(framer, "REMEMBERED", remembered)
    monkeypatch.setattr(search, "REMEMBERED", remembered)
    monkeypatch.setattr(framer.EventWindow.__init__, "__defaults__", (remembered,))
    events = notes(60)
    with store.writer("a") as writer:
        for i in range(0, 60, 10):
            writer.append(events[i : i + 10]).result(30)
    with store.writer("a") as writer:
        assert [writer.append([event]).result(30) for event in events] == list(range(60))
    assert store.head() == {"a": 60}


def test_of_sealed_events_the_newest_are_remembered(
    store: Store, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more of them, however many a unit holds; older ones are searched for."""
    monkeypatch.setattr(search, "REMEMBERED", 20)
    monkeypatch.setattr(framer.EventWindow.__init__, "__defaults__", (20,))
    events = notes(60)
    with store.writer("a") as writer:
        writer.append(events).result(30)
    list(seal_closed(store.path, "a", SealSettings(), all_of_it=True))
    units, ids = current_units(store.path, "a"), dict[int, str]()
    search._add_sealed_ids(store.path, units, ids)
    assert ids == {seq: events[seq].event_id for seq in range(40, 60)}
    assert remove_sealed_wal(store.path, "a", units, 0)
    with store.writer("a") as writer:
        assert [writer.append([event]).result(30) for event in events] == list(range(60))
    assert store.head() == {"a": 60}
