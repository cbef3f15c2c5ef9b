"""Reads one lane, from any process, up to what its writer has made durable.

A segment's WAL file is read while there is one, zero-copy out of the memory-mapped file; where it was
removed after sealing, the sealed unit is read instead. Both hand out the same events in the same order.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.errors import CorruptionError, CutError, FormatError
from rollbook.store.events import BodyStored
from rollbook.store.safe_paths import open_plain
from rollbook.store.sealed.parquet import segment_bodies, segment_rows
from rollbook.store.sealed.unit import SealedSegment, Unit, current_units, unit_folder
from rollbook.store.wal.files import lane_folder, read_watermark, segment_numbers, segment_path
from rollbook.store.wal.frame import ALIGN, BadFrameError, first_seq_of
from rollbook.store.wal.segment import Segment

_PAUSES_S = (0.0, 0.0, 0.001, 0.01, 0.1)
"""Delay before each try to locate an event: a segment may be sealed and its file removed between two
tries."""
_BEFORE_ALL, _AFTER_ALL = -1, 1 << 62


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
        self._segment: Segment | None = None
        self._bodies: dict[str, _Shelved] = {}
        self._more_bodies: Callable[[], Iterator[pa.RecordBatch]] | None = None
        self.held = 0
        """Bytes of memory, about, that reading on from here holds: a sealed segment's rows, and bodies."""

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
            # Reading began in the middle of the segment, so the bodies before that point were not read yet.
            for batch in self._more_bodies():
                self._shelve(batch)
            self._more_bodies = None
        try:
            return self._bodies[digest].body
        except KeyError:
            raise CorruptionError(
                f"lane {self.lane!r}: a request refers to body {digest}, which its segment does not hold"
            ) from None

    # Where to read ----------------------------------------------------------------------------

    def _enter(self, end: int) -> Iterator[pa.RecordBatch]:
        """Find the segment that holds the next event, or hand out the sealed unit that does."""
        for pause in _PAUSES_S:
            if pause:  # to sleep for no time gives way to other threads, too
                time.sleep(pause)
            number = _segment_of(self._folder, self.next_seq)
            if number is not None:
                self._open_segment(number)
                return
            units = current_units(self._store, self.lane)
            unit = next((u for u in units if u.first_seq <= self.next_seq < u.next_seq), None)
            if unit is not None and unit.dropped_us is not None:
                self.next_seq = min(unit.next_seq, end)
                return
            if unit is not None:
                yield from self._read_unit(unit, end)
                return
        raise CorruptionError(
            f"{self._folder}: event {self.next_seq} of lane {self.lane!r} is in no segment and no sealed "
            "unit: restore the missing file from a copy"
        )

    def _open_segment(self, number: int) -> None:
        path = segment_path(self._folder, number)
        self._bodies, self.held = {}, 0
        self._segment = Segment(number, path)
        self._more_bodies = self._segment.bodies

    def _read_unit(self, unit: Unit, end: int) -> Iterator[pa.RecordBatch]:
        for segment in unit.segments:
            if segment.first_seq + segment.events <= self.next_seq:
                continue
            place = max(segment.first_seq, self.next_seq)
            try:
                # All its rows are read with the first batch, because its file may be removed while they are
                # handed out.
                batches = self._open_sealed(unit, segment, place)
            except CorruptionError:
                if unit in current_units(self._store, self.lane):
                    raise
                return  # another unit replaced it, and its files were removed: `poll` locates the event anew
            for batch in batches:
                after = self._after(unit, batch, place)
                self._shelve(batch)
                count = int(pc.sum(pc.less(batch.column("seq"), end)).as_py() or 0)
                place, self.next_seq = after, min(after, end)
                if count:
                    yield batch.slice(0, count)
                if self.next_seq >= end:
                    return
            whole = segment.first_seq + segment.events
            if place != whole and not unit.left_out:
                raise self._incomplete(unit, place)
            self.next_seq = min(whole, end)
            if self.next_seq >= end:
                return

    def _after(self, unit: Unit, batch: pa.RecordBatch, place: int) -> int:
        """The sequence number after a batch that must begin at `place`, or in an excerpt may begin
        later."""
        seq = batch.column("seq")
        first, last = int(seq[0].as_py()), int(seq[-1].as_py())
        # Retention and erasure leave no gaps within a unit, so a row's sequence number gives its index.
        whole = (first, last) == (place, place + batch.num_rows - 1)
        if not whole and not (unit.left_out and first >= place and last - first >= batch.num_rows - 1):
            raise self._incomplete(unit, place)
        return last + 1

    def _open_sealed(self, unit: Unit, segment: SealedSegment, start: int) -> Iterator[pa.RecordBatch]:
        """A sealed segment's batches from an event on; also puts the bodies stored before it on the
        shelf."""
        self._bodies, self._more_bodies, self.held = {}, None, segment.bytes
        batches = segment_rows(self._store, unit, segment, start)
        first = list(islice(batches, 1))
        if start > segment.first_seq:
            for batch in segment_bodies(self._store, unit, segment, start).to_batches():
                self._shelve(batch)
        return chain(first, batches)

    def _incomplete(self, unit: Unit, seq: int) -> CorruptionError:
        return CorruptionError(
            f"{unit_folder(self._store, unit)}: sealed unit of lane {self.lane!r} does not hold event {seq}: "
            "restore it from a copy"
        )

    # A segment's frames -----------------------------------------------------------------------

    def _read_segment(self, segment: Segment, stop: int | None, end: int) -> Iterator[pa.RecordBatch]:
        try:
            for batch, first_seq, frame_end in segment.batches(stop, self.next_seq):
                self._shelve(batch)
                # A cut may have ended inside this batch: its first events were handed out then.
                skip = self.next_seq - first_seq
                if not 0 <= skip < batch.num_rows:
                    raise BadFrameError(segment.offset, f"starts at event {first_seq}")
                count = min(batch.num_rows - skip, end - self.next_seq)
                # Moved on before the hand-out: a caller that stops iterating has had the batch.
                self.next_seq += count
                if skip + count == batch.num_rows:
                    segment.offset = frame_end
                yield batch.slice(skip, count)
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
                try:
                    self.held += len(extra)
                    values = orjson.loads(extra)
                    self._bodies[values["digest"]] = _shelved(values["digest"], values["body"])
                except (ValueError, KeyError, TypeError) as error:
                    raise CorruptionError(f"lane {self.lane!r}: no body in {extra!r}: {error!r}") from error


