"""The files of one lane: its folder, lock, watermark and segments.

`head` is a closed cut: the durable ends of all lanes at one instant. An event may name an event
of another lane that was durable before it: a parent, the adopted part of a trajectory, a
superseded reward. Reading one watermark after the other could see the later event but miss the
earlier one. So all are read repeatedly until two passes agree: watermarks only grow, hence every
lane had its value at the instant between the two passes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from collections.abc import Container
from dataclasses import astuple, dataclass
from pathlib import Path

import orjson
import xxhash

from rollbook.store.cut import LANE_NAME, Cut
from rollbook.store.errors import CorruptionError, CutError, LaneLockedError, OutsideError, StoreError
from rollbook.store.permissions import open_file, replace_small
from rollbook.store.safe_paths import open_plain, read_small

_WATERMARK = struct.Struct("<QQQQ")
WATERMARK_BYTES = _WATERMARK.size
_SEGMENT = re.compile(r"[0-9]{8}\.wal")
_BRIEFLY = " (briefly)"
_LOCK_BYTES = 32
"""Largest size of a lock file, in bytes; it holds a process id and a flag for brief locks."""
BRIEFLY_S = 60.0
"""How long to wait for a process that holds a lock briefly, such as the sealer."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far the lane is durable: all of earlier segments, and `offset` bytes of `segment`."""

    segment: int
    offset: int
    next_seq: int

    def pack(self) -> bytes:
        """32 bytes: the three numbers and their xxh3-64, little-endian."""
        body = struct.pack("<QQQ", self.segment, self.offset, self.next_seq)
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


HOST = "HOST"
"""File in a store's folder that is carried to and from other hosts: the name of this one."""
SHIPPED, REPLICA, FENCED, REPLICAS = "SHIPPED", "REPLICA", "FENCED", "REPLICAS"
"""Of a lane's folder: how far it is in the medium, that another host writes it, and that it was ended. Of the
store's folder: how far the replicas of all lanes may be read."""
TOLD = "TOLD"
"""In the store's folder: the sealed units of this host's lanes that other hosts know of."""
CARRIED_OUT = "CARRIED_OUT"
"""In the store's folder: the cut up to which this host has carried out erasures that others ordered."""
Told = dict[str, dict[str, list[str]]]
"""A store's address in object storage -> lane -> names of units, `!` behind those that were dropped."""
_SHIPPED = struct.Struct("<8Q")


@dataclass(frozen=True, slots=True)
class Shipped:
    """How far a lane of this host is in the medium.

    Attributes:
        number: of the chunk to come.
        epoch: of the lane.
        segment, offset: end of the whole frames that are there.
        into: bytes of the frame behind them that are there: a large one goes in several chunks.
        next_seq: of the lane, there.
        gated: whether only what is there counts as acknowledged, and may be read.
    """

    number: int
    epoch: int
    segment: int
    offset: int
    into: int
    next_seq: int
    gated: bool

    def pack(self) -> bytes:
        """64 bytes: seven numbers and their xxh3-64, little-endian."""
        body = struct.pack("<7Q", *astuple(self))
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def unpack_shipped(data: bytes) -> Shipped | None:
    """How far a lane is in the medium, by a file's bytes; None where they are damaged, or half
    overwritten."""
    if len(data) != _SHIPPED.size:
        return None
    *numbers, gated, check = _SHIPPED.unpack(data)
    if xxhash.xxh3_64_intdigest(data[:56]) != check:
        return None
    number, epoch, segment, offset, into, next_seq = numbers
    return Shipped(number, epoch, segment, offset, into, next_seq, bool(gated))


def read_shipped(folder: Path) -> Shipped | None:
    """How far a lane is in the medium; None where nothing says so, or what does is damaged."""
    try:
        return unpack_shipped(read_small(folder / SHIPPED))
    except FileNotFoundError:
        return None


def read_told(store: Path) -> Told:
    """The sealed units of this host's lanes that other hosts were told of last."""
    try:
        told: Told = orjson.loads(read_small(store / TOLD, 1 << 26))
    except (FileNotFoundError, ValueError):
        return {}
    return told


def carried_to(store: Path, lane: str) -> Watermark | None:
    """How far a lane of this host is in the medium, and may be sealed; None where nothing is carried."""
    if not (store / HOST).exists():
        return None
    shipped = read_shipped(lane_folder(store, lane))
    return (
        Watermark(0, 0, 0)
        if shipped is None
        else Watermark(shipped.segment, shipped.offset, shipped.next_seq)
    )


def replicas_bytes(counts: Cut) -> bytes:
    """The content of the file `REPLICAS`: lane -> events that may be read, and a checksum."""
    body = orjson.dumps(dict(counts))
    return struct.pack("<QQ", len(body), xxhash.xxh3_64_intdigest(body)) + body


