"""The half of a lane's writer that touches the disk: write, `fdatasync`, watermark, acknowledge.

Bytes are written by the thread that encoded them; another one syncs what has been written by then, so that
the next frame is encoded and written during the sync of the one before. Where nothing else waits, the first
thread syncs too: to wake another one costs more than it saves. After any failed call nothing more is
acknowledged: what comes is failed, and fsync is never tried again on that descriptor (its dirty pages may
be gone).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from rollbook.store.errors import WriteFailedError
from rollbook.store.lane.files import Watermark, fsync_folder, segment_path

AHEAD = 2
"""Jobs that may be written and not yet synced: enough to keep the disk busy, and groups grow meanwhile."""

Acknowledged = list[tuple["Future[int]", int]]
"""Futures and the sequence numbers they get once the frame is durable."""


class Disk(Protocol):
    """The calls that make bytes durable; a test puts one that fails in its place."""

    def open(self, path: Path) -> int:
        """A descriptor that appends to a new file."""

    def write(self, fd: int, buffers: list[Any]) -> int:
        """Write some of the buffers' bytes, in order; how many."""

    def sync(self, fd: int) -> None:
        """Return once the descriptor's bytes are on the disk."""

    def sync_folder(self, folder: Path) -> None:
        """Return once the folder's entries are."""


class RealDisk:
    """The operating system's calls."""

    def open(self, path: Path) -> int:
        """A descriptor that appends to a new file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(path, flags, 0o644)

    def write(self, fd: int, buffers: list[Any]) -> int:
        """Write some of the buffers' bytes, in order; how many."""
        return os.writev(fd, buffers)

    def sync(self, fd: int) -> None:
        """`fdatasync`: the bytes and the file's length."""
        os.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        """`fsync` of the folder."""
        fsync_folder(folder)


@dataclass(frozen=True, slots=True)
class Job:
    """Frames to make durable together.

    Attributes:
        buffers: empty where every event is in the lane already.
        new_segment: number of a segment to begin first, or None; then `buffers` begin with its header frame.
        next_seq: of the lane, once these are durable.
    """

    buffers: list[Any]
    next_seq: int
    new_segment: int | None = None
    acknowledged: Acknowledged = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment that is being written."""

    number: int
    fd: int


@dataclass(frozen=True, slots=True)
class _Written:
    """A job whose bytes the operating system has, or why it does not. The bytes themselves are let go."""

    acknowledged: Acknowledged
    next_seq: int
    bytes: bool
    """Whether there were any."""
    segment: _Segment
    end: int
    """Of the segment's bytes."""
    error: Exception | None


