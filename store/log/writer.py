"""The single writer of a lane: commits appends in groups, and acknowledges them once they are durable.

One thread collects waiting appends and encodes them as one frame; another (`wal.flusher`) writes
it, calls `fdatasync`, moves the watermark and resolves the futures, while the first encodes the
next frame. Events of one `append` share a frame, so after a crash either all of them are there
or none is.

After a failed write every pending future fails, and so do later appends. Meanwhile the writer
tries about every second whether a file can be written again, through a new descriptor. If so, it
does what a new writer would: it recovers the lane, whose lock it still holds, begins a new
segment with a new framer and flusher, and accepts appends again. If recovery finds damage, it
never accepts appends again.

Events are looked up by id, so that none is stored twice.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.errors import CorruptionError, FencedError, WriteFailedError
from rollbook.store.events import Event, TurnCompleted
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.recovery import recover_lane
from rollbook.store.permissions import make_folder
from rollbook.store.safe_paths import fsync_folder
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, while_replaced
from rollbook.store.settings import AppendSettings
from rollbook.store.wal import files
from rollbook.store.wal.files import lane_folder, segment_path
from rollbook.store.wal.flusher import Acknowledged, Disk, Flusher, RealDisk, resolve
from rollbook.store.wal.frame import BadFrameError
from rollbook.store.wal.framer import REMEMBERED, EventWindow, Framer
from rollbook.store.wal.segment import LaneState, segment_batches

_Pending = tuple[Sequence[Event], "Future[int]"]
MEND_S = 1.0
"""Minimum delay before each attempt to resume after a failed write."""
REST = 10
"""The delay is also at least this many times the duration of the last attempt: recovery reads all unsealed
segments."""
PROBE_BYTES = 1 << 20
"""Free bytes required before an attempt, if more than the failed write: with less it would fail again."""

logger = logging.getLogger(__name__)


class Shipment(Protocol):
    """What carries a lane to other hosts while a writer has it."""

    @property
    def waiting(self) -> str | None:
        """What acknowledgements wait for, or None."""

    def acknowledge(self, mark: files.Watermark, acknowledged: Acknowledged) -> None:
        """Resolve the futures of what is durable here, once it may count as acknowledged."""

    def close(self) -> None:
        """Carry on what is durable, and end."""


Ship = Callable[[str, Callable[[FencedError], None]], Shipment]
"""Called with a lane, and with what is to be called when another host has ended it."""


class _Signal(enum.Enum):
    """What the encoding thread gets beside appends."""

    CLOSE = enum.auto()
    FAILED = enum.auto()


class _Group:
    """Appends that are committed together, until they are many or large."""

    def __init__(self, settings: AppendSettings) -> None:
        self.appends: list[_Pending] = []
        self.callers = 0
        """Number of calls that added appends."""
        self._events, self._bytes = settings.group_events, settings.group_bytes

    def add(self, appends: Sequence[_Pending]) -> None:
        """Take what one caller handed over."""
        self.callers += 1
        for append in appends:
            self.appends.append(append)
            self._events -= len(append[0])
            if self._events > 0:
                self._bytes -= _size(append[0])

    @property
    def full(self) -> bool:
        """Whether it is to be committed without waiting for more."""
        return self._events <= 0 or self._bytes <= 0


class LaneWriter(contextlib.AbstractContextManager["LaneWriter"]):
    """Appends events to one lane. Threads may share it; processes may not.

    Args:
        store: folder of the store.
        store_id: its uuid, written into each segment.
        lane: the lane's name.
        settings: grouping and segment sizes.
        disk: what makes bytes durable.
        ship: begins to carry the lane to other hosts, once its lock is held and it is recovered.

    Raises:
        FencedError: another host has ended the lane.
        LaneLockedError: another process writes the lane.
        CorruptionError: acknowledged events of the lane are damaged.
        WriteFailedError: its files cannot be read or written.
    """

    def __init__(
        self,
        store: Path,
        store_id: str,
        lane: str,
        settings: AppendSettings | None = None,
        disk: Disk | None = None,
        ship: Ship | None = None,
    ) -> None:
        self.lane = lane
        self._shipment: Shipment | None = None
        self.spells = 0
        """How often it had to stop taking appends."""
        self.fenced: FencedError | None = None
        """That another host has ended the lane."""
        self._store, self._store_id, self._disk = store, store_id, disk or RealDisk()
        self._settings = settings or AppendSettings()
        self._queue: queue.SimpleQueue[tuple[_Pending, ...] | _Signal] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._failure: Exception | None = WriteFailedError("it has not begun")
        self._damaged = False
        self._alone = True
        """Whether no other process can have written the lane since its lock was taken."""
        self._next_try = 0.0
        self._closed = False
        self._crowded = False
        folder = files.lane_folder(store, lane)
        make_folder(folder)
        fsync_folder(folder.parent)
        self._lock_fd = self._take_lock()
        try:
            self.recovered: LaneState = recover_lane(store, lane)
            self._ship_as(ship)
            self._framer, self._flusher = self._begin(self.recovered)
        except BaseException as error:
            if self._shipment is not None:
                self._shipment.close()
            os.close(self._lock_fd)
            if isinstance(error, OSError) and not isinstance(error, FencedError):
                text = f"lane {lane!r} of {store} cannot be begun: {error}; mend that and begin again"
                raise WriteFailedError(text) from error
            raise
        self._failure = None
        # The first array that pyarrow makes in a process makes it look for pandas, and import it: now, not
        # while a caller waits for an append.
        pa.array([], pa.int8())
        self._thread = threading.Thread(target=self._run, name=f"lane-{lane}", daemon=True)
        self._thread.start()

    def _ship_as(self, ship: Ship | None) -> None:
        """Begin to carry the recovered lane to other hosts, if it is."""
        if ship is not None:
            files.write_watermark(files.lane_folder(self._store, self.lane), self.recovered.mark)
            self._shipment = ship(self.lane, self._give_up)
            self._shipment.acknowledge(self.recovered.mark, [])

    def _take_lock(self) -> int:
        return files.take_lock(
            files.lane_folder(self._store, self.lane) / "LOCK",
            f"lane {self.lane!r} of {self._store} is being written by",
            "name another lane with --lane",
        )

    def _hold_lock(self) -> None:
        """Check that the held lock is still the lane's: its disk may have been mounted anew.

        Raises:
            LaneLockedError: another process writes the lane by now.
        """
        there = (files.lane_folder(self._store, self.lane) / "LOCK").stat()
        if not os.path.samestat(there, os.fstat(self._lock_fd)):
            self._alone = False
            before, self._lock_fd = self._lock_fd, self._take_lock()
            os.close(before)

    def _recovered(self, acknowledged: files.Watermark) -> LaneState:
        """The lane's state after recovery, which holds everything acknowledged.

        Raises:
            CorruptionError: it does not, or another process has written it meanwhile.
        """
        state = recover_lane(self._store, self.lane, acknowledged if self._alone else None)
        if state.next_seq != acknowledged.next_seq:
            raise CorruptionError(
                f"lane {self.lane!r} holds {state.next_seq} events, and its writer has acknowledged "
                f"{acknowledged.next_seq}: another process has written it meanwhile; restart this one"
            )
        self._alone = True
        return state

    def _begin(self, state: LaneState) -> tuple[Framer, Flusher]:
        """Begin a fresh segment for all further writes: a recovered segment is never written again.

        Raises:
            OSError: it cannot be begun.
        """
        folder = files.lane_folder(self._store, self.lane)
        acknowledge = resolve if self._shipment is None else self._shipment.acknowledge
        flusher = Flusher(folder, state.mark, self._disk, self._note_failure, acknowledge)
        try:
            window = event_window(self._store, self.lane, state)
            framer = Framer(self.lane, self._store_id, state, window, self._settings)
            flusher.start()
            flusher.put(framer.begin_segment(), alone=True)
            if flusher.failure is not None:
                raise flusher.failure.__cause__ or flusher.failure
        except BaseException:
            flusher.close()
            raise
        return framer, flusher

    def append(self, events: Sequence[Event], future: Future[int] | None = None) -> Future[int]:
        """Append events together; the future gives the first one's sequence number once durable.

        An event whose id the lane already holds is not stored again: its old number counts.

        Args:
            future: an `append_future` that a caller waits for already; None makes a new one.

        The future raises WriteFailedError when the events did not become durable, and UnstorableError when
        one holds a value that has no stored form, or ValueError when there are none (the lane goes on).
        """
        future = append_future() if future is None else future
        self.append_each([(events, future)])
        return future

    def append_each(self, appends: Sequence[_Pending]) -> None:
        """Append several, each as by `append`, but handed over in one go: they are committed together.

        Args:
            appends: events, and an `append_future` that somebody waits for.
        """
        with self._gate:
            if self._failure is not None or self._closed:
                reason = self._failure or "it is closed"
                for _, future in appends:
                    future.set_exception(self._refusal(reason))
                return
            accepted = tuple((tuple(events), future) for events, future in appends if events)
            if accepted:
                self._queue.put(accepted)
            for events, future in appends:
                if not events:
                    future.set_exception(ValueError("append needs at least one event"))

    @property
    def failure(self) -> str | None:
        """Why the lane takes nothing now, or None."""
        return None if self._failure is None else str(self._failure)

    @property
    def waiting(self) -> str | None:
        """What appends wait for, such as a free descriptor, or a medium that is away; or None."""
        return self._flusher.waiting or (None if self._shipment is None else self._shipment.waiting)

    def close(self) -> None:
        """Commit what is pending and give the lane back. Safe to call twice."""
        with self._gate:
            first, self._closed = not self._closed, True
            if first:
                self._queue.put(_Signal.CLOSE)
        self._thread.join()
        if first:
            self._flusher.close()
            if self._shipment is not None:
                self._shipment.close()
            os.close(self._lock_fd)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_up(self, error: FencedError) -> None:
        """Take no more appends, ever: another host has ended the lane."""
        self._damaged, self.fenced = True, error
        self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Take no more appends."""
        with self._gate:
            if self._failure is None:
                self.spells += 1
                self._next_try = time.monotonic() + MEND_S
                self._queue.put(_Signal.FAILED)
                logger.warning("%s", error)
            self._failure = error

    # The encoding thread ----------------------------------------------------------------------

    def _run(self) -> None:
        open_ = True
        while open_:
            group = _Group(self._settings)
            try:
                open_ = self._collect(group)
                if self._failure is None:
                    self._commit(group)
            except Exception as error:  # a bug: fail the futures, so that no caller waits forever
                self._note_failure(error)
            if (failure := self._failure) is not None:
                self._fail(group, failure)
                if open_ and not self._damaged and time.monotonic() >= self._next_try:
                    self._mend()

    def _commit(self, group: _Group) -> None:
        """Hand the group to the flusher, which resolves its futures from then on."""
        for job in self._framer.jobs(group.appends):
            handed_over = {future for future, _ in job.acknowledged}
            group.appends = [append for append in group.appends if append[1] not in handed_over]
            self._flusher.put(job, alone=self._queue.empty())

    def _collect(self, group: _Group) -> bool:
        """Fill the group, and say whether more may follow; it stays empty if there is something
        else to do."""
        try:
            first = self._queue.get(timeout=self._idle_s())
        except queue.Empty:
            return True
        if isinstance(first, _Signal):
            return first is not _Signal.CLOSE
        group.add(first)
        # A single appender gains nothing from waiting for a larger group.
        linger_s = self._settings.linger_ms / 1e3 if self._crowded else 0.0
        open_ = self._drain(group)
        if linger_s and open_ and not group.full:
            # Sleeps instead of waiting on the queue: waking up for each append costs more than encoding it.
            time.sleep(linger_s)
            open_ = self._drain(group)
        self._crowded = group.callers > 1
        return open_

    def _idle_s(self) -> float | None:
        """How long to wait for an append: until the segment is too old, or the lane may be tried again."""
        if self._failure is None:
            return self._framer.seconds_until_old()
        return None if self._damaged else max(self._next_try - time.monotonic(), 0.0)

    def _drain(self, group: _Group) -> bool:
        """Move what is waiting into the group until it is full; whether more may follow."""
        while not group.full:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return True
            if isinstance(item, _Signal):
                return item is not _Signal.CLOSE
            group.add(item)
        return True

    def _fail(self, group: _Group, error: Exception) -> None:
        for _, future in group.appends:
            if not future.done():
                future.set_exception(self._refusal(error))

    def _refusal(self, reason: object) -> Exception:
        """The error of an append that is not taken."""
        return self.fenced or WriteFailedError(f"lane {self.lane!r}: {reason}")

    def _mend(self) -> None:
        """Resume, if the lane's files can be written again."""
        begun = time.monotonic()
        try:
            self._flusher.close()
            room = max(self._flusher.wanted, PROBE_BYTES)
            self._disk.probe(files.lane_folder(self._store, self.lane), room)
            self._hold_lock()
            state = self._recovered(self._flusher.mark)
            framer, flusher = self._begin(state)
        except CorruptionError as error:
            self._damaged = True
            self._note_failure(error)
            logger.error("lane %s takes nothing more: %s", self.lane, error)
        except Exception as error:
            now = time.monotonic()
            self._next_try = now + max(MEND_S, REST * (now - begun))
            logger.debug("lane %s cannot go on yet: %s", self.lane, error)
        else:
            with self._gate:
                self._framer, self._flusher, self._failure = framer, flusher, None
            logger.warning("lane %s goes on at event %d", self.lane, state.next_seq)


