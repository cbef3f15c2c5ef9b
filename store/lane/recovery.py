"""What a lane's files hold after a crash: cut off a torn tail, refuse damage.

A bad frame at or after the watermark, with no valid frame behind it, is a write that never finished:
nobody was told it is durable, and it is truncated. Any other bad frame is damage to acknowledged
events: it raises, and no byte is changed.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.store.errors import CorruptionError
from rollbook.store.lane.files import (
    Watermark,
    fsync_folder,
    read_watermark,
    segment_numbers,
    segment_path,
)
from rollbook.store.lane.frame import (
    BATCH_FRAME,
    EMPTY_CHAIN,
    BadFrameError,
    Frame,
    scan,
    valid_frame_after,
)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A recovered segment: its number, first sequence number, events and bytes."""

    number: int
    first_seq: int
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LaneState:
    """Where a writer goes on: the chain value and next sequence number after the last frame."""

    segments: tuple[SegmentInfo, ...]
    chain: bytes
    next_seq: int
    truncated_bytes: int


def recover_lane(folder: Path) -> LaneState:
    """Verify every frame of the lane and cut off a torn tail. The caller holds the lane's lock.

    Raises:
        CorruptionError: acknowledged bytes are damaged or missing; nothing has been changed.
    """
    numbers = segment_numbers(folder)
    if not numbers and not _has_watermark(folder):
        return LaneState((), EMPTY_CHAIN, 0, 0)
    watermark = read_watermark(folder)
    if numbers != list(range(1, len(numbers) + 1)) or watermark.segment > len(numbers):
        raise CorruptionError(
            f"{folder}: a segment is missing (found {numbers}, durable up to {watermark.segment})"
        )
    infos: list[SegmentInfo] = []
    chain, next_seq, truncated = EMPTY_CHAIN, 0, 0
    for number in numbers:
        path = segment_path(folder, number)
        frames, bad = _scan_file(path, chain)
        if bad is not None:
            truncated = _truncate_torn_tail(path, number, bad, watermark, last=number == numbers[-1])
        if not frames:
            break
        chain = frames[-1].chain
        batches = [f for f in frames if f.kind == BATCH_FRAME]
        if batches and batches[0].first_seq != next_seq:
            raise CorruptionError(f"{path}: events start at {batches[0].first_seq}, not {next_seq}")
        events = sum(f.count for f in batches)
        infos.append(SegmentInfo(number, next_seq, events, frames[-1].end))
        next_seq += events
    if next_seq < watermark.next_seq:
        raise CorruptionError(
            f"{folder}: holds {next_seq} events, but {watermark.next_seq} were acknowledged"
        )
    if next_seq > watermark.next_seq:
        # Whole frames nobody was told of: in the file, but perhaps not yet on the disk.
        _fsync(segment_path(folder, infos[-1].number))
    return LaneState(tuple(infos), chain, next_seq, truncated)


def _has_watermark(folder: Path) -> bool:
    """False too for an empty file: a lane whose first opening was cut short."""
    path = folder / "WATERMARK"
    return path.exists() and path.stat().st_size > 0


def _fsync(path: Path, size: int | None = None) -> None:
    """Make the file durable, first cut to `size` if given."""
    fd = os.open(path, os.O_RDWR)
    try:
        if size is not None:
            os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


def _scan_file(path: Path, chain: bytes) -> tuple[list[Frame], BadFrameError | None]:
    """The valid frames from the start, payloads dropped, and the first bad one."""
    frames: list[Frame] = []
    if path.stat().st_size == 0:
        return frames, BadFrameError(0, "the segment is empty")
    with path.open("rb") as file:
        # Not closed by hand: an exception's traceback may still hold views of it.
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    try:
        for f in scan(view, 0, len(view), chain):
            frames.append(replace(f, payload=memoryview(b"")))
    except BadFrameError as bad:
        later = valid_frame_after(view, bad.offset)
        follows = "" if later is None else f", yet a whole frame follows at offset {later}"
        return frames, BadFrameError(bad.offset, bad.reason + follows)
    return frames, None


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
    size = path.stat().st_size
    if bad.offset == 0:
        path.unlink()
    else:
        _fsync(path, bad.offset)
    fsync_folder(path.parent)
    return size - bad.offset
