"""The tail: each event once from any cut, at heads that are closed, while files come and go beneath it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbook.store import Event, Store
from rollbook.store.errors import CorruptionError, CutError, StoreError
from rollbook.store.events import CursorMoved, TurnFailed
from rollbook.store.log.tail import Filter
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.wal import files as marks
from rollbook.store.wal.files import segment_numbers, unpack_watermark

SMALL = AppendSettings(segment_bytes=4000, linger_ms=0)


def _places(events: Any) -> list[tuple[str, int]]:
    return [(e.lane, e.seq) for e in events]


# Heads ----------------------------------------------------------------------------------------------


def test_a_head_is_closed(
    store: Store, notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lanes answer each other while the reader is slow between two watermarks: no head ever holds an
    answer without what it answers, either way."""
    done = threading.Event()
    rng = random.Random(1)

    def talk() -> None:
        with store.writer("a", SMALL) as a, store.writer("b", SMALL) as b:
            for i in range(90):
                for writer in (a, b):
                    writer.append(notes(1, i)).result(30)
                    time.sleep(rng.random() * 0.01)
        done.set()

    def slowly(data: bytes) -> Any:
        time.sleep(0.001)
        return unpack_watermark(data)

    monkeypatch.setattr(marks, "unpack_watermark", slowly)
    talker = threading.Thread(target=talk)
    talker.start()
    seen = set()
    while not done.is_set():
        head = store.head()
        a, b = head.get("a", 0), head.get("b", 0)
        assert b <= a <= b + 1
        seen.add((a, b))
    talker.join()
    assert len(seen) > 20
    assert store.head() == {"a": 90, "b": 90}


def test_a_head_takes_as_many_passes_as_it_needs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of two passes that agree are the head; when none ever agree, the remedy is named."""
    passes = iter([{"a": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 1}, {"a": 3}])
    monkeypatch.setattr(marks._OpenMarks, "read", lambda _: next(passes))
    assert store.head() == {"a": 2, "b": 1}
    endless = iter(range(10**6))
    monkeypatch.setattr(marks._OpenMarks, "read", lambda _: {"a": next(endless)})
    with pytest.raises(StoreError, match=r"grow faster.*linger_ms"):
        store.head()


def test_a_lane_whose_watermark_is_gone_is_damage(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A lane with segments and no watermark is no empty lane; one that was never begun is."""
    with store.writer("a") as writer:
        writer.append(notes(1)).result(30)
    begun = store.path / "lanes" / "b"
    begun.mkdir()
    (begun / "WATERMARK").touch()
    (store.path / "lanes" / "c").mkdir()
    (store.path / "lanes" / "stray").touch()
    assert store.head() == {"a": 1}
    (store.path / "lanes" / "a" / "WATERMARK").unlink()
    with pytest.raises(CorruptionError, match="the watermark is missing"):
        store.head()


# Where it starts ------------------------------------------------------------------------------------


