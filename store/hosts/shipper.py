"""Ships a lane: the bytes of its segments, as they become durable, in numbered chunks to the medium.

One thread a lane, one chunk under way. It takes bytes from the lane's files, so that a process that begins
again goes on where the one before stopped, and what is shipped is what is on the disk. A chunk names a closed
cut of this host: all that its events can name was readable here before they were written.

With `ack = "local"` an append is acknowledged once it is on this disk, as long as this process's lease is
valid; with `ack = "medium"` once the chunk that holds it is put, and nothing is readable here before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.store.cut import Cut
from rollbook.store.errors import CorruptionError, FencedError, StoreError
from rollbook.store.hosts.openings import IDLE_S, announce
from rollbook.store.hosts.session import Session
from rollbook.store.ids import now_us
from rollbook.store.medium.chunk import Chunk, Part, encode_chunk
from rollbook.store.medium.medium import Medium, lane_of, lane_sequence, newest_chunk, read_chunk
from rollbook.store.permissions import make_empty, open_file, replace_small
from rollbook.store.safe_paths import open_plain
from rollbook.store.sealed.unit import unsealed_start
from rollbook.store.wal.files import (
    FENCED,
    SHIPPED,
    Shipped,
    Watermark,
    closed_head,
    lane_folder,
    read_shipped,
    read_watermark,
    segment_numbers,
    segment_path,
)
from rollbook.store.wal.flusher import Acknowledged
from rollbook.store.wal.frame import ALIGN, BadFrameError, span_of

RETRY_S, LONGEST_RETRY_S = 0.1, 2.0
LEASE_LOOK_S = 0.05
"""Between two looks at a lease that is to be renewed before anything is acknowledged."""
SETTLED = b"settled\n"
"""The content of the file FENCED once it is known where the lane ends."""
IDLE_LOOK_S = 1.0
"""Between two looks whether the lease was ended, while there is nothing to ship."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sender:
    """What all lanes of a process are shipped with.

    Attributes:
        store, store_id: the folder, and its id.
        gated: whether only what the medium has is acknowledged.
    """

    medium: Medium
    session: Session
    store: Path
    store_id: str
    host: str
    gated: bool


