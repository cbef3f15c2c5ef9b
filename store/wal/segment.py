"""One segment's WAL file as record batches, zero-copy from the memory-mapped file.

Verifying segments (frames, chain, sequence numbers) yields the state of a lane.
"""

from __future__ import annotations

import builtins
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from rollbook.store.errors import CorruptionError
from rollbook.store.events.batches import to_batch
from rollbook.store.events.codec import conform
from rollbook.store.safe_paths import open_plain, refuse_no_plain
from rollbook.store.wal.arrow_bytes import read_batch, read_schema
from rollbook.store.wal.files import Watermark
from rollbook.store.wal.frame import (
    BATCH_FRAME,
    HEADER_FRAME,
    ROW_FRAME,
    BadFrameError,
    Frame,
    decode_rows,
    read_frame,
    scan,
    skip_frame,
    valid_frame_after,
)

ROWS_TOGETHER, BYTES_TOGETHER = 512, 4 << 20
"""Row frames next to each other become one batch of up to this many events, or about this many bytes."""


class Segment:
    """A WAL file being read. It stays mapped, so it can still be read after it is removed."""

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.offset = 0
        self._schema: pa.Schema | None = None
        self._view = memoryview(b"")

    def _map(self, stop: int | None) -> memoryview:
        refuse_no_plain(self.path)
        with pa.memory_map(str(self.path)) as file:
            return memoryview(file.read_buffer(file.size() if stop is None else stop))

    def batches(self, stop: int | None, start_seq: int) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        """(batch, its first sequence number, offset after it) from the current position.

        Raises:
            BadFrameError, pa.ArrowException, FormatError, FileNotFoundError
        """
        self._view = self._map(stop)
        if self._schema is None:
            header = read_frame(self._view, 0)
            self._schema = read_schema(header.payload)
            conform(_no_rows(self._schema))  # refuses other columns
            self.offset = _skip_to(self._view, header.end, start_seq)
        yield from self._batches(self._view, self.offset)

    def _batches(self, buffer: memoryview, offset: int) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        waiting: list[Frame] = []
        rows = 0
        for frame in scan(buffer, offset, len(buffer)):
            if frame.kind == ROW_FRAME:
                waiting.append(frame)
                rows += frame.count
                if rows < ROWS_TOGETHER and frame.end - waiting[0].offset < BYTES_TOGETHER:
                    continue
            if waiting:
                yield _rows_batch(waiting)
                waiting, rows = [], 0
            if frame.kind == BATCH_FRAME:
                assert self._schema is not None
                batch = conform(read_batch(frame.payload, self._schema))
                yield batch, frame.first_seq, frame.end
            elif frame.kind != ROW_FRAME:
                raise BadFrameError(frame.offset, f"a frame of kind {frame.kind} in the middle of a segment")
        if waiting:
            yield _rows_batch(waiting)

    def bodies(self) -> Iterator[pa.RecordBatch]:
        """The batches before the offset, from the mapping, since the file may be gone."""
        before = self._view[: self.offset]
        for batch, _, _ in self._batches(before, skip_frame(before, 0).end):
            yield batch


def segment_batches(path: Path, stop: int | None = None) -> Iterator[pa.RecordBatch]:
    """A segment's batches, up to `stop` bytes of the file.

    Raises:
        CorruptionError: the frames do not hold events.
        FormatError: a newer Rollbook wrote them.
        FileNotFoundError
    """
    try:
        for batch, _, _ in Segment(int(path.stem), path).batches(stop, 0):
            yield batch
    except (BadFrameError, pa.ArrowException) as error:
        raise CorruptionError(f"{path}: its events cannot be read: {error}") from error


def _rows_batch(frames: list[Frame]) -> tuple[pa.RecordBatch, int, int]:
    try:
        rows = [row for f in frames for row in decode_rows(f.payload, f.count)]
        return to_batch(rows, frames[0].first_seq), frames[0].first_seq, frames[-1].end
    except (ValueError, TypeError, OverflowError) as error:
        raise BadFrameError(frames[0].offset, f"not the rows of events: {error}") from error


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _skip_to(buffer: memoryview, offset: int, seq: int) -> int:
    """Offset of the frame that holds event `seq`, by the headers alone."""
    while offset < len(buffer):
        frame = skip_frame(buffer, offset)
        if frame.first_seq + frame.count > seq:
            break
        offset = frame.end
    return offset


MOST_BYTES = 1 << 36
"""Of a segment's file; a larger one is mostly a hole, and would be searched for hours."""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A verified segment: its number, first sequence number, events, bytes, and chain value at its end."""

    number: int
    first_seq: int
    events: int
    bytes: int
    chain: builtins.bytes


@dataclass(frozen=True, slots=True)
class Start:
    """Where the lane's unsealed segments begin: their first number, sequence number and chain value.

    Attributes:
        before: bytes of the segment before.
    """

    number: int
    next_seq: int
    chain: bytes
    before: int = 0


@dataclass(frozen=True, slots=True)
class LaneState:
    """The state of a lane from which a writer continues.

    Attributes:
        segments: the segments that are not sealed, verified.
        mark: the lane's durable end.
        chain, next_seq: after the last frame.
        truncated_bytes: of a frame that was not finished; room for frames to come is not counted.
    """

    segments: tuple[SegmentInfo, ...]
    start: Start
    mark: Watermark
    chain: bytes
    next_seq: int
    truncated_bytes: int

    @property
    def last_segment(self) -> int:
        """Number of the newest segment there ever was; 0 in a new lane."""
        return self.segments[-1].number if self.segments else self.start.number - 1


def verify_segment(
    path: Path, chain: bytes, next_seq: int, stop: int | None = None
) -> tuple[SegmentInfo | None, BadFrameError | None]:
    """Check a segment's frames from the start, the chain and the sequence numbers among them.

    Args:
        chain, next_seq: what the segment before ends with.
        stop: check this many bytes only.

    Returns:
        what its valid frames hold (None if there is none), and the first bad frame.
    """
    last: Frame | None = None
    events, bad = 0, None
    try:
        for f in _frames(path, chain, stop):
            if f.first_seq != next_seq + events or (f.kind == HEADER_FRAME) != (f.offset == 0):
                bad = BadFrameError(
                    f.offset, f"holds event {f.first_seq}, where {next_seq + events} should be"
                )
                break
            events += f.count
            last = f
    except BadFrameError as error:
        bad = error
    if last is None:
        return None, bad
    return SegmentInfo(int(path.stem), next_seq, events, last.end, last.chain), bad


def _frames(path: Path, chain: bytes, stop: int | None) -> Iterator[Frame]:
    """The valid frames from the start, payloads dropped.

    Raises:
        BadFrameError: at the first bad one; its reason says whether a whole frame follows.
    """
    held = path.stat().st_size
    size = held if stop is None else stop
    if not held or not size:
        raise BadFrameError(0, "the segment is empty")
    if size > MOST_BYTES:
        raise BadFrameError(0, f"it has {size:,} bytes, which no segment has")
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        # Not closed explicitly, because an exception's traceback may still hold views of it.
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[:size]
    try:
        for f in scan(view, 0, len(view), chain):
            yield replace(f, payload=memoryview(b""))
    except BadFrameError as bad:
        later = valid_frame_after(view, bad.offset)
        follows = "" if later is None else f", yet a whole frame follows at offset {later}"
        raise BadFrameError(bad.offset, bad.reason + follows) from None
