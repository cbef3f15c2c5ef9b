"""The half of a lane's writer that touches the disk: write, `fdatasync`, watermark, acknowledge.

It runs in a thread of its own, so that the next frame is encoded while this one is flushed; where nothing
else waits, in the thread that encoded the frame, since to wake another one costs more than it saves. One
frame is on its way to the disk at a time: of several, a power cut may leave a later one whole and an earlier
one torn, and recovery could not tell that from damage. After any failed write nothing more is acknowledged:
what comes is failed, and fsync is never tried again on that descriptor (its dirty pages may be gone).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollbook.store.errors import WriteFailedError
from rollbook.store.lane.files import Watermark, fsync_folder, segment_path

AHEAD = 2
"""Jobs that may wait for the flush of another: enough to keep the disk busy, and groups grow meanwhile."""

Acknowledged = list[tuple["Future[int]", int]]
"""Futures and the sequence numbers they get once the frame is durable."""


SMALL, OFTEN, ROOM = 64 << 10, 8, 1 << 20
"""After so many commits in a row of no more than so many bytes, this many bytes are made room for."""


class Disk(Protocol):
    """The calls that make bytes durable; a test puts one that fails in its place."""

    def open(self, path: Path) -> int:
        """A descriptor of a new file."""

    def write(self, fd: int, buffers: list[Any], offset: int) -> int:
        """Write some of the buffers' bytes, in order, at `offset` of the file; how many."""

    def sync(self, fd: int) -> None:
        """Return once the descriptor's bytes are on the disk."""

    def cut(self, fd: int, size: int) -> None:
        """Return once the file is no longer than this on the disk."""

    def sync_folder(self, folder: Path) -> None:
        """Return once the folder's entries are."""


class RealDisk:
    """The operating system's calls."""

    def open(self, path: Path) -> int:
        """A descriptor of a new file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, buffers: list[Any], offset: int) -> int:
        """Write some of the buffers' bytes, in order, at `offset` of the file; how many."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """`fdatasync`: the bytes and the file's length."""
        os.fdatasync(fd)

    def cut(self, fd: int, size: int) -> None:
        """`ftruncate` and `fsync`."""
        os.ftruncate(fd, size)
        os.fsync(fd)

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


class Flusher:
    """Takes jobs in order and makes them durable; `on_failure` is called once, with the first error."""

    def __init__(
        self, folder: Path, mark: Watermark, disk: Disk, on_failure: Callable[[Exception], None]
    ) -> None:
        self._folder, self._disk, self._on_failure = folder, disk, on_failure
        self._mark = mark
        self._fd = -1
        self._file_end = self._small = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._watermark_fd = os.open(folder / "WATERMARK", flags, 0o644)
        # Not a queue.Queue of this size, which is written in Python: it takes as long as to encode an event.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._handed_over = self._done = 0
        self._failure: WriteFailedError | None = None
        self._thread = threading.Thread(target=self._run, name=f"flush-{folder.name}", daemon=True)

    def start(self) -> None:
        """Write the watermark as it is, durably (later ones overwrite its bytes in place), and begin."""
        os.pwrite(self._watermark_fd, self._mark.pack(), 0)
        os.fsync(self._watermark_fd)
        fsync_folder(self._folder)
        self._thread.start()

    def put(self, job: Job, *, alone: bool = False) -> None:
        """See to it that a job is flushed; waits while `AHEAD` are waiting. One thread calls this.

        Args:
            alone: nothing else is to be done meanwhile, so the caller may as well flush it here.
        """
        if alone and self._handed_over == self._done:
            self._finish(job)
            return
        self._room.acquire()
        self._handed_over += 1
        self._jobs.put(job)

    def close(self) -> None:
        """Do what was handed over, and close the files. Call once."""
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()
        with contextlib.suppress(OSError):  # what is acknowledged is durable; the next recovery cuts too
            self._close_segment()
        os.close(self._watermark_fd)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._room.release()
            self._finish(job)
            self._done += 1

    def _finish(self, job: Job) -> None:
        """Make a job durable and resolve its futures."""
        if self._failure is None:
            try:
                self._flush(job)
            except Exception as error:
                self._fail(error)
        for future, seq in job.acknowledged:
            if self._failure is None:
                future.set_result(seq)
            else:
                future.set_exception(self._failure)

    def _flush(self, job: Job) -> None:
        if not job.buffers:
            return  # nothing new: every event of it was durable before
        segment, offset = self._mark.segment, self._mark.offset
        if job.new_segment is not None:
            self._close_segment()
            segment, offset = job.new_segment, 0
            self._fd = self._disk.open(segment_path(self._folder, segment))
        total = sum(memoryview(b).nbytes for b in job.buffers)
        self._make_room(offset, total)
        self._write(job.buffers, total, offset)
        self._disk.sync(self._fd)
        if job.new_segment is not None:
            self._disk.sync_folder(self._folder)
        mark = Watermark(segment, offset + total, job.next_seq)
        os.pwrite(self._watermark_fd, mark.pack(), 0)
        self._mark = mark

    def _make_room(self, offset: int, total: int) -> None:
        """Write zeros where the next small commits will be, if there were many in a row.

        A sync of bytes that lie within the file takes two thirds of the time of one that makes it longer.
        """
        self._small = self._small + 1 if total <= SMALL else 0
        if self._small > OFTEN and offset + total > self._file_end:
            with contextlib.suppress(OSError):  # without room it goes on as before
                self._file_end = offset + self._disk.write(self._fd, [bytes(ROOM)], offset)
        self._file_end = max(self._file_end, offset + total)

    def _close_segment(self) -> None:
        """Cut off what room is left, durably: recovery looks for it at the end of the last segment only."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                if self._failure is None and os.fstat(fd).st_size > self._mark.offset:
                    self._disk.cut(fd, self._mark.offset)
            finally:
                os.close(fd)
        self._file_end = self._small = 0

    def _write(self, buffers: list[Any], total: int, offset: int) -> None:
        """Write all the buffers, going on after short writes."""
        written = self._disk.write(self._fd, buffers, offset)
        if written < total:
            rest = memoryview(b"".join(bytes(b) for b in buffers))
            while written < total:
                written += self._disk.write(self._fd, [rest[written:]], offset + written)

    def _fail(self, error: Exception) -> None:
        segment = self._mark.segment
        self._failure = WriteFailedError(
            f"lane {self._folder.name!r}: writing after offset {self._mark.offset} of segment {segment} in "
            f"{self._folder} failed ({error}); events that were not acknowledged are not in the log. Mend "
            "the disk and restart: recovery cuts off the unfinished frame and begins a new segment"
        )
        self._cut_unacknowledged()
        self._on_failure(self._failure)

    def _cut_unacknowledged(self) -> None:
        """Drop what the failed write left: whole in the page cache, it may not be on the disk."""
        with contextlib.suppress(OSError):
            begun = self._mark.segment == _segment_of(self._fd)
            os.ftruncate(self._fd, self._mark.offset if begun else 0)


def _segment_of(fd: int) -> int:
    """Number of the segment that is open as `fd`."""
    return int(Path(os.readlink(f"/proc/self/fd/{fd}")).stem)