def read_replicas(store: Path) -> dict[str, int]:
    """Lane -> how many of its events may be read here, of the lanes of other hosts.

    Raises:
        CorruptionError: the file is damaged.
    """
    for _ in range(20):
        try:
            data = read_small(store / REPLICAS, 1 << 26)
        except FileNotFoundError:
            return {}
        if not data:
            return {}
        if len(data) >= 16:
            length, check = struct.unpack_from("<QQ", data)
            body = data[16 : 16 + length]
            if len(body) == length and xxhash.xxh3_64_intdigest(body) == check:
                counts: dict[str, int] = orjson.loads(body)
                return counts
        time.sleep(0.001)
    raise CorruptionError(f"{store / REPLICAS} is damaged: remove it; what follows other hosts makes it anew")


def is_replica(store: Path, lane: str) -> bool:
    """Whether another host writes the lane, and this one only has a copy."""
    return (lane_folder(store, lane) / REPLICA).exists()


def lane_folder(store: Path, lane: str) -> Path:
    """Folder of a lane in a store.

    Raises:
        CutError: the name is no lane name.
    """
    if not LANE_NAME.fullmatch(lane):
        raise CutError(f"lane name {lane!r}: use lower-case letters, digits, '.', '_' and '-'")
    return store / "lanes" / lane


def segment_path(folder: Path, number: int) -> Path:
    """Path of a segment; numbers rise without gaps from 1."""
    return folder / f"{number:08d}.wal"


def segment_numbers(folder: Path) -> list[int]:
    """Numbers of the segments present, ascending; empty if there is no such folder.

    Raises:
        OSError: the folder cannot be read, so its content is unknown.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name[:8]) for name in names if _SEGMENT.fullmatch(name))


def folders_of_lanes(store: Path) -> list[str]:
    """Names of the entries in the folder of lanes.

    Raises:
        CorruptionError: the store has no such folder.
        OSError: it cannot be read, so the lanes are unknown.
    """
    try:
        return os.listdir(store / "lanes")
    except FileNotFoundError:
        raise CorruptionError(
            f"{store / 'lanes'} is missing, where the events of every lane are: restore it from a copy"
        ) from None


def read_watermark(folder: Path) -> Watermark:
    """The lane's durable end. A writer may be replacing it, so a torn read is tried again.

    Raises:
        CorruptionError: it is missing, or stays unreadable.
    """
    path = folder / "WATERMARK"
    for _ in range(20):
        try:
            data = read_small(path)
        except FileNotFoundError:
            raise CorruptionError(f"{path}: the watermark is missing") from None
        if not data and _never_written(folder):
            return Watermark(0, 0, 0)
        if (mark := unpack_watermark(data)) is not None:
            return mark
        time.sleep(0.001)
    raise CorruptionError(f"{path}: the watermark does not match its checksum")


def unpack_watermark(data: bytes) -> Watermark | None:
    """The watermark in a file's bytes, or None where they are none: damaged, or read while overwritten."""
    if len(data) != WATERMARK_BYTES:
        return None
    segment, offset, next_seq, check = _WATERMARK.unpack(data)
    return Watermark(segment, offset, next_seq) if xxhash.xxh3_64_intdigest(data[:24]) == check else None


def _never_written(folder: Path) -> bool:
    """Whether the first opening of the lane is unfinished."""
    sealed = folder.parents[1] / "sealed" / folder.name
    return not segment_numbers(folder) and not sealed.exists()


