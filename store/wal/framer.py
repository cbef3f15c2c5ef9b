"""Encodes groups of appends as frames, and decides where segments begin.

No file is touched here; `wal.flusher` executes the resulting jobs in the order in which they
were made.

The newest event ids of a lane are held in memory, which makes appends idempotent.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from operator import lt
from typing import Any

from rollbook.store.errors import UnstorableError
from rollbook.store.events import BodyStored, Event, TurnCompleted, TurnRequested
from rollbook.store.events.batches import encode_batch
from rollbook.store.events.blobs import KEY, externalize
from rollbook.store.events.codec import MAY_REFER
from rollbook.store.events.schema import ARRAYS, LOG_SCHEMA, ROW_NAMES, Row, row_of
from rollbook.store.settings import AppendSettings
from rollbook.store.wal.flusher import Acknowledged, Job
from rollbook.store.wal.frame import BATCH_FRAME, FEW, HEADER_FRAME, ROW_FRAME, encode_frame, encode_rows
from rollbook.store.wal.segment import LaneState

Appends = Sequence[tuple[Sequence[Event], "Future[int]"]]
_REFERENCE = f'"{KEY}"'.encode()
FRAME_BYTES = 32 << 20
"""A group of more bytes than about this is written in several frames: each is in memory several times."""
APPEND_BYTES = 1 << 30
"""Largest append, whose events share a frame; Arrow's offsets and the frame's length end at 2 and 4 GiB."""
_ARRAYS_AT = tuple(ROW_NAMES.index(name) for name in ARRAYS)
_REWARD_AT, _TRAJECTORY_AT = ROW_NAMES.index("reward"), ROW_NAMES.index("trajectory_id")


@dataclass(frozen=True, slots=True, eq=False)
class _Append:
    """An append whose events have a row each; `bytes` is about what they take."""

    events: Sequence[Event]
    future: Future[int]
    rows: list[Row]
    bytes: int


class Framer:
    """Encodes groups of appends, and keeps the lane's sequence numbers, chain and segments.

    Args:
        window: which events the lane already holds.
    """

    def __init__(
        self, lane: str, store_id: str, state: LaneState, window: EventWindow, settings: AppendSettings
    ) -> None:
        self._lane, self._store_id, self._settings = lane, store_id, settings
        self._window = window
        self._next_seq, self._chain = state.next_seq, state.chain
        self._segment = state.last_segment
        self._offset = 0
        self._oldest: float | None = None
        self._bodies: set[str] = set()

    def begin_segment(self) -> Job:
        """A job that begins the lane's next segment, with its header frame only."""
        self._segment += 1
        self._offset, self._oldest = 0, None
        self._bodies.clear()
        metadata = {"lane": self._lane, "segment": str(self._segment), "store": self._store_id}
        header = LOG_SCHEMA.with_metadata(metadata).serialize()
        buffers = self._frame(HEADER_FRAME, header, 0)
        return Job(buffers, self._next_seq, new_segment=self._segment)

    def seconds_until_old(self) -> float | None:
        """How long until the segment should be closed for its age; None while it holds no event."""
        if self._oldest is None:
            return None
        return max(self._oldest + self._settings.segment_age_s - time.monotonic(), 0.0)

    def jobs(self, group: Appends) -> Iterator[Job]:
        """What to write for the group: perhaps a new segment, perhaps frames, perhaps nothing.

        Each is made when it is asked for, so that of a large group one frame is in memory, and not all.
        """
        too_old = self.seconds_until_old() == 0.0
        if too_old or (group and self._offset >= self._settings.segment_bytes):
            yield self.begin_segment()
        # An append without a stored form is refused before a frame is made of it.
        part: list[_Append] = []
        size = 0
        for append in filter(None, map(_with_rows, group)):
            if part and size + append.bytes > FRAME_BYTES:
                yield from self._framed(part)
                part, size = [], 0
            part.append(append)
            size += append.bytes
        if part:
            yield from self._framed(part)

    def _framed(self, appends: Sequence[_Append]) -> list[Job]:
        """The appends in one frame or, if one of them does not fit into it, one by one."""
        try:
            return [self._commit(appends)]
        except Exception as error:
            if len(appends) > 1:
                return [job for append in appends for job in self._framed([append])]
            _refuse(appends[0].future, error)
            return []

    def _commit(self, appends: Sequence[_Append]) -> Job:
        first_seq = self._next_seq
        bodies = self._bodies.copy()
        try:
            rows, acknowledged, new = self._rows(appends)
            frame = self._encode(rows, first_seq)
        except Exception:
            self._bodies = bodies
            raise
        self._next_seq = first_seq + len(rows)
        self._window.add(new)
        buffers = self._frame(*frame, first_seq=first_seq) if frame else []
        if rows and self._oldest is None:
            self._oldest = time.monotonic()
        return Job(buffers, self._next_seq, acknowledged=acknowledged)

    def _rows(self, appends: Sequence[_Append]) -> tuple[list[Row], Acknowledged, dict[str, int]]:
        """Rows of the events that are new, where each append's first event is, and the rows' places by id."""
        rows: list[Row] = []
        acknowledged: Acknowledged = []
        new: dict[str, int] = {}
        all_new = self._window.all_new([row[0] for append in appends for row in append.rows])
        for append in appends:
            first: int | None = None
            for event, row in zip(append.events, append.rows, strict=True):
                seq = None if all_new else self._known(event.event_id, new)
                if seq is None:
                    for stored in self._event_rows(event, row):
                        seq = new[stored[0]] = self._next_seq + len(rows)
                        rows.append(stored)
                first = seq if first is None else first
            assert first is not None
            acknowledged.append((append.future, first))
        return rows, acknowledged, new

    def _known(self, event_id: str, new: dict[str, int]) -> int | None:
        """Where the event is, if an earlier append, or this group, brought it."""
        seq = new.get(event_id)
        return self._window.find(event_id) if seq is None else seq

    def _event_rows(self, event: Event, row: Row) -> list[Row]:
        """The event's row, preceded by rows of the bodies that it is the first in this segment to name."""
        record = event.record
        limit = self._settings.body_bytes
        match record:
            case TurnRequested():
                small_enough = len(row[-1]) <= limit and _REFERENCE not in row[-1]
            case TurnCompleted():
                small_enough = not record.routed_experts
            case _:
                small_enough = True
        if small_enough:
            return [row]
        rows: list[Row] = []

        def store(digest: str, body: Any) -> None:
            if digest not in self._bodies:
                self._bodies.add(digest)
                rows.append(row_of(Event(BodyStored(digest, body), event.run, time_us=event.time_us)))

        small = {name: externalize(getattr(record, name), limit, store) for name in MAY_REFER[event.kind]}
        return [*rows, row_of(replace(event, record=replace(record, **small)))]

    def _encode(self, rows: list[Row], first_seq: int) -> tuple[int, Any, int] | None:
        """(frame kind, payload, events)"""
        if not rows:
            return None
        if len(rows) < FEW:
            return ROW_FRAME, encode_rows(rows), len(rows)
        return BATCH_FRAME, encode_batch(rows, first_seq), len(rows)

    def _frame(self, kind: int, payload: Any, count: int, first_seq: int | None = None) -> list[Any]:
        seq = self._next_seq if first_seq is None else first_seq
        buffers, self._chain = encode_frame(kind, payload, seq, count, self._chain)
        self._offset += sum(memoryview(b).nbytes for b in buffers)
        return buffers


