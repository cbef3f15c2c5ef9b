"""The half of a lane's writer that touches the disk: write, `fdatasync`, watermark, acknowledge.

It runs in a thread of its own, so that the next frame is encoded while this one is flushed; if
nothing else waits, it runs in the thread that encoded the frame, since waking another thread
would cost more than it saves. Only one frame is in flight to the disk: of several, a power cut
may leave a later one whole and an earlier one torn, and recovery could not distinguish that from
damage.

If descriptors or memory run short, opening and writing are retried: that is no fault of the
disk, and a repeated write puts the same bytes in the same place. After any other failure nothing
more is acknowledged: later appends fail, and fsync is never retried on that descriptor (its
dirty pages may be gone). A flusher does not continue after that; `log.writer` checks the lane
and begins with another one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollbook.store.errors import SHORT, WriteFailedError
from rollbook.store.permissions import open_file
from rollbook.store.wal.files import SpareDescriptor, Watermark, segment_path

AHEAD = 2
"""Jobs that may wait for the flush of another: enough to keep the disk busy, and groups grow meanwhile."""

Acknowledged = list[tuple["Future[int]", int]]
"""Futures and the sequence numbers they get once the frame is durable."""


SMALL, OFTEN, ROOM = 64 << 10, 8, 1 << 20
"""After so many commits in a row of no more than so many bytes, this many bytes are made room for."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
PATIENCE_S = 30.0
"""How long a job, and the appends after it, wait out a shortage before they fail as on a failed disk."""


Acknowledge = Callable[[Watermark, Acknowledged], None]
"""Called with what is durable here, and where that ends; resolves the futures, at once or later."""


def resolve(_: Watermark, acknowledged: Acknowledged) -> None:
    """Acknowledge what is durable here."""
    for future, seq in acknowledged:
        future.set_result(seq)


class Disk(Protocol):
    """The calls that make bytes durable; tests replace it by one that fails."""

    def open(self, path: Path) -> int:
        """A descriptor of a new file."""

    def write(self, fd: int, buffers: list[Any], offset: int) -> int:
        """Write some of the buffers' bytes, in order, at `offset` of the file; how many."""

    def sync(self, fd: int) -> None:
        """Return once the descriptor's bytes are on the disk."""

    def cut(self, fd: int, size: int) -> None:
        """Return once the file is no longer than this on the disk."""

    def sync_folder(self, fd: int) -> None:
        """Return once the entries of the folder that is open as `fd` are on the disk."""

    def mark(self, fd: int, watermark: bytes) -> None:
        """Write the watermark over the one before."""

    def probe(self, folder: Path, size: int) -> None:
        """Return if a file of so many bytes could be made durable in the folder; nothing of it stays."""


