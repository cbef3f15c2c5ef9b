"""Consumers: tails whose position is recorded in the log.

A consumer's cursor is the cut of its last `cursor.moved` event in its own lane, by default
`consumer.<name>`, which holds nothing else: the cursor is found by reading one event, however
large the store is. Its lane's lock lets only one process at a time use a name.

Between commits events are handed out at least once: events that were handled but not committed
come again after a crash, and none is ever left out. A consumer that writes its output and
`cut()` together, in one transaction or one renamed file, gets exactly once: it skips the events
that `cut.holds` says it had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import orjson
import pyarrow.compute as pc

from rollbook.store.cut import LANE_NAME, Cut, format_cut, parse_cut
from rollbook.store.errors import CutError, LaneLockedError
from rollbook.store.events import CursorMoved, Event
from rollbook.store.events.codec import decode
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.tail import Filter, Tail
from rollbook.store.log.writer import LaneWriter
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, current_units
from rollbook.store.wal.files import closed_head, folders_of_lanes, lane_folder, read_watermark, without_lanes

LANE_PREFIX = "consumer."
RUN = "store"
"""The run that a consumer's cursor is recorded in: it reads all of them."""
NO_CURSORS = frozenset({CursorMoved.KIND})
"""Consumers skip cursors: two consumers that received each other's cursors would wake each other forever."""


def consumer_lane(name: str) -> str:
    """The lane that a consumer of this name writes.

    Raises:
        CutError: the name does not fit into a lane's.
    """
    lane = LANE_PREFIX + name
    if not name or not LANE_NAME.fullmatch(lane):
        raise CutError(
            f"consumer name {name!r}: use at most {63 - len(LANE_PREFIX)} lower-case letters, digits, '.', "
            "'_' and '-'"
        )
    return lane


class Consumer(AbstractContextManager["Consumer"]):
    """Hands out events after its cursor, of all lanes but its own; `commit` moves the cursor.

    Events of kind `cursor.moved` are passed over.

    Args:
        store: folder of the store.
        lane: where the cursor is recorded (default: the consumer's own).
        take: takes a lane for writing.

    Raises:
        LaneLockedError: another process is this consumer.
        CutError: the name is no lane name, or the cursor lies beyond what the store holds.
    """

    def __init__(
        self, store: Path, name: str, take: Callable[[str], LaneWriter], lane: str | None = None
    ) -> None:
        self.name, self.lane = name, lane or consumer_lane(name)
        try:
            self._writer = take(self.lane)
        except LaneLockedError as error:
            raise LaneLockedError(
                f"consumer {name!r} is running already ({error}); two processes never share a cursor: "
                "give one of them another name"
            ) from None
        try:
            start = _last_of_all(store, self.lane, name)
            self.lane = self._writer.lane
            own = frozenset({self.lane})
            wanted = Filter(without=NO_CURSORS, skip_lanes=own)
            self._tail = Tail(store, without_lanes(start, own), wanted)
        except BaseException:
            self._writer.close()
            raise
        self._own_events = self._writer.recovered.next_seq
        self._committed = True

    def poll(self, limit: int | None = None) -> list[Event]:
        """Events after those handed out: lane by lane, each in order; an empty list when there are none.

        Args:
            limit: about how many; the next poll continues from there.

        Raises:
            CorruptionError: a lane is damaged.
        """
        events = self._tail.poll(limit)
        self._committed = self._committed and not events
        return events

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` may have events, at most so many seconds; returns whether it may."""
        return self._tail.wait(timeout_s)

    def cut(self) -> dict[str, int]:
        """What has been handed out so far, committed or not; without the consumer's own lane."""
        return self._tail.cut()

    def commit(self) -> None:
        """Record that everything handed out is processed; durable when this returns.

        If nothing was handed out since the last commit, it records nothing.

        Raises:
            WriteFailedError: the cursor did not become durable; it is unchanged.
        """
        if self._committed:
            return
        # The cut includes the consumer's own lane, so that retention may drop its old cursors.
        cut = format_cut(self.cut() | {self.lane: self._own_events})
        moved = Event(CursorMoved(self.name, cut), RUN)
        self._own_events = self._writer.append([moved]).result() + 1
        self._committed = True

    def close(self) -> None:
        """Release the consumer's name. Uncommitted events are handed out again later."""
        self._writer.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Cursors:
    """Cursors of any consumer, whichever lanes they were recorded in. Threads may share it.

    A consumer has processed every cut that it committed, so its cursor is their union, whatever the order of
    lanes. The first call reads the small rows of all sealed units and the unsealed events, later calls only
    new events.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._cuts: dict[str, dict[str, int]] = {}

    def find(self, name: str) -> dict[str, int] | None:
        """The consumer's cursor, or None without one.

        Raises:
            CutError: the name is no consumer's.
            CorruptionError: the log is damaged.
        """
        own = _last_of_all(self._store, consumer_lane(name), name) or None
        with self._lock:
            for lane, end in closed_head(self._store).items():
                if not lane.startswith(LANE_PREFIX):
                    self._read(lane, end)
            elsewhere = self._cuts.get(name)
        return elsewhere if own is None else union(own, elsewhere or {})

    def _read(self, lane: str, end: int) -> None:
        at = self._seen.get(lane, 0)
        for unit in current_units(self._store, lane):
            if unit.next_seq > at and unit.dropped_us is None:
                rows = read_file(self._store, unit, MARKS, ["kind", "seq", "extra"])
                self._take(rows.filter(pc.greater_equal(rows["seq"], at)))
                at = unit.next_seq
        for batch in LaneReader(self._store, lane, at).poll(max(end, at)):
            self._take(batch)
        self._seen[lane] = max(end, at)

    def _take(self, rows: Any) -> None:
        for text in rows.filter(pc.equal(rows.column("kind"), CursorMoved.KIND)).column("extra").to_pylist():
            values = orjson.loads(text)
            name = values["consumer"]
            self._cuts[name] = union(self._cuts.get(name, {}), parse_cut(values["cut"]))


def union(first: Cut, second: Cut) -> dict[str, int]:
    """The smallest cut that holds both."""
    return {lane: max(first.get(lane, 0), second.get(lane, 0)) for lane in {*first, *second}}


def _last_of_all(store: Path, lane: str, name: str) -> dict[str, int]:
    """The consumer's cursor, wherever it ran: on another host its lane has that one's name behind it."""
    start: dict[str, int] = {}
    for other in folders_of_lanes(store):
        if other == lane or other.startswith(f"{lane}."):
            start = union(start, last_cursor(store, other, name) or {})
    return start


def last_cursor(store: Path, lane: str, name: str) -> dict[str, int] | None:
    """The cut of the consumer's last `cursor.moved` in a lane, read from its end; None without one.

    Raises:
        CorruptionError: the lane is damaged.
    """
    folder = lane_folder(store, lane)
    end = read_watermark(folder).next_seq if (folder / "WATERMARK").exists() else 0
    back = 1
    while end:
        start = max(end - back, 0)
        cursor: CursorMoved | None = None
        for batch in LaneReader(store, lane, start).poll(end):
            for event in decode(batch.filter(pc.equal(batch.column("kind"), CursorMoved.KIND)), lane):
                if isinstance(event.record, CursorMoved) and event.record.consumer == name:
                    cursor = event.record
        if cursor is not None:
            return parse_cut(cursor.cut)
        end, back = start, 16 * back
    return None
