"""Consumers: a durable cursor each, in a lane of their own; at least once between commits, never less."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.store import Event, Store, format_cut, parse_cut
from rollbook.store.errors import CutError, LaneLockedError, WriteFailedError
from rollbook.store.events import CursorMoved
from rollbook.store.log.consumer import Cursors, consumer_lane, last_cursor, union
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings


def _places(events: Any) -> list[tuple[str, int]]:
    return [(e.lane, e.seq) for e in events]


def _append(store: Store, lane: str, events: list[Event]) -> None:
    with store.writer(lane) as writer:
        writer.append(events).result(30)


def test_it_goes_on_where_it_committed(store: Store, notes: Callable[..., list[Event]]) -> None:
    """Handled and committed events do not come again; handled and uncommitted ones do."""
    _append(store, "a", notes(5))
    with store.consumer("c") as consumer:
        assert _places(consumer.poll()) == [("a", i) for i in range(5)]
        consumer.commit()
        _append(store, "b", notes(2))
        assert _places(consumer.poll()) == [("b", 0), ("b", 1)]
        assert consumer.poll() == []
    with store.consumer("c") as consumer:
        assert _places(consumer.poll()) == [("b", 0), ("b", 1)]
        assert consumer.cut() == {"a": 5, "b": 2}
        consumer.commit()
    with store.consumer("c") as consumer:
        assert consumer.poll() == []
    with store.consumer("d") as other:
        assert len(other.poll()) == 7


def test_a_commit_inside_a_round_is_exact(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A commit after a poll with a limit covers what was handed out and no more."""
    for lane in "ab":
        with store.writer(lane) as writer:
            for i in range(6):
                writer.append([*notes(2, i)] * 1).result(30)
        _append(store, lane, notes(600, 100))
    seen: list[Event] = []
    while not seen or len(seen) < sum(store.head()[lane] for lane in "ab"):
        with store.consumer("c") as consumer:
            seen += consumer.poll(1)
            consumer.commit()
    assert _places(seen) == [(lane, i) for lane in "ab" for i in range(612)]


def test_what_a_commit_records(store: Store, notes: Callable[..., list[Event]]) -> None:
    """One event in the lane `consumer.<name>`, naming the cut, the own lane before it included."""
    _append(store, "a", notes(3))
    with store.consumer("c") as consumer:
        consumer.commit()
        assert store.head() == {"a": 3}
        consumer.poll()
        consumer.commit()
        consumer.commit()
        consumer.poll()
        consumer.commit()
        _append(store, "a", notes(1))
        consumer.poll()
        consumer.commit()
    own = list(store.events({"consumer.c": 2}))
    assert store.head()["consumer.c"] == 2
    assert [e.record for e in own] == [
        CursorMoved("c", "a=3"),
        CursorMoved("c", format_cut({"a": 4, "consumer.c": 1})),
    ]
    for event in own:
        assert isinstance(event.record, CursorMoved)
        store.cut(event.record.cut)  # the store holds it


def test_cursors_wake_nobody(store: Store, notes: Callable[..., list[Event]]) -> None:
    """Two consumers that commit after every poll come to rest: cursors are not handed out."""
    _append(store, "a", notes(3))
    with store.consumer("one") as first, store.consumer("two") as second:
        for _ in range(3):
            for consumer in (first, second):
                consumer.poll()
                consumer.commit()
        assert store.head() == {"a": 3, "consumer.one": 1, "consumer.two": 1}
        _append(store, "a", [Event(CursorMoved("remote", "a=1"), "r")])
        assert (first.poll(), second.poll()) == ([], [])
        first.commit()
        assert store.head()["consumer.one"] == 1
        assert not first.wait(0)


