"""A replica: a lane of another host, in the same files as there, and every byte checked as it comes.

Bytes come in chunks and are written where they stood. Readers see them once the follower says so, since a
chunk's events may name those of a lane that is not here yet.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import xxhash

from rollbook.store.errors import CorruptionError
from rollbook.store.medium.chunk import Chunk, Part, decode_chunk
from rollbook.store.medium.medium import lane_sequence
from rollbook.store.permissions import make_empty, make_folder, open_file, replace_small
from rollbook.store.safe_paths import open_plain, read_small
from rollbook.store.sealed.unit import unsealed_start
from rollbook.store.wal.files import (
    REPLICA,
    Watermark,
    lane_folder,
    read_watermark,
    segment_numbers,
    segment_path,
)
from rollbook.store.wal.frame import ALIGN, MAGIC, BadFrameError, next_chain, padded, read_frame, span_of
from rollbook.store.wal.segment import Start

FOLLOWED = "FOLLOWED"
_PLAIN = (
    *("number", "segment", "offset", "written", "held", "epoch", "session", "fenced", "units", "visible"),
)
"""What of a replica its cursor has as it is."""


@dataclass(slots=True)
class Pending:
    """Where a chunk ends, and what it names that may not be here yet."""

    end: int
    needs: dict[str, int]


@dataclass(slots=True)
class Replica:
    """One lane of another host.

    Attributes:
        number: of the chunk to come.
        segment, offset: behind the whole frames that are here.
        held: events in them.
        chain: of the last of them.
        written: bytes of the segment that are here; more than `offset` where a frame has come in part.
        visible: events that may be read.
        fenced: whether the lane has ended.
        pending: chunks whose events may not be read yet.
    """

    store: Path
    store_id: str
    host: str
    lane: str
    number: int = 0
    segment: int = 1
    offset: int = 0
    held: int = 0
    chain: bytes = bytes(16)
    written: int = 0
    epoch: int = 0
    session: str = ""
    fenced: bool = False
    units: list[str] = field(default_factory=list)
    """Addresses of the units whose manifests are here, as its owner told of them."""
    visible: int = 0
    pending: deque[Pending] = field(default_factory=deque)
    boundaries: deque[tuple[int, int, int]] = field(default_factory=deque)
    """(events, segment, offset) behind each frame that may not be read yet."""

    @property
    def folder(self) -> Path:
        """Of the lane."""
        return lane_folder(self.store, self.lane)

    @property
    def sequence(self) -> str:
        """Of the lane's chunks."""
        return lane_sequence(self.host, self.lane)

    # Taking chunks ------------------------------------------------------------------------------

    def take(self, entry: bytes) -> Chunk:
        """Write a chunk's bytes, the next of the lane.

        Raises:
            CorruptionError: they do not follow what is here, or are not what was sent.
        """
        place = f"chunk {self.number} of lane {self.lane!r} of {self.host}"
        chunk = decode_chunk(entry, place)
        if (chunk.store, chunk.lane, chunk.number) != (self.store_id, self.lane, self.number):
            raise CorruptionError(
                f"{place} is chunk {chunk.number} of lane {chunk.lane!r} of store {chunk.store}: it was "
                "copied there"
            )
        for part in chunk.parts:
            self._write(part, place)
        self.number, self.epoch, self.session = chunk.number + 1, chunk.epoch, chunk.session
        self.fenced |= chunk.kind == "fence"
        if chunk.cut or chunk.next_seq > (self.pending[-1].end if self.pending else self.visible):
            self.pending.append(Pending(chunk.next_seq, dict(chunk.cut)))
        return chunk

    def _write(self, part: Part, place: str) -> None:
        data, offset = memoryview(part.data), part.offset
        if part.segment < self.segment:
            return  # sealed before this replica began
        if part.segment == self.segment + 1 and offset == 0 and self.written == self.offset:
            self.segment, self.offset, self.written = part.segment, 0, 0
        if part.segment != self.segment or offset > self.written:
            raise CorruptionError(
                f"{place} begins at offset {offset} of segment {part.segment}, and offset {self.written} of "
                f"segment {self.segment} is next: a chunk before it was removed from the medium; join the "
                "store again"
            )
        if offset + len(data) <= self.written:
            return
        data, offset = data[self.written - offset :], self.written
        fd = open_file(segment_path(self.folder, self.segment), os.O_RDWR | os.O_CREAT)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(fd, data[written:], offset + written)
            self.written = offset + len(data)
            if offset > self.offset:  # a frame that came in two
                data = memoryview(os.pread(fd, self.written - self.offset, self.offset))
        finally:
            os.close(fd)
        self.check(data, place)

    def check(self, data: memoryview, place: str) -> None:
        """Go on over the whole frames in the bytes behind the last one that was checked.

        Raises:
            CorruptionError: they are damaged, or do not follow it.
        """
        begin = self.offset
        try:
            while (at := self.offset - begin) < len(data) and _whole(data, at):
                frame = read_frame(data, at)
                if frame.chain != next_chain(self.chain, frame.payload) or frame.first_seq != self.held:
                    raise BadFrameError(at, "it does not follow the frame before")
                self.chain, self.offset = frame.chain, begin + frame.end
                if frame.count:
                    self.held += frame.count
                    self.boundaries.append((self.held, self.segment, self.offset))
        except BadFrameError as error:
            raise CorruptionError(
                f"{place}: offset {begin + error.offset} of segment {self.segment}: {error.reason}: these "
                "are not the bytes that were sent"
            ) from None

    def skip_to(self, start: Start) -> None:
        """Go on behind sealed units, which hold what comes before."""
        if start.next_seq > self.held:
            self.segment, self.offset, self.written = start.number, 0, 0
            self.held, self.chain = start.next_seq, start.chain
            self.boundaries.append((start.next_seq, start.number - 1, start.before))

    # Letting readers see ------------------------------------------------------------------------

    def show(self, count: int) -> None:
        """Move the watermark to at least so many events, which are here."""
        mark: tuple[int, int, int] | None = None
        while self.boundaries and self.boundaries[0][0] <= count:
            mark = self.boundaries.popleft()
        if count > self.visible and (mark is None or mark[0] < count):
            start = unsealed_start(self.store, self.lane)
            if self.marked().next_seq < count <= start.next_seq:  # the frame's segment is gone, for a unit
                mark = count, start.number - 1, start.before
        if mark is not None:
            self.mark(Watermark(mark[1], mark[2], mark[0]))
        self.visible = max(self.visible, count)

    def marked(self) -> Watermark:
        """The watermark that is written."""
        there = (self.folder / "WATERMARK").exists()
        return read_watermark(self.folder) if there else Watermark(1, 0, 0)

    def mark(self, mark: Watermark) -> None:
        """Write the watermark. It is not synced: after a start of the machine all is checked again."""
        fd = open_file(self.folder / "WATERMARK", os.O_RDWR | os.O_CREAT)
        try:
            os.pwrite(fd, mark.pack(), 0)
        finally:
            os.close(fd)

    # The cursor ---------------------------------------------------------------------------------

    def save(self) -> None:
        """Write down where to go on."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        values |= {"host": self.host, "chain": self.chain.hex(), "boot": boot_id()}
        values["pending"] = [[pending.end, pending.needs] for pending in self.pending]
        body = orjson.dumps(values)
        replace_small(self.folder / FOLLOWED, xxhash.xxh3_64_hexdigest(body).encode() + body)


def _whole(data: memoryview, at: int) -> bool:
    """Whether all of a frame is there; where no frame begins, too, which reading it finds out."""
    if len(data) - at < ALIGN:
        return False
    if bytes(data[at : at + 4]) != MAGIC:
        return True
    return at + ALIGN + padded(int.from_bytes(data[at + 8 : at + 12], "little")) <= len(data)


@functools.cache
def boot_id() -> str:
    """An id of this machine's start: what was written since then is in its memory, if not on its disk."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def opened_replica(store: Path, store_id: str, host: str, lane: str) -> Replica:
    """The replica of a lane, as far as it is here.

    Where its cursor is damaged, or the machine was started since, all of its frames are checked again, and it
    goes on from the oldest chunk, passing over what is here.
    """
    folder = lane_folder(store, lane)
    make_folder(folder)
    if not (folder / REPLICA).exists():
        make_empty(folder / REPLICA).write_text(f"{host}\n")
    replica = Replica(store, store_id, host, lane)
    values = _cursor(folder)
    if values is not None and values["boot"] == boot_id() and values["host"] == host:
        for name in _PLAIN:
            setattr(replica, name, values[name])
        replica.units = replica.units or []  # null: an earlier release did not know them
        replica.chain = bytes.fromhex(values["chain"])
        replica.pending = deque(Pending(end, needs) for end, needs in values["pending"])
        _find_boundaries(replica)
        replica.skip_to(unsealed_start(store, lane))  # units came, and what they replaced went, since
    else:
        _check_again(replica)
    return replica


