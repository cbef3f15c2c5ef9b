"""Recovers a lane after a crash: truncates a torn tail, refuses damaged events.

A bad frame at or after the watermark, with no valid frame behind it, is a write that never
finished: it was never acknowledged, and it is truncated. Any other bad frame is damage to
acknowledged events: the lane is quarantined, which changes no byte of it, and the error names
the place.

Sealed segments were verified when they were sealed; recovery starts where the last sealed unit
ends.

A writer whose write has failed recovers its own lane too, and knows what it has acknowledged.
Then everything behind the acknowledged end is cut off, whole frames included: those appends
failed, and their callers know it. This is sound after a failed fsync as well. The kernel may
have dropped the pages of that fsync and then report the cached pages as clean, so a later fsync
of the same file proves nothing about them. But each of those pages holds either bytes behind the
acknowledged end, which are cut off, or bytes before it, which an earlier successful fsync has
put on the disk and which the failed write, sharing a block with them, repeated unchanged. New
events go into a new file. Before the acknowledged bytes are verified, the kernel is asked to
drop its cache of the file, so that as far as possible they are read from the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rollbook.store.errors import CorruptionError, LaneLockedError
from rollbook.store.safe_paths import fsync_folder, open_plain
from rollbook.store.sealed.unit import unsealed_start
from rollbook.store.wal.files import (
    FENCED,
    Watermark,
    is_replica,
    lane_folder,
    quarantine,
    read_watermark,
    segment_numbers,
    segment_path,
    take_lock,
    write_watermark,
)
from rollbook.store.wal.frame import EMPTY_CHAIN, BadFrameError
from rollbook.store.wal.segment import LaneState, SegmentInfo, Start, verify_segment

_CHUNK = 1 << 20


def recover_lane(store: Path, lane: str, acknowledged: Watermark | None = None) -> LaneState:
    """Verify every frame that is not sealed and cut off a torn tail. The caller holds the lane's lock.

    Args:
        acknowledged: the end of what the lane's writer, which is the caller, has acknowledged;
            everything after it is cut off. Without a watermark, whole frames that were never
            acknowledged count.

    Raises:
        CorruptionError: acknowledged bytes are damaged or missing. The lane has a note of it,
            its bytes are unchanged.
        OSError: the files cannot be read or written now.
    """
    folder = lane_folder(store, lane)
    if acknowledged is not None:
        cut_behind(folder, acknowledged)
    while True:
        start: Start | None = None
        try:
            start = unsealed_start(store, lane)
            state = _recover(folder, start)
        except (CorruptionError, FileNotFoundError) as error:
            if start is not None and unsealed_start(store, lane) != start:
                continue  # closed segments were sealed meanwhile, and their files removed: look again
            quarantine(folder, str(error))
            if isinstance(error, CorruptionError):
                raise
            raise CorruptionError(f"{folder}: a segment went away while it was read: {error}") from error
        (folder / "QUARANTINED").unlink(missing_ok=True)
        return state


@contextlib.contextmanager
def recovered_lane(store: Path, lane: str) -> Iterator[None]:
    """Hold a lane whose writer is gone, recovered; a process that wants to write it waits meanwhile.

    Raises:
        LaneLockedError: it has a writer.
        CorruptionError: acknowledged bytes are damaged or missing.
    """
    folder = lane_folder(store, lane)
    if is_replica(store, lane):
        if not (folder / FENCED).exists():
            raise LaneLockedError(f"lane {lane!r} is written by another host: wait until that one is gone")
        yield  # nothing is ever added to it
        return
    fd = take_lock(folder / "LOCK", f"lane {lane!r} is being written by", "wait", briefly=True)
    try:
        # Whole frames beyond the watermark count from now on, as they would for the next writer.
        write_watermark(folder, recover_lane(store, lane).mark)
        yield
    finally:
        os.close(fd)


def may_hold_more(store: Path, lane: str) -> bool:
    """Whether a lane's files are longer than its watermark says: it is written, or its writer was killed."""
    folder = lane_folder(store, lane)
    mark, numbers = read_watermark(folder), segment_numbers(folder)
    if is_replica(store, lane) or not numbers or numbers[-1] < mark.segment:
        return False
    with contextlib.suppress(FileNotFoundError):  # it was sealed meanwhile
        return numbers[-1] > mark.segment or segment_path(folder, numbers[-1]).stat().st_size > mark.offset
    return False