class LaneShipper:
    """Ships one lane while its lock is held by this process.

    Args:
        on_fenced: called once, with the error, when another host has ended the lane.

    Raises:
        FencedError: another host has ended the lane.
        CorruptionError: the medium holds other bytes of it than this host.
        MediumError: the medium does not answer.
    """

    def __init__(self, sender: Sender, lane: str, on_fenced: Callable[[FencedError], None]) -> None:
        self.lane = lane
        self._sender, self._on_fenced = sender, on_fenced
        self._folder = lane_folder(sender.store, lane)
        self._sequence = lane_sequence(sender.host, lane)
        sender.session.add_lane(self._sequence)
        self._put_at, self._unannounced = -math.inf, False
        self._at = _taken(sender, lane, self._sequence, self._folder)
        self._fd = open_file(self._folder / SHIPPED, os.O_RDWR | os.O_CREAT)
        self._move(self._at)
        self._cut: Cut = {}
        self._unanswered: tuple[Chunk, bytes, Shipped] | None = None
        self._due = 0.0
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Future[int], int]] = deque()
        self._durable = self._at.next_seq
        self._fenced: FencedError | None = None
        self._trouble: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"ship-{lane}", daemon=True)
        self._thread.start()

    @property
    def shipped(self) -> int:
        """How many events of the lane the medium has."""
        return self._at.next_seq

    @property
    def waiting(self) -> str | None:
        """What acknowledgements wait for, or None."""
        trouble = self._trouble
        if not self._sender.session.valid:
            why = "" if trouble is None else f": {trouble}"
            return f"this process's lease has run out, as the medium does not answer{why}"
        return f"the medium does not answer: {trouble}" if trouble and self._sender.gated else None

    def acknowledge(self, mark: Watermark, acknowledged: Acknowledged) -> None:
        """Resolve the futures of what is durable here up to a mark, now or when it may be."""
        with self._changed:
            self._durable = mark.next_seq
            fenced = self._fenced
            now = (
                fenced is None and not self._sender.gated and not self._waiting and self._sender.session.valid
            )
            if not now and fenced is None:
                self._waiting += ((mark.next_seq, future, seq) for future, seq in acknowledged)
            self._changed.notify_all()
        if now:
            for future, seq in acknowledged:
                future.set_result(seq)
        elif fenced is not None:
            for future, _ in acknowledged:
                future.set_exception(fenced)

    def close(self, patience_s: float = 10.0) -> None:
        """Ship what is durable, as far as the medium answers in time, and end. Safe to call twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._until = time.monotonic() + patience_s
            self._changed.notify_all()
        self._thread.join()
        self._fail(FencedError(f"lane {self.lane!r} was closed before the medium had this event"))
        os.close(self._fd)

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        retry = 0.0
        while self._wait(retry):
            begun = time.monotonic()
            try:
                grew = self._ship()
                self._release()
                retry, self._trouble = 0.0, None
                self._due = begun + self._pace(begun, grew)
            except FencedError as error:
                self._end(error)
                return
            except (StoreError, OSError) as error:
                if not retry:
                    logger.warning("lane %s is not shipped, and tried again: %s", self.lane, error)
                retry, self._trouble = min(max(2 * retry, RETRY_S), LONGEST_RETRY_S), str(error)
                with contextlib.suppress(FencedError):
                    self._release()
            if self._closing and (self._at.next_seq >= self._durable or time.monotonic() > self._until):
                return

    def _wait(self, retry: float) -> bool:
        """Wait until there is something to do: to ship what is durable, at once where somebody waits for it;
        to look whether the lease is valid, or was ended. Whether to go on.

        Args:
            retry: how long to wait in any case, as the medium did not answer.
        """
        begun = time.monotonic()
        with self._changed:
            while True:
                now, behind = time.monotonic(), self._at.next_seq < self._durable
                if self._closing and not behind:
                    return False
                due = min(self._due, begun + IDLE_LOOK_S) if behind else begun + IDLE_LOOK_S
                if self._closing or (self._waiting and self._sender.gated and behind):
                    due = now
                elif self._waiting:
                    due = min(due, now + LEASE_LOOK_S)
                due = max(due, begun + retry)
                if now >= due or (
                    self._waiting and not self._sender.gated and self._sender.session.valid and not retry
                ):
                    return True
                self._changed.wait(due - now)

    def _pace(self, begun: float, grew: int) -> float:
        """How long to wait from one put to the next: longer where chunks are small, or the medium is slow."""
        least, most = self._sender.medium.pace_s
        took = time.monotonic() - begun
        return min(max(least, 2 * took) if grew > 64 << 10 else (least + most) / 2, most)

    def _release(self) -> None:
        """Resolve the futures that nothing holds back any more."""
        session = self._sender.session
        if session.fenced is not None:
            raise FencedError(
                f"lane {self.lane!r} was given up to {session.fenced}: this process's lease had ended"
            )
        ready = []
        with self._changed:
            while self._waiting:
                if self._sender.gated and self._waiting[0][0] > self._at.next_seq:
                    break
                if not self._sender.gated and not session.valid:
                    break
                ready.append(self._waiting.popleft())
        for _, future, seq in ready:
            future.set_result(seq)

    def _end(self, error: FencedError) -> None:
        with self._changed:
            self._fenced = error
        make_empty(self._folder / FENCED)
        self._fail(error)
        self._on_fenced(error)

    def _fail(self, error: FencedError) -> None:
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
        for _, future, _ in waiting:
            future.set_exception(error)

    # Shipping -----------------------------------------------------------------------------------

    def _ship(self) -> int:
        """Put what is durable now, chunk by chunk; how many bytes."""
        sent = self._put()
        head = closed_head(self._sender.store)
        # What is readable here at one instant is closed; what only this lane has behind it is so too, as long
        # as nobody can have read it.
        target = self._durable if self._sender.gated else head.get(self.lane, 0)
        cut = {
            lane: count for lane, count in head.items() if lane != self.lane and self._cut.get(lane) != count
        }
        while self._at.next_seq < target:
            parts, end = read_parts(self._folder, self._at, target, self._sender.medium.most_bytes)
            last = end.next_seq >= target
            chunk = Chunk(
                store=self._sender.store_id,
                lane=self.lane,
                host=self._sender.host,
                number=self._at.number,
                epoch=self._at.epoch,
                session=self._sender.session.name,
                next_seq=end.next_seq,
                cut=cut if last else {},
                parts=parts,
                sent_us=now_us(),
            )
            # The same bytes until there is an answer: a chunk that was put without one is recognized.
            self._unanswered = chunk, encode_chunk(chunk), end
            sent += self._put()
        return sent

    def _put(self) -> int:
        """Put the chunk that has no answer yet, if there is one; how many bytes of the lane it holds.

        Raises:
            FencedError: there is another one.
            MediumError: no answer.
        """
        if self._unanswered is None:
            self._announce()
            return 0
        chunk, entry, end = self._unanswered
        if not self._sender.medium.put(self._sequence, chunk.number, entry):
            other = read_chunk(self._sender.medium, self._sequence, chunk.number)
            raise _fence_error(chunk if other is None else other)
        self._unanswered = None
        self._cut = {**self._cut, **chunk.cut}
        self._move(end)
        now = time.monotonic()
        self._unannounced |= now - self._put_at >= IDLE_S
        self._put_at = now
        self._announce()
        return sum(len(part.data) for part in chunk.parts)

    def _announce(self) -> None:
        """Let followers know of the lane, once something is there that they would list."""
        if self._unannounced:
            announce(self._sender.medium, self._sequence)
            self._unannounced = False

    def _move(self, at: Shipped) -> None:
        os.pwrite(self._fd, at.pack(), 0)
        self._at = at


def read_parts(folder: Path, at: Shipped, target: int, most: int) -> tuple[list[Part], Shipped]:
    """The bytes of a lane's segments from one place on, up to an event, at most so many; and where they end.

    A frame that does not fit by itself goes in several chunks.

    Raises:
        CorruptionError: a segment is missing, or holds no frames there.
    """
    parts: list[Part] = []
    mark, room, number = read_watermark(folder), most // ALIGN * ALIGN, at.number + 1
    while at.next_seq < target and room:
        most = at.into + room if at.segment < mark.segment else min(at.into + room, mark.offset - at.offset)
        try:
            data = _bytes_of(segment_path(folder, at.segment), at.offset, most)
        except FileNotFoundError:
            at = _behind_removed(folder, at)
            continue
        if len(data) == 0 and at.segment < mark.segment:
            at = replace(at, segment=at.segment + 1, offset=0)
            continue
        begin, at = at, _whole_frames(data, at, target, room + at.into)
        end = at.offset - begin.offset
        if end == 0:
            if not parts:  # the next frame is larger than a chunk
                end = begin.into + room
                parts.append(Part(at.segment, begin.offset + begin.into, data[begin.into : end]))
                at = replace(at, into=end)
            break
        parts.append(Part(at.segment, begin.offset + begin.into, data[begin.into : end]))
        room -= end - begin.into
    return parts, replace(at, number=number)


def _bytes_of(path: Path, offset: int, most: int) -> memoryview:
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        file.seek(offset)
        return memoryview(file.read(most))


def _behind_removed(folder: Path, at: Shipped) -> Shipped:
    """The segment that follows one that was sealed and removed once all of it was shipped.

    Raises:
        CorruptionError: something of it was not.
    """
    following = next((number for number in segment_numbers(folder) if number > at.segment), None)
    if following is None or _first_event(segment_path(folder, following)) != at.next_seq:
        raise CorruptionError(
            f"{segment_path(folder, at.segment)} is gone, and was not shipped from event {at.next_seq} on: "
            "restore it from a copy"
        )
    return replace(at, segment=following, offset=0, into=0)


def _first_event(path: Path) -> int:
    """The event that a segment begins with."""
    return span_of(_bytes_of(path, 0, ALIGN), 0)[1]


def _whole_frames(data: memoryview, at: Shipped, target: int, room: int) -> Shipped:
    """Where the whole frames end that are to be sent, up to an event and of at most so many bytes.

    Raises:
        CorruptionError: the bytes are no frames.
    """
    offset, seq = 0, at.next_seq
    try:
        while offset < len(data) and seq < target:
            end, after = span_of(data, offset)
            if end > room:
                break
            offset, seq = end, after
    except BadFrameError as error:
        raise CorruptionError(f"segment {at.segment}, offset {at.offset + offset}: {error.reason}") from None
    return replace(at, offset=at.offset + offset, next_seq=seq, into=0) if offset else at


# Where to go on -------------------------------------------------------------------------------------


def _taken(sender: Sender, lane: str, sequence: str, folder: Path) -> Shipped:
    """How far the lane is in the medium, for whoever takes it now.

    Raises:
        FencedError: another host has ended it.
        CorruptionError: the medium holds other bytes of it.
    """
    known, medium = read_shipped(folder), sender.medium
    newest = medium.last(sequence)
    if newest is None:
        at = _beginning(sender.store, lane, folder)
    elif known is not None and known.number == newest + 1:
        at = known
    else:
        at = _behind(medium, sequence, newest, folder)
    return replace(at, epoch=at.epoch + 1, gated=sender.gated)


def _beginning(store: Path, lane: str, folder: Path) -> Shipped:
    """Nothing is in the medium: the oldest segment that is here comes first, behind what only units have."""
    numbers = segment_numbers(folder)
    if not numbers:
        start = unsealed_start(store, lane)
        return Shipped(0, 0, start.number, 0, 0, start.next_seq, False)
    first = numbers[0]
    seq = _first_event(segment_path(folder, first)) if first > 1 else 0
    return Shipped(0, 0, first, 0, 0, seq, False)


def _behind(medium: Medium, sequence: str, newest: int, folder: Path) -> Shipped:
    """Where the newest chunk ends, if the bytes before that are those of this host.

    Raises:
        FencedError: it is a fence.
        CorruptionError: the medium holds other bytes than this host.
    """
    number, next_seq, epoch = newest, 0, 0
    while chunk := read_chunk(medium, sequence, number):
        if chunk.kind == "fence":
            raise _fence_error(chunk)
        next_seq, epoch = max(next_seq, chunk.next_seq), max(epoch, chunk.epoch)
        if chunk.end is not None:
            _check_same(folder, chunk.parts[-1])
            segment, offset = chunk.end
            whole = _last_boundary(segment_path(folder, segment), offset)
            return Shipped(newest + 1, epoch, segment, whole, offset - whole, next_seq, False)
        number -= 1  # an earlier release put some that only told of units
    segment, offset = _place_of(folder, next_seq)
    return Shipped(newest + 1, epoch, segment, offset, 0, next_seq, False)


def _check_same(folder: Path, part: Part) -> None:
    """Check that a segment holds what was shipped of it, if it is still here.

    Raises:
        CorruptionError: it does not.
    """
    with contextlib.suppress(FileNotFoundError):
        path = segment_path(folder, part.segment)
        if bytes(_bytes_of(path, part.offset, len(part.data))) != bytes(part.data):
            raise CorruptionError(
                f"{folder}: the medium holds other bytes of this lane than this disk, at offset "
                f"{part.offset} of segment {part.segment}: this is an older copy of the lane, or another "
                "host writes it too; move the folder away, and join the store again"
            )


def _last_boundary(path: Path, end: int) -> int:
    """Where the last frame ends that is whole within so many bytes of a segment; `end` where it was
    removed."""
    try:
        data = _bytes_of(path, 0, end)
    except FileNotFoundError:
        return end
    offset = 0
    with contextlib.suppress(BadFrameError):
        while (following := span_of(data, offset)[0]) <= end:
            offset = following
    return offset


def _place_of(folder: Path, seq: int) -> tuple[int, int]:
    """(segment, offset) behind the frames that hold the events before one."""
    numbers = segment_numbers(folder)
    begun = [number for number in numbers if _first_event(segment_path(folder, number)) <= seq]
    if not begun:
        return (numbers[0] if numbers else 1), 0
    data, offset = _bytes_of(segment_path(folder, begun[-1]), 0, 1 << 40), 0
    with contextlib.suppress(BadFrameError):
        while (span := span_of(data, offset))[1] <= seq:
            offset = span[0]
    return begun[-1], offset


def _fence_error(chunk: Chunk) -> FencedError:
    if chunk.kind == "fence":
        return FencedError(
            f"lane {chunk.lane!r} was ended at event {chunk.next_seq} by {chunk.session}, to which this "
            "host was silent: what it holds behind that goes into a lane of its own when this host begins "
            "again"
        )
    return FencedError(
        f"lane {chunk.lane!r}: {chunk.session} has put chunk {chunk.number} of it: another copy of this "
        "host's folder is in use; remove the file HOST from one of them, and its lanes"
    )


def settled_end(sender: Sender, lane: str) -> Shipped:
    """Where a lane of this host ends that was ended, or whose process's lease was: the same for all hosts.

    Raises:
        CorruptionError: the medium holds other bytes of it.
        MediumError: no answer.
    """
    folder, sequence = lane_folder(sender.store, lane), lane_sequence(sender.host, lane)
    number = put_fence(sender, sequence).number
    at = (
        _behind(sender.medium, sequence, number - 1, folder)
        if number
        else _beginning(sender.store, lane, folder)
    )
    replace_small(folder / SHIPPED, at.pack())
    replace_small(folder / FENCED, SETTLED)
    return at


def is_ended(medium: Medium, host: str, lane: str) -> bool:
    """Whether a fence is the newest entry of a lane.

    Raises:
        MediumError: no answer.
    """
    newest = newest_chunk(medium, lane_sequence(host, lane))
    return newest is not None and newest.kind == "fence"


def put_empty(sender: Sender, lane: str) -> None:
    """Put a chunk without bytes, so that those before it can be removed. The caller holds the lane's lock.

    Raises:
        FencedError: another host has ended the lane.
        MediumError: no answer.
    """
    folder, sequence = lane_folder(sender.store, lane), lane_sequence(sender.host, lane)
    sender.session.add_lane(sequence)
    at = _taken(sender, lane, sequence, folder)
    own = (at.number, at.epoch, sender.session.name, at.next_seq)
    sender.medium.put(sequence, at.number, encode_chunk(Chunk(sender.store_id, lane, sender.host, *own)))
    replace_small(folder / SHIPPED, replace(at, number=at.number + 1).pack())


def put_fence(sender: Sender, sequence: str) -> Chunk:
    """End a lane where its newest chunk ends; the fence that is there.

    Raises:
        MediumError: no answer.
    """
    medium, (host, lane) = sender.medium, lane_of(sequence)
    number = medium.last(sequence) or 0
    last: Chunk | None = None
    while True:
        if chunk := read_chunk(medium, sequence, number):
            if chunk.kind == "fence":
                return chunk
            last = chunk
            number += 1
            continue
        end = 0 if last is None else last.next_seq
        epoch = 1 if last is None else last.epoch + 1
        mine = Chunk(sender.store_id, lane, host, number, epoch, sender.session.name, end, "fence")
        if medium.put(sequence, number, encode_chunk(mine)):
            announce(medium, sequence)
            return mine
