"""Readers, a writer and the sealer at once: every answer is the fold at its cut."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.fakes.stories.records import turn_requested

from rollbook.store import Event, Store
from rollbook.store.events import BodyStored, TurnFailed
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_lane

SMALL = """
[append]
segment_bytes = 6000
body_bytes = 256
linger_ms = 0
[seal]
keep_wal_bytes = 10_000
compact_bytes = 8_000_000
"""
LONG = [letter * 600 for letter in "abc"]


def _event(i: int) -> Event:
    """Event `i`: every third one a request, whose long message is stored once a segment."""
    if i % 3:
        return Event(TurnFailed("t", f"u{i}", f"note {i}"), "r", event_id=f"id-{i:08}")
    ask = [{"role": "user", "content": LONG[i % 7 % 3]}, {"role": "user", "content": str(i)}]
    record = turn_requested("t", f"u{i}", request_id=f"r{i}", root_reason="first", messages=ask)
    return Event(record, "r", event_id=f"id-{i:08}")


def _check(events: list[Event], start: int) -> None:
    """The events are those from `start` on: none lost, none twice, none changed (bodies are in between)."""
    seqs = [event.seq for event in events]
    assert seqs == list(range(start, start + len(events)))
    ours = [event for event in events if not isinstance(event.record, BodyStored)]
    if not ours:
        return
    first = int(ours[0].event_id.removeprefix("id-"))
    assert [event.event_id for event in ours] == [f"id-{first + i:08}" for i in range(len(ours))]
    for event in ours:
        assert event.record == _event(int(event.event_id.removeprefix("id-"))).record


class _Threads:
    """Runs functions again and again until stopped; keeps how often, and the first error of any."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.rounds: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def add(self, name: str, act: Callable[[], object], pause_s: float) -> None:
        def run() -> None:
            try:
                while not self.stop.is_set():
                    act()
                    time.sleep(pause_s)
                    self.rounds[name] = self.rounds.get(name, 0) + 1
            except BaseException as error:
                self.error = self.error or error
                self.stop.set()

        self._threads.append(threading.Thread(target=run, name=name))

    def run(self, seconds: float, enough: Callable[[], bool], at_most: float = 120.0) -> None:
        """For so many seconds, and until there was enough: a busy machine takes longer for it."""
        for thread in self._threads:
            thread.start()
        begun = time.monotonic()
        self.stop.wait(seconds)
        while not enough() and time.monotonic() - begun < at_most and not self.stop.wait(0.25):
            pass
        self.stop.set()
        for thread in self._threads:
            thread.join(60)
        if self.error is not None:
            raise self.error


def _writing(store: Store, counter: Iterator[int]) -> Callable[[], None]:
    """Opens the lane, appends for a moment, closes it: so that it is also without a writer at times."""

    def act() -> None:
        with store.writer("a") as writer:
            for _ in range(40):
                writer.append([_event(next(counter)) for _ in range(7)]).result(30)

    return act


def _reading_from(store: Store) -> Callable[[], None]:
    """Reads from a place in the middle of the lane, slowly: files go while their events are handed out."""
    places = itertools.count(1)

    def act() -> None:
        end = store.head().get("a", 0)
        start = end * (next(places) % 10) // 10
        if not end:
            return
        events: list[Event] = []
        for event in store.events({"a": end}, {"a": start}):
            events.append(event)
            if len(events) % 500 == 3:
                time.sleep(0.02)
        _check(events, start)
        assert len(events) == end - start

    return act


def _reading_all(store: Store) -> Callable[[], None]:
    def act() -> None:
        cut = store.head()
        events = list(store.events(cut))
        _check(events, 0)
        assert len(events) == cut.get("a", 0)

    return act


def _verifying(store: Store) -> Callable[[], None]:
    def act() -> None:
        if "a" in store.lanes():
            result = verify_lane(store.path, "a")
            assert result.fault is None

    return act


@pytest.mark.more_but("1.0")
@pytest.mark.parametrize("seconds", [1.0, 6.0])
def test_every_answer_beside_a_sealer_is_the_fold_at_its_cut(store: Store, seconds: float) -> None:
    """While segments are sealed, merged and removed, reads, tails and verification agree with the writer."""
    (store.path / "store.toml").write_text(SMALL)
    counter = itertools.count()
    sealer = Sealer(store)
    tail, tailed = store.tail(), 0

    def follow() -> None:
        nonlocal tailed
        events = tail.poll()
        _check(events, tailed)
        tailed += len(events)

    def seal() -> None:
        report = sealer.run_once()
        assert report.damage == {}

    threads = _Threads()
    acts = {
        "write": _writing(store, counter),
        "seal": seal,
        "tail": follow,
        "read": _reading_all(store),
        "read from": _reading_from(store),
        "verify": _verifying(store),
    }
    for name, act in acts.items():
        # Readers that never rest leave the sealer no time, and have more to read the longer it takes.
        threads.add(name, act, 0.005 if name in ("seal", "tail") else 0.1)

    def merged() -> bool:
        return max((unit.generation for unit in current_units(store.path, "a")), default=0) > 1

    first = store.path / "lanes" / "a" / "00000001.wal"
    threads.run(seconds, lambda: threads.rounds.keys() == acts.keys() and merged() and not first.exists())
    assert set(threads.rounds) == {"write", "seal", "tail", "read", "read from", "verify"}
    follow()
    _check(list(store.events()), 0)
    assert tailed == store.head()["a"]
    # Something was merged, and WAL files were removed: otherwise nothing was tried.
    assert merged()
    assert not first.exists()


@pytest.mark.parametrize("moment", ["closed", "open"])
def test_bodies_are_found_after_their_file_is_gone(store: Store, moment: str) -> None:
    """A reader in the middle of a segment resolves earlier bodies though the file was sealed and removed."""
    (store.path / "store.toml").write_text("[append]\nbody_bytes = 256\n[seal]\nkeep_wal_bytes = 0\n")
    with store.writer("a") as writer:
        for i in range(0, 30, 3):
            writer.append([_event(i)]).result(30)
    end = store.head()["a"]
    if moment == "open":
        events: Any = store.events({"a": end}, {"a": end - 2})
        Sealer(store).run_once()
        assert [e.event_id for e in events] == ["id-00000024", "id-00000027"]
        return
    from rollbook.store.events.codec import decode
    from rollbook.store.log.reader import LaneReader

    reader = LaneReader(store.path, "a", end - 2)
    batch = next(reader.poll())
    Sealer(store).run_once()
    assert list((store.path / "lanes" / "a").glob("*.wal")) == []
    records = [event.record for event in decode(batch, "a", reader.body)]
    assert records == [_event(24).record, _event(27).record]