def test_a_name_is_one_process_at_a_time(
    store: Store, fork_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """A second consumer of the name, here or in another process, is refused; after a close it is not."""
    code = "import sys\nfrom rollbook import store\nstore.open(sys.argv[1]).consumer('c').close()\n"
    with store.consumer("c"):
        with pytest.raises(LaneLockedError, match=r"consumer 'c' is running already .*process \d+"):
            store.consumer("c")
        second = fork_python(code, store.path)
        _, err = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"process {os.getpid()}" in err
        assert "give one of them another name" in err
        store.consumer("d").close()
    third = fork_python(code, store.path)
    assert third.communicate(timeout=60) == ("", "")
    assert third.returncode == 0


@pytest.mark.parametrize("name", ["", "Upper", "a b", "a/b", "x" * 55])
def test_names_that_are_no_lanes(store: Store, name: str) -> None:
    """A name that cannot be a lane's is refused, with the rule."""
    with pytest.raises(CutError, match="at most 54 lower-case letters"):
        store.consumer(name)
    assert consumer_lane("x" * 54) == "consumer." + "x" * 54


def test_a_cursor_may_stand_in_another_lane(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A consumer may keep its cursor in a lane with other events, of which it sees none."""
    _append(store, "a", notes(2))
    with store.writer("mine") as writer:
        writer.append([Event(CursorMoved("c", "a=1"), "r"), Event(CursorMoved("d", "a=2"), "r")]).result(30)
        for i in range(40):
            writer.append(notes(1, i)).result(30)
    with store.consumer("c", lane="mine") as consumer:
        assert _places(consumer.poll()) == [("a", 1)]
        consumer.commit()
    assert last_cursor(store.path, "mine", "c") == {"a": 2, "mine": 42}
    assert last_cursor(store.path, "mine", "d") == {"a": 2}
    assert last_cursor(store.path, "mine", "e") is None
    assert last_cursor(store.path, "never", "e") is None


def test_finding_the_cursor_reads_no_other_lane(store: Store, notes: Callable[..., list[Event]]) -> None:
    """Opening a consumer reads its own lane's end: damage elsewhere before the cursor is not even seen."""
    _append(store, "a", notes(4))
    with store.consumer("c") as consumer:
        consumer.poll()
        consumer.commit()
    _append(store, "a", notes(1, 4))
    path = store.path / "lanes" / "a" / "00000001.wal"
    data = bytearray(path.read_bytes())
    data[data.index(b"note 2")] ^= 1
    path.write_bytes(data)
    with store.consumer("c") as consumer:
        assert _places(consumer.poll()) == [("a", 4)]


def test_cursors_of_all_lanes(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A cursor is the union of what any lane says of it: sealed, removed, live, or the consumer's own."""
    cursors = Cursors(store.path)
    assert cursors.find("c") is None
    moved = [Event(CursorMoved("c", f"a={i}"), "r") for i in (1, 3)]
    with store.writer("serve", AppendSettings(segment_bytes=300)) as writer:
        for event in [*moved, *notes(1)]:
            writer.append([event]).result(30)
        list(seal_closed(store.path, "serve", SealSettings()))
        units = current_units(store.path, "serve")
        assert units[-1].next_seq >= 2
        remove_sealed_wal(store.path, "serve", units, 0)
        writer.append([Event(CursorMoved("d", "a=9"), "r")]).result(30)
    assert cursors.find("c") == Cursors(store.path).find("c") == {"a": 3}
    _append(store, "serve2", [Event(CursorMoved("c", "a=2,b=5"), "r")])
    assert cursors.find("c") == Cursors(store.path).find("c") == {"a": 3, "b": 5}
    _append(store, "a", notes(4))
    with store.consumer("c") as consumer:
        consumer.poll()
        consumer.commit()
    cursor = cursors.find("c")
    assert cursor == Cursors(store.path).find("c")
    assert cursor is not None
    assert (cursor["a"], cursor["b"]) == (4, 5)
    assert cursors.find("d") == {"a": 9}
    assert union({"a": 1, "b": 2}, {"b": 1, "c": 1}) == {"a": 1, "b": 2, "c": 1}


# kill -9 --------------------------------------------------------------------------------------------

CONSUMER = """
import os, sys
import orjson
from rollbook import store
from rollbook.store import format_cut

log, out = store.open(sys.argv[1]), open(sys.argv[2], "ab", buffering=0)
with log.consumer("c") as consumer:
    while True:
        events = consumer.poll(7)
        if events:
            line = {"events": [[e.lane, e.seq] for e in events], "cut": format_cut(consumer.cut())}
            out.write(orjson.dumps(line) + b"\\n")
            consumer.commit()
        elif os.path.exists(sys.argv[3]):
            break
        else:
            consumer.wait(0.5)
"""


def _of_lanes(cut: Mapping[str, int]) -> dict[str, int]:
    return {lane: count for lane, count in cut.items() if lane in "ab" and count}


def _begun(line: Any) -> dict[str, int]:
    """The cut before a batch."""
    first = dict(reversed(line["events"]))
    return _of_lanes(parse_cut(line["cut"]) | first)


@pytest.mark.crashes
def test_kill_9_at_any_moment_skips_nothing(
    store: Store,
    notes: Any,
    start_python: Any,
    tmp_path: Path,
) -> None:
    """Over many kills every event is handled, in order; one comes twice only if its commit was cut off."""
    out, end = tmp_path / "out", tmp_path / "end"
    out.touch()
    stop = threading.Event()

    def write() -> None:
        with store.writer("a") as a, store.writer("b") as b:
            i = 0
            while not stop.is_set():
                a.append(notes(2, i)).result(30)
                b.append(notes(1, i)).result(30)
                i += 1
                time.sleep(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    rng = random.Random(3)
    kills: list[int] = []
    try:
        for _ in range(6):
            process = start_python(CONSUMER, store.path, out, end)
            before = out.stat().st_size
            while out.stat().st_size == before:  # until it has handled something
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            time.sleep(rng.random() * 0.3)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            kills.append(out.read_bytes().count(b"\n"))
    finally:
        stop.set()
        writer.join()
    end.touch()
    process = start_python(CONSUMER, store.path, out, end)
    assert process.communicate(timeout=60)[1] == ""

    lines = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    head = {lane: count for lane, count in store.head().items() if lane in "ab"}
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    for number, line in enumerate(lines):
        if number in kills:
            # The last batch's commit is there or not, and the next process begins behind or before it.
            begun = _begun(line)
            assert begun in (before, after)
            after = begun
        before = dict(after)
        for lane, seq in line["events"]:
            assert seq == after.get(lane, 0), f"event {seq} of {lane} after {after}"
            after[lane] = seq + 1
        assert after == _of_lanes(parse_cut(line["cut"]))
    assert after == head
    assert len(lines) > 20


def test_a_commit_that_failed_is_made_once_the_disk_takes_it(
    store: Store, notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor stays where it was; the same consumer moves it when there is room again."""
    monkeypatch.setattr("rollbook.store.log.writer.MEND_S", 0.01)
    _append(store, "a", notes(5))
    with store.consumer("c") as consumer:
        assert len(consumer.poll()) == 5
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(full))
            with pytest.raises(WriteFailedError, match="No space"):
                consumer.commit()
            assert last_cursor(store.path, consumer_lane("c"), "c") is None
        deadline = time.monotonic() + 30
        while True:
            try:
                consumer.commit()
                break
            except WriteFailedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        _append(store, "a", notes(2, 5))
        assert len(consumer.poll()) == 2
        consumer.commit()
    with store.consumer("c") as again:
        assert again.poll() == []
