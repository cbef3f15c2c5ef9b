"""Reads one lane, from any process, up to what its writer has made durable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollbook.store.errors import CorruptionError, CutError, FormatError
from rollbook.store.lane.files import read_watermark, segment_path
from rollbook.store.lane.frame import BATCH_FRAME, HEADER_FRAME, BadFrameError, scan
from rollbook.store.schema import LOG_SCHEMA


class LaneReader:
    """Hands out a lane's record batches in order, each once; it remembers where it stopped.

    Batches share the memory-mapped files' memory: nothing is copied until someone asks for values.
    """

    def __init__(self, folder: Path) -> None:
        self.lane = folder.name
        self._folder = folder
        self._segment, self._offset = 1, 0
        self.next_seq = 0

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
        while self.next_seq < end and self._segment <= mark.segment:
            path = segment_path(self._folder, self._segment)
            stop = mark.offset if self._segment == mark.segment else None
            yield from self._read_segment(path, stop, end)
            if self.next_seq >= end:
                return
            if self._segment == mark.segment:
                raise CorruptionError(f"{path}: holds fewer events than were acknowledged")
            self._segment, self._offset = self._segment + 1, 0

    def _read_segment(self, path: Path, stop: int | None, end: int) -> Iterator[pa.RecordBatch]:
        try:
            stop = path.stat().st_size if stop is None else stop
            buffer = pa.memory_map(str(path)).read_buffer(stop)
            for frame in scan(memoryview(buffer), self._offset, stop):
                payload = pa.py_buffer(frame.payload)
                if frame.kind == HEADER_FRAME:
                    _check_schema(path, payload)
                elif frame.kind == BATCH_FRAME:
                    # A cut may have ended inside this frame: its first events were handed out then.
                    skip = self.next_seq - frame.first_seq
                    if not 0 <= skip < frame.count:
                        raise BadFrameError(frame.offset, f"starts at event {frame.first_seq}")
                    batch = _arrow(pa.ipc.read_record_batch, payload, LOG_SCHEMA)
                    taken = min(frame.count - skip, end - self.next_seq)
                    # Moved on before the hand-out: whoever stops iterating has had the batch.
                    self.next_seq += taken
                    if skip + taken == frame.count:
                        self._offset = frame.end
                    yield batch.slice(skip, taken)
                    if skip + taken < frame.count:
                        return
                self._offset = frame.end
                if self.next_seq >= end:
                    return
        except (BadFrameError, FileNotFoundError, pa.ArrowException) as error:
            raise CorruptionError(
                f"{path}: acknowledged events of lane {self.lane!r} are damaged: {error}"
            ) from error


def _arrow(read: Callable[..., Any], *args: Any) -> Any:
    """What pyarrow reads; some of what is no Arrow message it calls an OSError."""
    try:
        return read(*args)
    except OSError as error:
        raise pa.ArrowInvalid(str(error)) from error


def _check_schema(path: Path, payload: pa.Buffer) -> None:
    schema = _arrow(pa.ipc.read_schema, payload)
    if not schema.equals(LOG_SCHEMA):
        raise FormatError(f"{path}: written with other columns; update rollbook to read it")