def _with_rows(append: tuple[Sequence[Event], Future[int]]) -> _Append | None:
    """The append with its events' rows; None, with its future failed, if it has no stored form."""
    events, future = append
    try:
        rows = [row_of(event) for event in events]
        _check_rewards(rows)
        size = sum(map(_row_bytes, rows))
        if size > APPEND_BYTES:
            raise ValueError(f"its {size} bytes are more than the {APPEND_BYTES} that one append can hold")
    except Exception as error:
        _refuse(future, error)
        return None
    return _Append(events, future, rows, size)


def _check_rewards(rows: Sequence[Row]) -> None:
    """Check that rewards are finite numbers.

    Raises:
        ValueError: one is not finite.
    """
    for row in rows:
        reward = row[_REWARD_AT]
        if reward is not None and not math.isfinite(reward):
            trajectory_id = row[_TRAJECTORY_AT]
            raise ValueError(f"the reward of trajectory {trajectory_id} is {reward}: give a finite number")


def _row_bytes(row: Row) -> int:
    """About how many bytes a row takes in its frame."""
    arrays = [row[at] for at in _ARRAYS_AT]
    return len(row[-1]) + sum(4 * len(values) for values in arrays if values is not None)


def _refuse(future: Future[int], error: Exception) -> None:
    # One client's bad value must not stop the lane or fail the appends of others.
    future.set_exception(UnstorableError(f"an event cannot be stored: {error}"))