def test_nothing_before_the_start_is_read(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A tail from a cut works though earlier events, in its segment and before, are damaged."""
    with store.writer("a") as writer:
        writer.append(notes(3)).result(30)
    with store.writer("a") as writer:
        for i in range(3, 9):
            writer.append(notes(1, i)).result(30)
    folder = store.path / "lanes" / "a"
    for number, text in ((1, b"note 1"), (2, b"note 4")):
        path = folder / f"{number:08d}.wal"
        data = bytearray(path.read_bytes())
        data[data.index(text)] ^= 1
        path.write_bytes(data)
    with pytest.raises(CorruptionError):
        store.tail().poll()
    with pytest.raises(CorruptionError):
        store.tail({"a": 4}).poll()
    assert _places(store.tail({"a": 5}).poll()) == [("a", i) for i in range(5, 9)]


def test_a_start_beyond_the_store_is_refused(story_store: Store) -> None:
    """A cut that the store does not hold is a CutError that names both counts."""
    with pytest.raises(CutError, match=r"holds 19 events of lane 'serve', but the store has 18"):
        story_store.tail({"serve": 19})
    with pytest.raises(CutError, match=r"lane 'moon'.*the store has 0"):
        story_store.tail({"moon": 1})
    assert story_store.tail(story_store.head()).poll() == []


def test_polls_of_any_size_and_restarts_skip_nothing(store: Store, notes: Callable[..., list[Event]]) -> None:
    """With random limits, and a new tail from `cut()` again and again, each event comes once."""
    rng = random.Random(5)
    for lane in "abc":
        with store.writer(lane, SMALL) as writer:
            for i in range(30):
                writer.append(notes(rng.choice((1, 1, 3, 20)), i)).result(30)
    tail, seen = store.tail(), []
    while True:
        events = tail.poll(rng.choice((1, 2, 7, 50)))
        seen += events
        if tail.at_head:
            break
        if rng.random() < 0.3:
            tail = store.tail(tail.cut())
    assert _places(seen) == _places(store.events())
    assert tail.cut() == store.head()


def test_filters_pass_over_and_move_on(story_store: Store) -> None:
    """Kinds, kinds left out, runs and lanes are filtered; the cut moves over what was not wanted."""
    all_ = list(story_store.events())
    kinds = frozenset({"turn.failed", "step.planned"})
    tail = story_store.tail({}, Filter(kinds))
    assert _places(tail.poll()) == _places(e for e in all_ if e.kind in kinds)
    assert tail.cut() == story_store.head()
    rest = story_store.tail({}, Filter(without=kinds)).poll()
    assert _places(rest) == _places(e for e in all_ if e.kind not in kinds)
    assert story_store.tail({}, Filter(run="other")).poll() == []
    tail = story_store.tail({}, Filter(skip_lanes=frozenset({"serve"})))
    assert {e.lane for e in tail.poll()} == {"train"}
    assert tail.cut() == {"train": 8}


# While it waits -------------------------------------------------------------------------------------


def test_waiting_ends_with_an_event_of_any_lane(store: Store, notes: Callable[..., list[Event]]) -> None:
    """`wait` is false after its time, true soon after an append, to a known lane or a new one."""
    tail = store.tail()
    begun = time.monotonic()
    assert not tail.wait(0.1)
    assert 0.1 <= time.monotonic() - begun < 30
    for lane in ("a", "b", "a"):
        with store.writer(lane) as writer:
            timer = threading.Timer(0.15, lambda w=writer: w.append(notes(1)).result(30))
            timer.start()
            assert tail.wait(60)
            timer.join()
        assert len(tail.poll()) == 1
    assert not tail.wait(0)


def test_waiting_costs_little(story_store: Store) -> None:
    """A second of waiting takes less than half a second of CPU."""
    tail = story_store.tail(story_store.head())
    before = time.process_time()
    assert not tail.wait(1.0)
    assert time.process_time() - before < 0.5


def test_a_round_that_was_not_finished_is_something_to_poll(story_store: Store) -> None:
    """After a poll with a limit, `wait` does not wait, and the cut is inside the round."""
    tail = story_store.tail()
    tail.poll(1)
    assert not tail.at_head
    assert tail.wait(0)
    tail.poll()
    assert tail.at_head
    assert not tail.wait(0)


# While files come and go ----------------------------------------------------------------------------


def _write(store: Store, lane: str, count: int, notes: Any) -> None:
    for start in range(0, count, 100):  # several writers, one after the other
        with store.writer(lane, SMALL) as writer:
            for i in range(start, start + 100):
                writer.append(notes(1, i)).result(30)


def _seal(store: Store, lanes: str, done: threading.Event, errors: list[Exception]) -> None:
    while not done.is_set():
        try:
            for lane in lanes:
                if (store.path / "lanes" / lane / "WATERMARK").exists():
                    list(seal_closed(store.path, lane, SealSettings()))
                    remove_sealed_wal(store.path, lane, current_units(store.path, lane), 0)
        except Exception as error:
            errors.append(error)
            return
        time.sleep(0.02)


def test_each_event_once_while_lanes_roll_and_are_sealed_and_removed(
    store: Store, notes: Callable[..., list[Event]]
) -> None:
    """Slow, fast and late tails, over writers that roll and a sealer that removes: every event once."""
    count, lanes = 400, "ab"
    done, errors = threading.Event(), []  # type: ignore[var-annotated]
    sealer = threading.Thread(target=_seal, args=(store, lanes, done, errors))
    writers = [threading.Thread(target=_write, args=(store, lane, count, notes)) for lane in lanes]
    for thread in (sealer, *writers):
        thread.start()
    tails: list[tuple[Any, list[Event], float]] = [(store.tail(), [], pause) for pause in (0.0, 0.3)]
    try:
        while any(w.is_alive() for w in writers):
            for i, (tail, seen, pause) in enumerate(tails):
                seen += tail.poll(None if i else 30)
                time.sleep(pause)
    finally:
        for thread in writers:
            thread.join()
        done.set()
        sealer.join()
    assert errors == []
    assert current_units(store.path, "a")
    assert segment_numbers(store.path / "lanes" / "a")[0] > 1
    expected = [("a", i) for i in range(count)] + [("b", i) for i in range(count)]
    for tail, seen, _ in [*tails, (store.tail(), [], 0)]:
        while tail.wait(0):
            seen += tail.poll()
        assert sorted(_places(seen)) == expected
        of_a = [e for e in seen if e.lane == "a"]
        assert [e.seq for e in of_a] == list(range(count))
        assert [e.record.error for e in of_a if isinstance(e.record, TurnFailed)] == [
            f"note {i}" for i in range(count)
        ]


def test_a_listing_that_is_old_when_it_is_used(
    store: Store, notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments removed between listing and opening take nothing from what was not sealed."""
    from rollbook.store.log import reader as reader_module

    with store.writer("a", AppendSettings(segment_bytes=600)) as writer:
        for i in range(20):
            writer.append(notes(1, i)).result(30)
        list(seal_closed(store.path, "a", SealSettings()))
        units = current_units(store.path, "a")
        tail = store.tail({"a": units[-1].next_seq})
        real, calls = segment_numbers, []

        def list_then_remove(folder: Path) -> list[int]:
            numbers = real(folder)
            if not calls:
                calls.append(numbers)
                remove_sealed_wal(store.path, "a", units, 0)
            return numbers

        monkeypatch.setattr(reader_module, "segment_numbers", list_then_remove)
        assert _places(tail.poll()) == [("a", i) for i in range(units[-1].next_seq, 20)]
        assert len(calls[0]) > 8
        assert len(real(store.path / "lanes" / "a")) < 4


def test_cursors_are_events_like_others_to_a_tail(store: Store) -> None:
    """A plain tail hands out `cursor.moved` too."""
    with store.writer("a") as writer:
        writer.append([Event(CursorMoved("c", "a=0"), "r")]).result(30)
    assert [e.kind for e in store.tail().poll()] == ["cursor.moved"]
