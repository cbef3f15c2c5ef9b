"""The one writer of a lane: appends in groups, and says so only when the bytes are durable.

One thread collects what is waiting and encodes it as one frame; another (`lane.flusher`) writes it, calls
`fdatasync`, moves the watermark and resolves the futures, while the first encodes the next frame. Events of
one `append` share a frame, so they are all there after a crash or none is. After a failed write the lane
takes nothing more, and every pending future fails.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from rollbook.store.errors import WriteFailedError
from rollbook.store.events import Event, TurnCompleted
from rollbook.store.lane import files
from rollbook.store.lane.flusher import Disk, Flusher, RealDisk
from rollbook.store.lane.framer import Framer
from rollbook.store.lane.recovery import LaneState, recover_lane
from rollbook.store.lane.search import event_window
from rollbook.store.settings import AppendSettings

_Pending = tuple[Sequence[Event], "Future[int]"]


class _Group:
    """Appends that are committed together, until they are many or large."""

    def __init__(self, settings: AppendSettings) -> None:
        self.appends: list[_Pending] = []
        self._events, self._bytes = settings.group_events, settings.group_bytes

    def add(self, append: _Pending) -> None:
        """Take one more."""
        self.appends.append(append)
        self._events -= len(append[0])
        if self._events > 0:
            self._bytes -= _size(append[0])

    @property
    def full(self) -> bool:
        """Whether it is to be committed without waiting for more."""
        return self._events <= 0 or self._bytes <= 0


class LaneWriter:
    """Appends events to one lane. Threads may share it; processes may not.

    Args:
        store: folder of the store.
        store_id: its uuid, written into each segment.
        lane: the lane's name.
        settings: grouping and segment sizes.
        disk: what makes bytes durable.

    Raises:
        LaneLockedError: another process writes the lane.
        CorruptionError: acknowledged events of the lane are damaged.
    """

    def __init__(
        self,
        store: Path,
        store_id: str,
        lane: str,
        settings: AppendSettings | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.lane = lane
        self._settings = settings or AppendSettings()
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._failure: Exception | None = None
        self._closed = False
        self._crowded = False
        folder = files.lane_folder(store, lane)
        folder.mkdir(parents=True, exist_ok=True)
        files.fsync_folder(folder.parent)
        self._lock_fd = files.take_lock(
            folder / "LOCK",
            f"lane {lane!r} of {store} is being written by",
            "name another lane with --lane",
        )
        try:
            self.recovered: LaneState = recover_lane(store, lane)
            self._flusher = Flusher(folder, self.recovered.mark, disk or RealDisk(), self._note_failure)
            window = event_window(store, lane, self.recovered)
            self._framer = Framer(lane, store_id, self.recovered, window, self._settings)
            self._flusher.start()
            # A segment that was recovered is never written again: a fresh one starts clean.
            self._flusher.put(self._framer.begin_segment(), alone=True)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._thread = threading.Thread(target=self._run, name=f"lane-{lane}", daemon=True)
        self._thread.start()

    def append(self, events: Sequence[Event], future: Future[int] | None = None) -> Future[int]:
        """Append events together; the future gives the first one's sequence number once durable.

        An event whose id the lane already holds is not stored again: its old number counts.

        Args:
            future: an `append_future` that somebody waits for already; a new one without.

        The future raises WriteFailedError when the events did not become durable, and UnstorableError when
        one holds a value that has no stored form, or ValueError when there are none (the lane goes on).
        """
        future = append_future() if future is None else future
        with self._gate:
            if self._failure is not None or self._closed:
                reason = self._failure or "it is closed"
                future.set_exception(WriteFailedError(f"lane {self.lane!r}: {reason}"))
            elif not events:
                future.set_exception(ValueError("append needs at least one event"))
            else:
                self._queue.put((tuple(events), future))
        return future

    @property
    def failure(self) -> str | None:
        """Why the lane takes nothing more, or None."""
        return None if self._failure is None else str(self._failure)

    def close(self) -> None:
        """Commit what is pending and give the lane back. Safe to call twice."""
        with self._gate:
            first, self._closed = not self._closed, True
            if first:
                self._queue.put(None)
        self._thread.join()
        if first:
            self._flusher.close()
            os.close(self._lock_fd)

    def __enter__(self) -> LaneWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note_failure(self, error: Exception) -> None:
        with self._gate:
            self._failure = error

    # The encoding thread ----------------------------------------------------------------------

    def _run(self) -> None:
        open_ = True
        while open_:
            group, open_ = self._collect()
            if self._failure is not None:
                self._fail(group, self._failure)
                continue
            try:
                jobs = self._framer.jobs(group)
            except Exception as error:  # a fault of ours: nobody may wait for ever because of it
                self._note_failure(error)
                self._fail(group, error)
                continue
            for job in jobs:
                self._flusher.put(job, alone=self._queue.empty())

    def _collect(self) -> tuple[list[_Pending], bool]:
        """The next group, and whether more may follow; empty when a segment has grown too old."""
        try:
            first = self._queue.get(timeout=self._framer.seconds_until_old())
        except queue.Empty:
            return [], True
        if first is None:
            return [], False
        group = _Group(self._settings)
        group.add(first)
        # Whoever appends alone gains nothing by waiting for company.
        linger_s = self._settings.linger_ms / 1e3 if self._crowded else 0.0
        open_ = self._drain(group)
        if linger_s and open_ and not group.full:
            # Asleep, not waiting at the queue: to wake up for each append costs more than to encode it.
            time.sleep(linger_s)
            open_ = self._drain(group)
        self._crowded = len(group.appends) > 1
        return group.appends, open_

    def _drain(self, group: _Group) -> bool:
        """Move what is waiting into the group until it is full; whether more may follow."""
        while not group.full:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            group.add(item)
        return True

    def _fail(self, group: list[_Pending], error: Exception) -> None:
        for _, future in group:
            if not future.done():
                future.set_exception(WriteFailedError(f"lane {self.lane!r}: {error}"))


def append_future() -> Future[int]:
    """What an append resolves. It cannot be cancelled: an append cannot be taken back."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


def _size(events: Sequence[Event]) -> int:
    """Bytes of the events' arrays: what makes a group large, as far as it is cheap to know."""
    # Whatever a client appends, this must not fail: nobody would answer the futures of the group.
    turns = [r for e in events if isinstance(r := getattr(e, "record", None), TurnCompleted)]
    return sum(2 * _nbytes(t.completion_ids) + _nbytes(t.prompt_ids) for t in turns)


def _nbytes(array: object) -> int:
    return int(getattr(array, "nbytes", 0))