def append_future() -> Future[int]:
    """The future of an append. It cannot be cancelled: an append cannot be taken back."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


def _size(events: Sequence[Event]) -> int:
    """Bytes of the events' arrays: the part of a group's size that is cheap to compute."""
    # This must not fail on any value: an exception here would leave the group's futures unresolved.
    turns = [r for e in events if isinstance(r := getattr(e, "record", None), TurnCompleted)]
    return sum(2 * _nbytes(t.completion_ids) + _nbytes(t.prompt_ids) for t in turns)


def _nbytes(array: object) -> int:
    return int(getattr(array, "nbytes", 0))


def event_window(store: Path, lane: str, state: LaneState) -> EventWindow:
    """The window over a recovered lane, filled with its newest event ids."""
    window = EventWindow(lambda event_id: find_event(store, lane, event_id))
    newest = _unsealed_ids(store, lane, state)
    while_replaced(store, lane, lambda units: _add_sealed_ids(store, units, newest))
    ids = [(event_id, seq) for seq, event_id in sorted(newest.items())]
    window.preload(ids, complete=len(ids) == state.next_seq)
    return window


def _unsealed_ids(store: Path, lane: str, state: LaneState) -> dict[int, str]:
    """Sequence number -> id of the newest events of the recovered segments, at least `REMEMBERED` of them."""
    ids: dict[int, str] = {}
    for info in reversed(state.segments):
        if len(ids) >= REMEMBERED:
            return ids
        # Sealed and removed since they were recovered? Then a unit has them.
        with contextlib.suppress(FileNotFoundError):
            ids |= _segment_ids(store, lane, info.number, info.bytes)
    return ids


def _add_sealed_ids(store: Path, units: list[Unit], ids: dict[int, str]) -> None:
    """Add events of the newest units until `REMEMBERED` are found."""
    for unit in reversed(units):
        if len(ids) >= REMEMBERED or unit.dropped_us is not None:
            return
        if unit.remote is not None:
            # Writers do not wait for object storage while the WAL files are kept.
            with contextlib.suppress(FileNotFoundError, BadFrameError):
                for segment in unit.segments:
                    ids |= _segment_ids(store, unit.lane, segment.number, segment.bytes)
                continue
        first = unit.next_seq - (REMEMBERED - len(ids))
        for name in (TURNS, MARKS):
            table = read_file(store, unit, name, ["seq", "event_id"])
            table = table.filter(pc.greater_equal(table["seq"], first))
            ids |= zip(table["seq"].to_pylist(), table["event_id"].to_pylist(), strict=True)


def _segment_ids(store: Path, lane: str, number: int, stop: int) -> dict[int, str]:
    id_of: dict[int, str] = {}
    for batch in segment_batches(segment_path(lane_folder(store, lane), number), stop):
        seqs, ids = (batch.column(name).to_pylist() for name in ("seq", "event_id"))
        id_of |= zip(seqs, ids, strict=True)
    return id_of


def find_event(store: Path, lane: str, event_id: str) -> int | None:
    """The sequence number of an event in the whole lane, or None. Reads every id of it."""
    return while_replaced(store, lane, lambda units: _find(store, lane, event_id, units))


def _find(store: Path, lane: str, event_id: str, units: list[Unit]) -> int | None:
    units = [unit for unit in units if unit.dropped_us is None]
    for unit in reversed(units):
        for name in (TURNS, MARKS):
            table = read_file(store, unit, name, ["event_id", "seq"])
            match = table.filter(pc.equal(table["event_id"], event_id))
            if match.num_rows:
                return int(match["seq"][0].as_py())
    reader = LaneReader(store, lane, units[-1].next_seq if units else 0)
    for batch in reader.poll():
        at = pc.index(batch.column("event_id"), event_id).as_py()
        if at >= 0:
            return int(batch.column("seq")[at].as_py())
    return None