REMEMBERED = 65_536
_BLOCK = 512
"""Events that are remembered, and forgotten, together: a dict for each would take five times the memory."""
_ABOVE_ALL = "~"


class EventWindow:
    """The newest event ids of a lane, and their sequence numbers.

    Ids are UUIDv7, so they increase with the time they were made. An id above every id in the
    lane is new, and one above every forgotten id cannot be a forgotten one: in both cases the
    window alone decides. For an older one `search` looks in the log; that happens only when
    somebody repeats an append after tens of thousands of others.

    Args:
        search: finds the sequence number of an event id in the whole lane, or None.
        size: how many are remembered, at least.
    """

    def __init__(self, search: Callable[[str], int | None], size: int = REMEMBERED) -> None:
        self._search, self._size = search, size
        self._blocks: deque[dict[str, int]] = deque()
        self._count = 0
        # Only an id that is not above all others needs the index: many a lane never builds it.
        self._indexed: dict[str, int] = {}
        self._not_indexed: deque[dict[str, int]] = deque()
        self._highest = self._forgotten = ""

    def find(self, event_id: str) -> int | None:
        """The sequence number of the event, or None where the lane does not hold it."""
        if event_id > self._highest:
            return None
        while self._not_indexed:
            self._indexed.update(self._not_indexed.popleft())
        seq = self._indexed.get(event_id)
        if seq is None and self._forgotten and event_id <= self._forgotten:
            return self._search(event_id)
        return seq

    def all_new(self, ids: Sequence[str]) -> bool:
        """Whether the ids rise, each above all that the lane holds; if not, some may still be new."""
        return ids[0] > self._highest and all(map(lt, ids, islice(ids, 1, None)))

    def add(self, events: dict[str, int]) -> None:
        """Remember events, id -> sequence number; perhaps forget the oldest. The dict is the window's now."""
        if not events:
            return
        if self._not_indexed and len(self._not_indexed[-1]) < _BLOCK:
            self._not_indexed[-1].update(events)
        else:
            self._blocks.append(events)
            self._not_indexed.append(events)
        self._count += len(events)
        self._highest = max(self._highest, max(events))
        while self._count - len(self._blocks[0]) >= self._size:
            self._forget(self._blocks.popleft())

    def _forget(self, oldest: dict[str, int]) -> None:
        self._count -= len(oldest)
        self._forgotten = max(self._forgotten, max(oldest))
        if self._not_indexed and self._not_indexed[0] is oldest:
            self._not_indexed.popleft()
        else:
            for event_id in oldest:
                self._indexed.pop(event_id, None)

    def preload(self, ids: Sequence[tuple[str, int]], *, complete: bool) -> None:
        """Fill with (id, sequence number) of the lane's newest events, in order.

        Args:
            complete: whether these are all the lane has. If not, earlier ids are unknown; since
                ids do not rise strictly, everything up to the highest of the older half is
                searched for.
        """
        if not complete:
            older = ids[: len(ids) // 2 + 1]
            self._forgotten = max((event_id for event_id, _ in older), default=_ABOVE_ALL)
            self._highest = self._forgotten
        for start in range(0, len(ids), _BLOCK):
            self.add(dict(ids[start : start + _BLOCK]))