class _Shelved:
    """A body that readers hold: one copy however many readers there are, as most follow the same
    segment."""

    __slots__ = ("__weakref__", "body")

    def __init__(self, body: Any) -> None:
        self.body = body


_SHELF: WeakValueDictionary[str, _Shelved] = WeakValueDictionary()


def _shelved(digest: str, body: Any) -> _Shelved:
    shelved = _SHELF.get(digest)
    if shelved is None or shelved.body != body:  # in a damaged store another body may have the same digest
        shelved = _SHELF[digest] = _Shelved(body)
    return shelved


def _segment_of(folder: Path, seq: int) -> int | None:
    """Number of the WAL file that holds the event, or None where none does (it may be sealed).

    Files may come and go meanwhile. Then None may be given for an event that a file holds; but never a
    file that does not hold it.
    """
    # Read before the listing: so every segment up to the mark's is in the listing, or was removed. What is
    # beyond is begun at best; after a power cut its first bytes may be anything.
    mark = read_watermark(folder)
    numbers = [number for number in segment_numbers(folder) if number <= mark.segment]
    at = bisect_right(numbers, seq, key=lambda number: _first_seq(folder, number))
    # Of segments that begin at the same event only the last one can hold any; it is the one before `at`.
    if at == 0:
        return None
    number = numbers[at - 1]
    if _first_seq(folder, number) == _BEFORE_ALL:
        return None
    if number == mark.segment:
        return number if seq < mark.next_seq else None
    # If files after it were removed, the event may be in a sealed unit instead.
    return number if seq < _first_seq(folder, number + 1) else None


def _first_seq(folder: Path, number: int) -> int:
    """First sequence number of a segment; `_BEFORE_ALL` if it was removed, `_AFTER_ALL` if it was
    just begun.

    Sealed segments are removed from the front, so existing ones come after the removed ones.
    """
    try:
        with open(open_plain(segment_path(folder, number), os.O_RDONLY), "rb") as file:
            seq = first_seq_of(file.read(ALIGN))
    except FileNotFoundError:
        return _BEFORE_ALL
    return _AFTER_ALL if seq is None else seq