class RealDisk:
    """The operating system's calls."""

    def open(self, path: Path) -> int:
        """A descriptor of a new file."""
        return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

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

    def sync_folder(self, fd: int) -> None:
        """`fsync` of the folder."""
        os.fsync(fd)

    def mark(self, fd: int, watermark: bytes) -> None:
        """One `pwrite`: a reader sees the old or the new one, or tries again."""
        if os.pwrite(fd, watermark, 0) != len(watermark):
            raise OSError(errno.EIO, "the watermark was written in part")

    def probe(self, folder: Path, size: int) -> None:
        """Allocate so much in a file without a name, and `fsync` a block of it."""
        path = folder / ".probe"
        path.unlink(missing_ok=True)  # leftover of a process that was killed here
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            path.unlink()
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
            os.pwrite(fd, bytes(4096), 0)
            os.fsync(fd)
        finally:
            os.close(fd)


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
    """Takes jobs in order and makes them durable; `on_failure` is called once, with the first error.

    Args:
        acknowledge: resolves the futures of what is durable.

    Attributes:
        mark: how far the lane is durable and acknowledged.
        wanted: bytes of the job that was begun last.
        failure: why it takes nothing more, or None.
        waiting: what it waits for before it goes on, or None.
    """

    def __init__(
        self,
        folder: Path,
        mark: Watermark,
        disk: Disk,
        on_failure: Callable[[Exception], None],
        acknowledge: Acknowledge = resolve,
    ) -> None:
        self._folder, self._disk, self._on_failure = folder, disk, on_failure
        self._acknowledge = acknowledge
        self.mark = mark
        self.wanted = 0
        self.failure: WriteFailedError | None = None
        self.waiting: str | None = None
        self._fd = -1
        self._file_end = self._small = 0
        self._closed = False
        # Not a bounded queue.Queue: it is written in Python, and takes as long as encoding an event.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._handed_over = self._done = 0
        self._thread = threading.Thread(target=self._run, name=f"flush-{folder.name}", daemon=True)
        self._watermark_fd = open_file(folder / "WATERMARK", os.O_RDWR | os.O_CREAT)
        try:
            # Kept open, so that a segment can begin when no descriptor is available.
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            os.close(self._watermark_fd)
            raise
        self._spare = SpareDescriptor()

    def start(self) -> None:
        """Write the watermark as it is, durably (later ones overwrite its bytes in place), and begin."""
        self._disk.mark(self._watermark_fd, self.mark.pack())
        self._disk.sync(self._watermark_fd)
        self._disk.sync_folder(self._folder_fd)
        self._thread.start()

    def put(self, job: Job, *, alone: bool = False) -> None:
        """Queue a job for flushing; blocks while `AHEAD` jobs wait. Called by one thread.

        Args:
            alone: nothing else waits, so the calling thread may flush the job itself.
        """
        if alone and self._handed_over == self._done:
            self._finish(job)
            return
        self._room.acquire()
        self._handed_over += 1
        self._jobs.put(job)

    def close(self) -> None:
        """Do what was handed over, and close the files. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()
        with contextlib.suppress(OSError):  # what is acknowledged is durable; the next recovery cuts too
            self._close_segment()
        for fd in (self._watermark_fd, self._folder_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._spare.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._room.release()
            self._finish(job)
            self._done += 1

    def _finish(self, job: Job) -> None:
        """Make a job durable and resolve its futures."""
        if self.failure is None:
            try:
                self._flush(job)
            except Exception as error:
                self._fail(error)
        if self.failure is None:
            self._acknowledge(self.mark, job.acknowledged)
            return
        for future, _ in job.acknowledged:
            future.set_exception(self.failure)

    def _flush(self, job: Job) -> None:
        if not job.buffers:
            return  # nothing new: every event of it was durable before
        total = self.wanted = sum(memoryview(b).nbytes for b in job.buffers)
        segment, offset = self.mark.segment, self.mark.offset
        if job.new_segment is not None:
            self._close_segment()
            segment, offset = job.new_segment, 0
            path = segment_path(self._folder, segment)
            self._fd = self._patiently(lambda: self._disk.open(path))
        self._make_room(offset, total)
        self._write(job.buffers, total, offset)
        self._disk.sync(self._fd)
        if job.new_segment is not None:
            self._disk.sync_folder(self._folder_fd)
        mark = Watermark(segment, offset + total, job.next_seq)
        self._disk.mark(self._watermark_fd, mark.pack())
        self.mark = mark

    def _patiently(self, call: Callable[[], int]) -> int:
        """The result of the call, which is repeated during a shortage, for at most `PATIENCE_S`."""
        pause, until = FIRST_PAUSE_S, time.monotonic() + PATIENCE_S
        try:
            while True:
                try:
                    return call()
                except OSError as error:
                    if error.errno not in SHORT or time.monotonic() >= until:
                        raise
                    self.waiting = (
                        f"lane {self._folder.name!r} waits to write after segment {self.mark.segment}: "
                        f"{error}; raise the limit (ulimit -n), or end what uses so many"
                    )
                if not self._spare.give():
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            self.waiting = None
            self._spare.keep()

    def _make_room(self, offset: int, total: int) -> None:
        """Write zeros where the next small commits will be, if there were many in a row.

        A sync of bytes that lie within the file takes two thirds of the time of one that makes it longer.
        """
        self._small = self._small + 1 if total <= SMALL else 0
        if self._small > OFTEN and offset + total > self._file_end:
            with contextlib.suppress(OSError, MemoryError):  # without room it goes on as before
                self._file_end = offset + self._disk.write(self._fd, [bytes(ROOM)], offset)
        self._file_end = max(self._file_end, offset + total)

    def _close_segment(self) -> None:
        """Cut off what room is left, durably: recovery looks for it at the end of the last segment only."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                if self.failure is None and os.fstat(fd).st_size > self.mark.offset:
                    self._disk.cut(fd, self.mark.offset)
            finally:
                os.close(fd)
        self._file_end = self._small = 0

    def _write(self, buffers: list[Any], total: int, offset: int) -> None:
        """Write all the buffers, going on after short writes."""
        written = self._patiently(lambda: self._disk.write(self._fd, buffers, offset))
        while written < total:
            rest = _behind(buffers, written)
            more = self._patiently(lambda: self._disk.write(self._fd, rest, offset + written))  # noqa: B023
            if not more:
                raise OSError(errno.EIO, f"only {written} of {total} bytes could be written")
            written += more

    def _fail(self, error: Exception) -> None:
        segment = self.mark.segment
        self.failure = WriteFailedError(
            f"lane {self._folder.name!r}: writing after offset {self.mark.offset} of segment {segment} in "
            f"{self._folder} failed ({error}); events that were not acknowledged are not in the log. The "
            "lane goes on by itself, in a new segment, once its files can be written again"
        )
        self.failure.__cause__ = error
        self._cut_unacknowledged()
        self._on_failure(self.failure)

    def _cut_unacknowledged(self) -> None:
        """Drop what the failed write left: whole in the page cache, it may not be on the disk."""
        with contextlib.suppress(OSError):
            begun = self.mark.segment == _segment_of(self._fd)
            os.ftruncate(self._fd, self.mark.offset if begun else 0)


def _behind(buffers: list[Any], written: int) -> list[memoryview]:
    """The buffers' bytes but for the first `written`."""
    rest: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if written < view.nbytes:
            rest.append(view[written:])
        written = max(written - view.nbytes, 0)
    return rest


def _segment_of(fd: int) -> int:
    """Number of the segment that is open as `fd`."""
    return int(Path(os.readlink(f"/proc/self/fd/{fd}")).stem)
