"""A tail as messages: server-sent events, or Arrow. Each is read by one worker thread at a time.

A feed at rest holds a cut and nothing else: it can be put aside at any time, and goes on behind the last
event that it handed out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Lock
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store import Event, format_cut
from rollbook.store.events.codec import decode, inline_bodies, refers
from rollbook.store.events.event_json import json_bytes
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.tail import Tail
from rollbook.store.sealed.parquet import TABLE_SCHEMA

MESSAGE_BYTES = 256 << 10
"""A message is sent once it has grown to about this many bytes; one event is never cut in two."""
SEARCH_S = 0.2
"""How long a thread reads without finding a wanted event before it yields to other feeds."""
END_OF_ARROW_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class Feed(Protocol):
    """Messages of a tail, one after another."""

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""

    def next(self) -> bytes | None:
        """The next message; empty where none came in `SEARCH_S`; None at a head that was announced."""

    @property
    def held(self) -> int:
        """Bytes of memory, about, that reading holds until it rests; 0 at the head."""

    def rest(self) -> None:
        """Let go of all that reading holds in memory."""


class SseFeed:
    """A tail as the bytes of server-sent events.

    Args:
        limit: send so many events in all, if given.
    """

    def __init__(self, tail: Tail, limit: int | None) -> None:
        self._tail, self._left = tail, limit
        self._events: Iterator[Event] = iter(())
        self._batch = 0
        self._cut = tail.cut()
        self._announced: dict[str, int] | None = None
        self._round_ended = False
        self._reading = Lock()

    @property
    def done(self) -> bool:
        """Whether the limit is reached."""
        return self._left == 0

    @property
    def held(self) -> int:
        """Bytes of memory, about, that reading holds until it rests; 0 at the head."""
        return 0 if self._tail.at_head else self._tail.held + self._batch

    def rest(self) -> None:
        """Let go of all that reading holds in memory."""
        with self._reading:
            if self._round_ended:
                self._cut = self._tail.cut()
            self._events, self._batch = iter(()), 0
            self._tail.rest(self._cut)

    def next(self) -> bytes | None:
        """The next message; empty where none came in `SEARCH_S`; None at a head that was announced."""
        with self._reading:
            return self._head() if self._round_ended else self._next()

    def _next(self) -> bytes | None:
        deadline = time.monotonic() + SEARCH_S
        parts: list[bytes] = []
        size = 0
        while not self.done and size < MESSAGE_BYTES:
            event = next(self._events, None)
            if event is not None:
                parts.append(json_bytes(event))
                size += len(parts[-1])
                self._cut[event.lane] = event.seq + 1
                self._left = None if self._left is None else self._left - 1
                continue
            if parts or time.monotonic() > deadline:
                break
            # Events that were skipped since the last one count as sent.
            self._cut = self._tail.cut()
            if (step := self._tail.next_batch()) is None:
                if not parts:
                    return self._head()
                self._round_ended = True
                break
            reader, batch = step
            self._batch = batch.nbytes
            self._events = decode(batch, reader.lane, reader.body)
        return b"id: %s\ndata: [%s]\n\n" % (self._id(), b",".join(parts)) if parts else b""

    def _head(self) -> bytes | None:
        self._round_ended = False
        self._cut = self._tail.cut()
        if self._cut == self._announced:
            return None
        self._announced = dict(self._cut)
        return b'event: head\nid: %s\ndata: {"cut":"%s"}\n\n' % (self._id(), self._id())

    def _id(self) -> bytes:
        return format_cut(self._cut).encode()


class ArrowFeed:
    """One round of a tail as an Arrow IPC stream, requests whole."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._cut = tail.cut()
        self._rows: Iterator[tuple[LaneReader, pa.RecordBatch]] = iter(())
        self._begun = self._ended = False
        self._reading = Lock()

    @property
    def done(self) -> bool:
        """Whether the stream has its end."""
        return self._ended

    @property
    def held(self) -> int:
        """Bytes of memory, about, that reading holds until it rests; 0 at the head."""
        return self._tail.held

    def rest(self) -> None:
        """Let go of all that reading holds in memory."""
        with self._reading:
            self._rows = iter(())
            self._tail.rest(self._cut)

    def next(self) -> bytes | None:
        """The next message: the schema, record batches, the end of the stream; empty where none is wanted."""
        with self._reading:
            if not self._begun:
                self._begun = True
                schema: bytes = TABLE_SCHEMA.serialize().to_pybytes()
                return schema
            step = next(self._rows, None)
            if step is not None:
                reader, rows = step
                self._cut[reader.lane] = rows.column("seq")[-1].as_py() + 1
                return _arrow_message(reader, rows)
            self._cut = self._tail.cut()
            if (found := self._tail.next_batch()) is None:
                self._ended = True
                return END_OF_ARROW_STREAM
            self._rows = _parts(*found)
            return b""


def _parts(reader: LaneReader, batch: pa.RecordBatch) -> Iterator[tuple[LaneReader, pa.RecordBatch]]:
    """The batch's rows in parts: those that refer to bodies by themselves, as these may be of any size."""
    start = 0
    for row in pc.indices_nonzero(refers(batch)).to_pylist():
        if row > start:
            yield reader, batch.slice(start, row - start)
        yield reader, batch.slice(row, 1)
        start = row + 1
    if start < batch.num_rows:
        yield reader, batch.slice(start)


def _arrow_message(reader: LaneReader, rows: pa.RecordBatch) -> bytes:
    """Rows as a record batch message, the lane first."""
    whole = inline_bodies(rows, reader.body)
    lanes = pa.repeat(pa.scalar(reader.lane), whole.num_rows)
    table: Any = pa.record_batch([lanes, *whole.columns], schema=TABLE_SCHEMA)
    message: bytes = table.serialize().to_pybytes()
    return message
