"""The one writer of a lane: appends in groups, and says so only when the bytes are durable.

A thread collects what is waiting, encodes it as one Arrow frame, writes it, calls `fdatasync`, moves
the watermark and then resolves the futures. Events of one `append` share a frame, so they are all
there after a crash or none is. After any failed write the lane takes nothing more: every pending
future fails, and fsync is never tried again on that descriptor (its dirty pages may be gone).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollbook.store.codec import encode
from rollbook.store.errors import WriteFailedError
from rollbook.store.events import Event
from rollbook.store.lane import files
from rollbook.store.lane.files import Watermark, segment_path
from rollbook.store.lane.frame import BATCH_FRAME, HEADER_FRAME, encode_frame
from rollbook.store.lane.recovery import LaneState, recover_lane
from rollbook.store.schema import LOG_SCHEMA

_Pending = tuple[Sequence[Event], "Future[int]"]


class LaneWriter:
    """Appends events to one lane. Threads may share it; processes may not.

    Args:
        store: folder of the store.
        store_id: its uuid, written into each segment.
        lane: the lane's name.
        linger_s: how long a group may wait for company; 0 commits at once what is there.
        group_events: a group is committed at once when it holds this many events.
        segment_bytes: a segment is closed when it has grown beyond this.

    Raises:
        LaneLockedError: another process writes the lane.
        CorruptionError: acknowledged events of the lane are damaged.
    """

    def __init__(
        self,
        store: Path,
        store_id: str,
        lane: str,
        *,
        linger_s: float = 0.0,
        group_events: int = 512,
        segment_bytes: int = 64 << 20,
    ) -> None:
        self.lane = lane
        self._folder = files.lane_folder(store, lane)
        self._store_id = store_id
        self._linger_s, self._group_events = linger_s, group_events
        self._segment_bytes = segment_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        files.fsync_folder(self._folder.parent)
        self._lock_fd = files.take_lock(
            self._folder / "LOCK",
            f"lane {lane!r} of {store} is being written by",
            "name another lane with --lane",
        )
        self._fd = self._watermark_fd = -1
        self._mark = Watermark(0, 0, 0)
        try:
            self.recovered: LaneState = recover_lane(self._folder)
            self._open_files(self.recovered)
        except BaseException:
            self._close_files()
            raise
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"lane-{lane}", daemon=True)
        self._thread.start()

    def append(self, events: Sequence[Event]) -> Future[int]:
        """Append events together; the future gives the first one's sequence number once durable.

        The future raises WriteFailedError when the events did not become durable, and ValueError when
        there are none, or one holds a value that has no stored form (the lane goes on).
        """
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # an append cannot be taken back
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
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()
        self._close_files()

    def __enter__(self) -> LaneWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The writer thread ------------------------------------------------------------------------

    def _run(self) -> None:
        open_ = True
        while open_:
            group, open_ = self._collect()
            if not group:
                continue
            try:
                self._commit(group)
            except Exception as error:
                self._fail(group, error)
                return

    def _collect(self) -> tuple[list[_Pending], bool]:
        """The next group, and whether more may follow."""
        first = self._queue.get()
        if first is None:
            return [], False
        group, count = [first], len(first[0])
        deadline = time.monotonic() + self._linger_s
        while count < self._group_events:
            wait = deadline - time.monotonic()
            try:
                item = self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                return group, False
            group.append(item)
            count += len(item[0])
        return group, True

    def _commit(self, group: list[_Pending]) -> None:
        first_seq = self._next_seq
        try:
            batch = _encode(group, first_seq)
        except Exception:
            group = _encodable(group)  # one client's bad value is no reason to stop the lane
            if not group:
                return
            batch = _encode(group, first_seq)
        if self._offset >= self._segment_bytes:
            self._start_segment(self._segment + 1)
        self._write_frame(BATCH_FRAME, batch.serialize(), first_seq, batch.num_rows)
        self._next_seq += batch.num_rows
        self._move_watermark()
        for part, future in group:
            future.set_result(first_seq)
            first_seq += len(part)

    def _fail(self, group: list[_Pending], error: Exception) -> None:
        message = (
            f"lane {self.lane!r}: writing {segment_path(self._folder, self._segment)} failed "
            f"({error}); events that were not acknowledged are not in the log. Mend the disk and "
            "restart: recovery cuts off the unfinished frame"
        )
        self._cut_unacknowledged()
        with self._gate:
            self._failure = error
            rest: list[_Pending] = []
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._queue.get_nowait()
                    if item is not None:
                        rest.append(item)
        for _, future in group + rest:
            if not future.done():
                future.set_exception(WriteFailedError(message))

    def _cut_unacknowledged(self) -> None:
        """Drop what the failed write left: whole in the page cache, it may not be on the disk."""
        keep = self._mark.offset if self._mark.segment == self._segment else 0
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, keep)

    # Files ------------------------------------------------------------------------------------

    def _open_files(self, state: LaneState) -> None:
        self._next_seq, self._chain = state.next_seq, state.chain
        self._watermark_fd = os.open(self._folder / "WATERMARK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not state.segments:
            self._segment, self._offset = 0, 0
            self._move_watermark()
            os.fsync(self._watermark_fd)  # later ones overwrite its 32 bytes in place
            files.fsync_folder(self._folder)
        # A segment that was recovered is never written again: a fresh one starts clean.
        self._start_segment((state.segments[-1].number if state.segments else 0) + 1)
        self._move_watermark()

    def _start_segment(self, number: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        path = segment_path(self._folder, number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self._segment, self._offset = number, 0
        metadata = {"lane": self.lane, "segment": str(number), "store": self._store_id}
        header = LOG_SCHEMA.with_metadata(metadata).serialize()
        self._write_frame(HEADER_FRAME, header, self._next_seq, 0)
        files.fsync_folder(self._folder)

    def _write_frame(self, kind: int, payload: Any, first_seq: int, count: int) -> None:
        buffers, chain = encode_frame(kind, payload, first_seq, count, self._chain)
        self._offset += _write_all(self._fd, buffers)
        os.fdatasync(self._fd)
        self._chain = chain

    def _move_watermark(self) -> None:
        mark = Watermark(self._segment, self._offset, self._next_seq)
        os.pwrite(self._watermark_fd, mark.pack(), 0)
        self._mark = mark

    def _close_files(self) -> None:
        for fd in (self._fd, self._watermark_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._watermark_fd = self._lock_fd = -1


def _encode(group: list[_Pending], first_seq: int) -> pa.RecordBatch:
    return encode([event for part, _ in group for event in part], first_seq)


def _encodable(group: list[_Pending]) -> list[_Pending]:
    """The appends that have a stored form; the futures of the others get a ValueError."""
    good: list[_Pending] = []
    for part, future in group:
        try:
            encode(part, 0)
        except Exception as error:
            future.set_exception(ValueError(f"an event cannot be stored: {error}"))
        else:
            good.append((part, future))
    return good


def _write_all(fd: int, buffers: list[Any]) -> int:
    """Write all buffers, going on after short writes; the number of bytes written."""
    total = sum(memoryview(b).nbytes for b in buffers)
    written = os.writev(fd, buffers)
    if written < total:
        rest = memoryview(b"".join(bytes(b) for b in buffers))
        while written < total:
            written += os.write(fd, rest[written:])
    return total