def write_watermark(folder: Path, mark: Watermark) -> None:
    """Move the lane's durable end, durably. The caller holds the lane's lock."""
    fd = open_file(folder / "WATERMARK", os.O_RDWR | os.O_CREAT)
    try:
        # In place, like the writer's: a reader that sees half of it tries again.
        os.pwrite(fd, mark.pack(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def quarantine(folder: Path, reason: str) -> None:
    """Leave a note that the lane's acknowledged events are damaged; `rollbook store verify` removes it."""
    # The caller raises the damage as an error, so a failure to write the note is ignored.
    with contextlib.suppress(OSError):
        replace_small(folder / "QUARANTINED", f"{reason}\n".encode(errors="backslashreplace"))


def quarantined(folder: Path) -> str | None:
    """Why the lane is quarantined, or None."""
    try:
        return read_small(folder / "QUARANTINED").decode(errors="replace").strip()
    except FileNotFoundError:
        return None


class SpareDescriptor:
    """A reserved file descriptor for times when no other is available. Used by one thread at a time."""

    def __init__(self) -> None:
        self._fd = -1
        self.keep()

    def keep(self) -> None:
        """Reserve a descriptor, if one is available."""
        if self._fd < 0:
            with contextlib.suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give(self) -> bool:
        """Release the descriptor; returns whether one was reserved."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return fd >= 0

    def close(self) -> None:
        """Release the descriptor for good."""
        self.give()


def take_lock(
    file: Path,
    what: str,
    remedy: str,
    *,
    briefly: bool = False,
    patience_s: float = 0.0,
    shared: bool = False,
) -> int:
    """Take a lock for this process; the descriptor holds it until it is closed.

    Args:
        what: what is locked; `remedy` says what to do about it. Both are for the error's message.
        briefly: the lock will be released within seconds, so that other processes wait for it.
        patience_s: how long to wait for a process that did not say so.
        shared: others may share it, and nobody else may have it alone.

    Raises:
        LaneLockedError: another process holds it.
        OutsideError: the file is a link, a pipe or the like, or has more in it than a lock; it is as it was.
    """
    fd = open_file(file, os.O_RDWR | os.O_CREAT)
    try:
        _refuse_no_lock(file, fd)
        _wait_for(fd, what, remedy, briefly, patience_s, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}{_BRIEFLY if briefly else ''}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_no_lock(file: Path, fd: int) -> None:
    """Check that the file is a lock file before its content is replaced: a hard link may point to any
    file."""
    if (size := os.fstat(fd).st_size) > _LOCK_BYTES:
        raise OutsideError(
            f"{file} has {size:,} bytes, so it is no lock: remove it, nobody needs its content"
        )


def _wait_for(fd: int, what: str, remedy: str, briefly: bool, patience_s: float, kind: int) -> None:
    begun = time.monotonic()
    while not try_lock(fd, kind):
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        # Wait a moment for every holder, since a new holder may not have written its process id yet.
        patience = max(patience_s, BRIEFLY_S if _BRIEFLY in holder else 0.02)
        if briefly or time.monotonic() > begun + patience:
            raise LaneLockedError(f"{what} process {holder}: stop that process, or {remedy}")
        time.sleep(0.01)


def try_lock(fd: int, kind: int) -> bool:
    """Lock an open file, unless somebody else has it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


PASSES = 10_000
"""A pass takes about 2 us a lane, so this gives up after well over a second of changes in every pass."""
FIRST_SLEEP_S, LONGEST_SLEEP_S = 0.001, 0.02


def closed_head(store: Path, skip: Container[str] = (), known: Cut | None = None) -> dict[str, int]:
    """Lane -> its durable events, all at one instant; lanes without events are left out.

    Args:
        skip: lanes that are left out too.
        known: an earlier head. If no lane has grown since, one pass shows it: each had its value all along.

    Raises:
        CorruptionError: a lane's watermark is missing or unreadable.
        StoreError: the lanes grew during each of `PASSES` passes.
    """
    marks = _OpenMarks(store / "lanes", skip)
    try:
        before = marks.read()
        if before == known:
            return before
        for _ in range(PASSES):
            now = marks.read()
            if now == before:
                return now
            before = now
    finally:
        marks.close()
    raise StoreError(
        f"{store}: its {len(before)} lanes grow faster than their watermarks can be read together: "
        "write fewer lanes, or raise append.linger_ms in store.toml"
    )


def without_lanes(head: Cut, lanes: Container[str]) -> dict[str, int]:
    """A cut without some lanes."""
    return {lane: count for lane, count in head.items() if lane not in lanes}


def wait_for_growth(store: Path, head: Cut, timeout_s: float, skip: Container[str] = ()) -> dict[str, int]:
    """The head without the lanes in `skip`, once it differs from `head` or `timeout_s` seconds have
    passed.

    Looks at the watermarks every 1 to 20 ms, which costs less than 1 % of a core.
    """
    deadline = time.monotonic() + timeout_s
    pause = FIRST_SLEEP_S
    while True:
        now = closed_head(store, skip, head)
        left = deadline - time.monotonic()
        if now != head or left <= 0:
            return now
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_SLEEP_S)


class _OpenMarks:
    """The watermark files of a store's lanes but for those in `skip`, each opened once."""

    def __init__(self, lanes: Path, skip: Container[str]) -> None:
        self._lanes, self._skip = lanes, skip
        self._fds: dict[str, int] = {}
        self._carried = (lanes.parent / HOST).exists()

    def read(self) -> dict[str, int]:
        """One pass over all of them. Lanes that were made since the last pass count."""
        counts: dict[str, int] = {}
        replicas = read_replicas(self._lanes.parent) if self._carried else {}
        for lane in folders_of_lanes(self._lanes.parent):
            if lane in self._skip:
                continue
            if lane in replicas:
                # Several replicas grow together, or a cut would hold an event and not what it names.
                counts |= {lane: replicas[lane]} if replicas[lane] else {}
                continue
            if lane not in self._fds and not self._open(lane):
                continue
            mark = unpack_watermark(os.pread(self._fds[lane], WATERMARK_BYTES + 1, 0))
            if mark is None:  # not written yet, half overwritten or damaged: this reads it again
                mark = read_watermark(self._lanes / lane)
            count = self._readable(lane, mark) if self._carried else mark.next_seq
            if count:
                counts[lane] = count
        return counts

    def _readable(self, lane: str, mark: Watermark) -> int:
        """How much counts of a lane that is no replica that may be read, in a store of several hosts."""
        folder = self._lanes / lane
        if (folder / REPLICA).exists():
            return 0
        shipped = read_shipped(folder)
        return min(shipped.next_seq, mark.next_seq) if shipped and shipped.gated else mark.next_seq

    def _open(self, lane: str) -> bool:
        try:
            self._fds[lane] = open_plain(f"{self._lanes}/{lane}/WATERMARK", os.O_RDONLY)
        except NotADirectoryError:
            return False
        except FileNotFoundError:
            if segment_numbers(self._lanes / lane):
                read_watermark(self._lanes / lane)  # raises an error that names the missing file
            return False
        return True

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