class Flusher:
    """Takes jobs in order and makes them durable; `on_failure` is called once, with the first error."""

    def __init__(
        self, folder: Path, mark: Watermark, disk: Disk, on_failure: Callable[[Exception], None]
    ) -> None:
        self._folder, self._disk, self._on_failure = folder, disk, on_failure
        # Of the thread that writes:
        self._segment, self._end = _Segment(mark.segment, -1), mark.offset
        self._refused: Exception | None = None
        self._handed_over = 0
        # Of the thread that syncs, which is the writing one while the other has nothing to do:
        self._mark = mark
        self._durable = _Segment(mark.segment, -1)
        self._synced = 0
        self._failure: WriteFailedError | None = None
        # Between them:
        self._writing = threading.Lock()
        self._room = threading.Semaphore(AHEAD)
        self._queue: queue.SimpleQueue[_Written | None] = queue.SimpleQueue()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._watermark_fd = os.open(folder / "WATERMARK", flags, 0o644)
        self._thread = threading.Thread(target=self._run, name=f"flush-{folder.name}", daemon=True)

    def start(self) -> None:
        """Write the watermark as it is, durably (later ones overwrite its bytes in place), and begin."""
        os.pwrite(self._watermark_fd, self._mark.pack(), 0)
        os.fsync(self._watermark_fd)
        fsync_folder(self._folder)
        self._thread.start()

    def put(self, job: Job, *, alone: bool = False) -> None:
        """Write a job, and see to it that it is synced; waits while too many are not.

        Args:
            alone: nothing else is to be done meanwhile, so the caller may as well wait for the sync.
        """
        if alone and self._handed_over == self._synced:
            self._finish([self._write(job)])
            return
        self._room.acquire()
        self._handed_over += 1
        self._queue.put(self._write(job))

    def close(self) -> None:
        """Do what was handed over, and close the files. Call once."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()
        for fd in {self._durable.fd, self._segment.fd, self._watermark_fd} - {-1}:
            os.close(fd)

    # The thread that writes -------------------------------------------------------------------

    def _write(self, job: Job) -> _Written:
        with self._writing:
            error = self._failure or self._refused
            if error is None and job.buffers:
                try:
                    self._write_out(job)
                except Exception as caught:
                    error = self._refused = caught
            written = bool(job.buffers), self._segment, self._end, error
            return _Written(job.acknowledged, job.next_seq, *written)

    def _write_out(self, job: Job) -> None:
        if job.new_segment is not None:
            self._end = 0
            fd = self._disk.open(segment_path(self._folder, job.new_segment))
            self._segment = _Segment(job.new_segment, fd)
        fd, buffers = self._segment.fd, job.buffers
        total = sum(memoryview(b).nbytes for b in buffers)
        written = self._disk.write(fd, buffers)
        if written < total:
            rest = memoryview(b"".join(bytes(b) for b in buffers))
            while written < total:
                written += self._disk.write(fd, [rest[written:]])
        self._end += total

    # The thread that syncs --------------------------------------------------------------------

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            written, more = self._waiting(first)
            self._finish(written)
            self._synced += len(written)
            self._room.release(len(written))
            if not more:
                return

    def _waiting(self, first: _Written) -> tuple[list[_Written], bool]:
        """All that was handed over by now, and whether more may follow."""
        written = [first]
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return written, True
            if item is None:
                return written, False
            written.append(item)

    def _finish(self, written: Sequence[_Written]) -> None:
        """Make these durable, a sync for each segment, and resolve their futures."""
        for (segment, error), group in groupby(written, lambda w: (w.segment, w.error)):
            run = list(group)
            if self._failure is None:
                try:
                    if error is not None:
                        raise error
                    self._sync(segment, run)
                except Exception as caught:
                    self._fail(caught, segment)
            for future, seq in (answer for w in run for answer in w.acknowledged):
                if self._failure is None:
                    future.set_result(seq)
                else:
                    future.set_exception(self._failure)

    def _sync(self, segment: _Segment, run: Sequence[_Written]) -> None:
        if not any(w.bytes for w in run):
            return  # nothing new: every event of it was durable before
        self._disk.sync(segment.fd)
        if segment != self._durable:
            self._disk.sync_folder(self._folder)
            if self._durable.fd >= 0:
                os.close(self._durable.fd)
            self._durable = segment
        mark = Watermark(segment.number, run[-1].end, run[-1].next_seq)
        os.pwrite(self._watermark_fd, mark.pack(), 0)
        self._mark = mark

    def _fail(self, error: Exception, segment: _Segment) -> None:
        failure = WriteFailedError(
            f"lane {self._folder.name!r}: writing after offset {self._mark.offset} of segment "
            f"{self._mark.segment} in {self._folder} failed ({error}); events that were not acknowledged are "
            "not in the log. Mend the disk and restart: recovery cuts off the unfinished frame and begins a "
            "new segment"
        )
        with self._writing:
            self._failure = failure  # from here on nothing is written
            for begun in {segment, self._segment}:
                self._cut_unacknowledged(begun)
        self._on_failure(failure)

    def _cut_unacknowledged(self, segment: _Segment) -> None:
        """Drop what the failed write left: whole in the page cache, it may not be on the disk."""
        with contextlib.suppress(OSError):
            os.ftruncate(segment.fd, self._mark.offset if segment.number == self._mark.segment else 0)