def session_of(store: Path, lane: str) -> str | None:
    """The session that put the newest chunk of a lane that is here; None where that is not known."""
    values = _cursor(lane_folder(store, lane))
    return None if values is None else values["session"] or None


def _cursor(folder: Path) -> dict[str, Any] | None:
    try:
        data = read_small(folder / FOLLOWED, 1 << 24)
    except FileNotFoundError:
        return None
    if xxhash.xxh3_64_hexdigest(data[16:]).encode() != data[:16]:
        return None
    values: dict[str, Any] = orjson.loads(data[16:])
    return values


def _find_boundaries(replica: Replica) -> None:
    """The frames that are here and may not be read yet, by their headers."""
    if replica.held <= replica.visible:
        return
    mark = replica.marked()
    for segment in range(max(mark.segment, 1), replica.segment + 1):
        stop = replica.offset if segment == replica.segment else None
        offset = mark.offset if segment == mark.segment else 0
        try:
            with open(open_plain(segment_path(replica.folder, segment), os.O_RDONLY), "rb") as file:
                view = memoryview(file.read() if stop is None else file.read(stop))
        except FileNotFoundError:
            continue  # a unit holds what was in it
        while offset < len(view):
            offset, held = span_of(view, offset)
            if held > mark.next_seq:
                replica.boundaries.append((held, segment, offset))


def _check_again(replica: Replica) -> None:
    """Read all frames that are here; what is not whole comes again."""
    start = unsealed_start(replica.store, replica.lane)
    replica.segment, replica.held, replica.chain = start.number, start.next_seq, start.chain
    replica.visible = start.next_seq
    replica.mark(Watermark(start.number - 1, start.before, start.next_seq))
    numbers = [n for n in segment_numbers(replica.folder) if n >= start.number]
    for number in numbers:
        path, whole = segment_path(replica.folder, number), False
        if number in (replica.segment, replica.segment + 1):
            replica.segment, replica.offset = number, 0
            with open(open_plain(path, os.O_RDONLY), "rb") as file:
                data = memoryview(file.read())
            with contextlib.suppress(CorruptionError):
                replica.check(data, str(path))
                whole = replica.offset == len(data)
            os.truncate(path, replica.offset)
        if not whole:
            for later in numbers:
                if later > replica.segment:
                    segment_path(replica.folder, later).unlink(missing_ok=True)
            break
    replica.written = replica.offset
