"""Reads one lane, from any process, up to what its writer has made durable.

A segment's WAL file is read while there is one, zero-copy out of the memory-mapped file; where it was
removed after sealing, the sealed unit is read instead. Both hand out the same events in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.codec import conform, to_batch
from rollbook.store.errors import CorruptionError, CutError, FormatError
from rollbook.store.lane.files import lane_folder, read_watermark, segment_numbers, segment_path
from rollbook.store.lane.frame import (
    ALIGN,
    BATCH_FRAME,
    ROW_FRAME,
    BadFrameError,
    Frame,
    first_seq_of,
    read_frame,
    scan,
    skip_frame,
)
from rollbook.store.lane.rows import decode_rows
from rollbook.store.sealed.parquet import unit_batches
from rollbook.store.sealed.unit import Unit, current_units
from rollbook.store.upkeep_events import BodyStored

ROWS_TOGETHER = 512
"""Row frames next to each other become one batch of up to this many events."""


class LaneReader:
    """Hands out a lane's record batches in order, each once; it remembers where it stopped.

    Args:
        store: folder of the store.
        start: sequence number to begin with.
    """

    def __init__(self, store: Path, lane: str, start: int = 0) -> None:
        self.lane = lane
        self.next_seq = start
        self._store = store
        self._folder = lane_folder(store, lane)
        self._segment: _Segment | None = None
        self._bodies: dict[str, Any] = {}
        self._more_bodies: Callable[[], Iterator[pa.RecordBatch]] | None = None

    def poll(self, limit: int | None = None) -> Iterator[pa.RecordBatch]:
        """Batches that became durable since the last poll, up to `limit` events of the lane in all.

        Raises:
            CutError: `limit` is more than the lane holds.
            CorruptionError: acknowledged bytes are damaged.
        """
        mark = read_watermark(self._folder)
        end = mark.next_seq if limit is None else limit
        if end > mark.next_seq:
            raise CutError(f"cut holds {end} events of lane {self.lane!r}, but the store has {mark.next_seq}")
        while self.next_seq < end:
            if self._segment is None:
                yield from self._enter(end)
                continue
            segment, before = self._segment, self.next_seq
            yield from self._read_segment(
                segment, mark.offset if segment.number == mark.segment else None, end
            )
            if self.next_seq == before and self._segment is segment:
                if _segment_of(self._folder, before) == segment.number:
                    raise CorruptionError(f"{segment.path}: holds fewer events than were acknowledged")
                self._segment = None

    def body(self, digest: str) -> Any:
        """The body that a request of the batch handed out last refers to.

        Raises:
            CorruptionError: its segment does not hold it.
        """
        if digest not in self._bodies and self._more_bodies is not None:
            # Reading began in the middle of the segment: its earlier bodies have not passed by.
            for batch in self._more_bodies():
                self._shelve(batch)
            self._more_bodies = None
        try:
            return self._bodies[digest]
        except KeyError:
            raise CorruptionError(
                f"lane {self.lane!r}: a request refers to body {digest}, which its segment does not hold"
            ) from None

    # Where to read ----------------------------------------------------------------------------

    def _enter(self, end: int) -> Iterator[pa.RecordBatch]:
        """Find the segment that holds the next event, or hand out the sealed unit that does."""
        number = _segment_of(self._folder, self.next_seq)
        if number is not None:
            self._open_segment(number)
            return
        units = current_units(self._store, self.lane)
        unit = next((u for u in units if self.next_seq < u.next_seq), None)
        if unit is None or unit.first_seq > self.next_seq:
            raise CorruptionError(
                f"{self._folder}: event {self.next_seq} of lane {self.lane!r} is in no segment and no sealed "
                "unit: restore the missing file from a copy"
            )
        if unit.dropped_us is not None:
            self.next_seq = min(unit.next_seq, end)
            return
        yield from self._read_unit(unit, end)

    def _open_segment(self, number: int) -> None:
        path = segment_path(self._folder, number)
        self._bodies = {}
        self._segment = _Segment(number, path)
        self._more_bodies = self._segment.bodies

    def _read_unit(self, unit: Unit, end: int) -> Iterator[pa.RecordBatch]:
        self._bodies, self._more_bodies = {}, None
        for batch in unit_batches(self._store, unit):
            self._shelve(batch)
            first = batch.column("seq")[0].as_py()
            # Retention and erasure leave gaps in no unit, so the place of a row follows from its number.
            skip = max(self.next_seq - first, 0)
            if skip >= batch.num_rows:
                continue
            taken = min(batch.num_rows - skip, end - self.next_seq)
            self.next_seq += taken
            yield batch.slice(skip, taken)
            if self.next_seq >= end:
                return

    # A segment's frames -----------------------------------------------------------------------

    def _read_segment(self, segment: _Segment, stop: int | None, end: int) -> Iterator[pa.RecordBatch]:
        try:
            for batch, first_seq, frame_end in segment.batches(stop, self.next_seq):
                self._shelve(batch)
                # A cut may have ended inside this batch: its first events were handed out then.
                skip = self.next_seq - first_seq
                if not 0 <= skip < batch.num_rows:
                    raise BadFrameError(segment.offset, f"starts at event {first_seq}")
                taken = min(batch.num_rows - skip, end - self.next_seq)
                # Moved on before the hand-out: whoever stops iterating has had the batch.
                self.next_seq += taken
                if skip + taken == batch.num_rows:
                    segment.offset = frame_end
                yield batch.slice(skip, taken)
                if self.next_seq >= end:
                    return
        except FileNotFoundError:
            self._segment = None  # sealed and removed meanwhile: go on with the unit
        except (BadFrameError, pa.ArrowException, FormatError) as error:
            kind = FormatError if isinstance(error, FormatError) else CorruptionError
            raise kind(
                f"{segment.path}: acknowledged events of lane {self.lane!r} cannot be read: {error}"
            ) from error

    def _shelve(self, batch: pa.RecordBatch) -> None:
        """Keep the batch's bodies for the requests that follow."""
        mask = pc.equal(batch.column("kind"), BodyStored.KIND)
        if pc.any(mask).as_py():
            for extra in batch.filter(mask).column("extra").to_pylist():
                values = orjson.loads(extra)
                self._bodies[values["digest"]] = values["body"]