def cut_behind(folder: Path, end: Watermark) -> None:
    """Truncate the lane, durably, to what its writer has acknowledged."""
    for number in reversed(segment_numbers(folder)):
        path = segment_path(folder, number)
        if number > end.segment:
            path.unlink()
        elif number == end.segment:
            if path.stat().st_size > end.offset:
                _fsync(path, end.offset)
            _forget_cached(path)
    fsync_folder(folder)
    write_watermark(folder, end)


def _forget_cached(path: Path) -> None:
    """Read the file again, from the disk as far as the kernel drops its cache of it.

    An unreadable part is an OSError here; met in a mapped file it would end the process.
    """
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(_CHUNK):
            pass


def _recover(folder: Path, start: Start) -> LaneState:
    numbers = [n for n in segment_numbers(folder) if n >= start.number]
    if not numbers and start.number == 1 and not _has_watermark(folder):
        return LaneState((), start, Watermark(0, 0, 0), EMPTY_CHAIN, 0, 0)
    watermark = read_watermark(folder)
    expected = list(range(start.number, start.number + len(numbers)))
    if numbers != expected or watermark.segment > start.number - 1 + len(numbers):
        raise CorruptionError(
            f"{folder}: a segment is missing (found {numbers} after the sealed ones, durable up to "
            f"{watermark.segment}): restore it from a copy"
        )
    infos: list[SegmentInfo] = []
    chain, next_seq, truncated = start.chain, start.next_seq, 0
    for number in numbers:
        path = segment_path(folder, number)
        info, bad = verify_segment(path, chain, next_seq)
        if bad is not None:
            truncated = _truncate_torn_tail(path, number, bad, watermark, last=number == numbers[-1])
        if info is None:
            break
        chain, next_seq = info.chain, info.first_seq + info.events
        infos.append(info)
    if next_seq < watermark.next_seq:
        raise CorruptionError(
            f"{folder}: holds {next_seq} events, but {watermark.next_seq} were acknowledged: restore its "
            "files from a copy"
        )
    if infos:
        # Whole frames that were never acknowledged may not yet be on the disk, and what a failed write left
        # may not yet be off it. The segment that follows goes on from here, so this one must really end here.
        _fsync(segment_path(folder, infos[-1].number))
    end = infos[-1] if infos else None
    # Without segments the lane ends where its last sealed one did, whose WAL file may still be there.
    sealed = Watermark(start.number - 1, start.before, start.next_seq)
    mark = Watermark(end.number, end.bytes, next_seq) if end else sealed
    return LaneState(tuple(infos), start, mark, chain, next_seq, truncated)


def _has_watermark(folder: Path) -> bool:
    """False too for an empty file: a lane whose first opening was cut short."""
    path = folder / "WATERMARK"
    return path.exists() and path.stat().st_size > 0


def _fsync(path: Path, size: int | None = None) -> None:
    """Make the file durable, first cut to `size` if given."""
    fd = open_plain(path, os.O_RDWR)
    try:
        if size is not None:
            os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _truncate_torn_tail(
    path: Path, number: int, bad: BadFrameError, watermark: Watermark, *, last: bool
) -> int:
    """Cut the file at the bad frame if it is a torn tail; the number of bytes cut off."""
    acknowledged = number < watermark.segment or (
        number == watermark.segment and bad.offset < watermark.offset
    )
    if acknowledged or not last or "follows" in bad.reason:
        raise CorruptionError(
            f"{path}: damaged at offset {bad.offset} ({bad.reason}); durable up to offset "
            f"{watermark.offset} of segment {watermark.segment}. Nothing was changed: restore the "
            "file from a copy"
        )
    written = _without_room(path, bad.offset)
    if bad.offset == 0:
        path.unlink()
    else:
        _fsync(path, bad.offset)
    fsync_folder(path.parent)
    return written - bad.offset


def _without_room(path: Path, start: int) -> int:
    """Size of the file without trailing zeros, which the writer preallocated for later frames."""
    with path.open("rb") as file:
        file.seek(start)
        end = start
        while part := file.read(1 << 24):
            if content := part.rstrip(bytes(1)):
                end = file.tell() - len(part) + len(content)
        return end