class _Segment:
    """A WAL file being read: the file stays mapped, so removing it takes nothing from this reader."""

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.offset = 0
        self._schema: pa.Schema | None = None

    def _buffer(self, stop: int | None) -> memoryview:
        with pa.memory_map(str(self.path)) as file:
            return memoryview(file.read_buffer(file.size() if stop is None else stop))

    def batches(self, stop: int | None, start_seq: int) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        """(batch, its first sequence number, offset behind it) from where reading stands.

        Raises:
            BadFrameError, pa.ArrowException, FormatError, FileNotFoundError
        """
        buffer = self._buffer(stop)
        if self._schema is None:
            header = read_frame(buffer, 0)
            self._schema = _arrow(pa.ipc.read_schema, pa.py_buffer(header.payload))
            conform(pa.RecordBatch.from_pylist([], schema=self._schema))  # refuses other columns
            self.offset = _skip_to(buffer, header.end, start_seq)
        waiting: list[Frame] = []
        for frame in scan(buffer, self.offset, len(buffer)):
            if frame.kind == ROW_FRAME:
                waiting.append(frame)
                if sum(f.count for f in waiting) < ROWS_TOGETHER:
                    continue
            if waiting:
                yield _rows_batch(waiting)
                waiting = []
            if frame.kind == BATCH_FRAME:
                payload = pa.py_buffer(frame.payload)
                batch = conform(_arrow(pa.ipc.read_record_batch, payload, self._schema))
                yield batch, frame.first_seq, frame.end
            elif frame.kind != ROW_FRAME:
                raise BadFrameError(frame.offset, f"a frame of kind {frame.kind} in the middle of a segment")
        if waiting:
            yield _rows_batch(waiting)

    def bodies(self) -> Iterator[pa.RecordBatch]:
        """The batches before the offset."""
        earlier = _Segment(self.number, self.path)
        for batch, _, end in earlier.batches(self.offset, 0):
            if end > self.offset:
                return
            yield batch


def segment_batches(path: Path, stop: int | None = None) -> Iterator[pa.RecordBatch]:
    """A segment's batches, up to `stop` bytes of the file.

    Raises:
        BadFrameError, pa.ArrowException, FormatError, FileNotFoundError
    """
    for batch, _, _ in _Segment(int(path.stem), path).batches(stop, 0):
        yield batch


def _rows_batch(frames: list[Frame]) -> tuple[pa.RecordBatch, int, int]:
    try:
        rows = [row for f in frames for row in decode_rows(f.payload, f.count)]
        return to_batch(rows, frames[0].first_seq), frames[0].first_seq, frames[-1].end
    except (ValueError, TypeError) as error:
        raise BadFrameError(frames[0].offset, f"not the rows of events: {error}") from error


def _skip_to(buffer: memoryview, offset: int, seq: int) -> int:
    """Offset of the frame that holds event `seq`, by the headers alone."""
    while offset < len(buffer):
        frame = skip_frame(buffer, offset)
        if frame.first_seq + frame.count > seq:
            break
        offset = frame.end
    return offset


def _segment_of(folder: Path, seq: int) -> int | None:
    """Number of the WAL file that holds the event, or None where none does (it may be sealed)."""
    numbers = segment_numbers(folder)
    at = bisect_right(numbers, seq, key=lambda number: _first_seq(folder, number))
    # Of segments that begin at the same event only the last one can hold any; it is the one before `at`.
    if at == 0:
        return None
    number = numbers[at - 1]
    # A gap behind it (removed files) means that the event may be in a sealed unit instead.
    return number if _reaches(folder, number, seq) else None


def _reaches(folder: Path, number: int, seq: int) -> bool:
    following = segment_path(folder, number + 1)
    if following.exists():
        return seq < _first_seq(folder, number + 1)
    mark = read_watermark(folder)
    return number == mark.segment and seq < mark.next_seq


def _first_seq(folder: Path, number: int) -> int:
    """First sequence number of a segment; beyond all others if it was removed or has only just begun."""
    try:
        with segment_path(folder, number).open("rb") as file:
            found = first_seq_of(file.read(ALIGN))
    except FileNotFoundError:
        found = None
    return 1 << 62 if found is None else found


def _arrow(read: Callable[..., Any], *args: Any) -> Any:
    """What pyarrow reads; some of what is no Arrow message it calls an OSError."""
    try:
        return read(*args)
    except OSError as error:
        raise pa.ArrowInvalid(str(error)) from error
