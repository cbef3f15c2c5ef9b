"""The files of one lane: its folder, lock, watermark and segments."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rollbook.store.cut import LANE_NAME
from rollbook.store.errors import CorruptionError, CutError, LaneLockedError

_WATERMARK = struct.Struct("<QQQQ")


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
    """Numbers of the segments present, rising."""
    return sorted(int(path.stem) for path in folder.glob(f"{'[0-9]' * 8}.wal"))


def read_watermark(folder: Path) -> Watermark:
    """The lane's durable end. A writer may be replacing it, so a torn read is tried again.

    Raises:
        CorruptionError: it is missing, or stays unreadable.
    """
    path = folder / "WATERMARK"
    for _ in range(20):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CorruptionError(f"{path}: the watermark is missing") from None
        if len(data) == _WATERMARK.size:
            segment, offset, next_seq, check = _WATERMARK.unpack(data)
            if xxhash.xxh3_64_intdigest(data[:24]) == check:
                return Watermark(segment, offset, next_seq)
        time.sleep(0.001)
    raise CorruptionError(f"{path}: the watermark does not match its checksum")


def quarantine(folder: Path, reason: str) -> None:
    """Leave a note that the lane's acknowledged events are damaged; `rollbook store verify` takes it away."""
    (folder / "QUARANTINED").write_text(reason + "\n")


def quarantined(folder: Path) -> str | None:
    """Why the lane is quarantined, or None."""
    path = folder / "QUARANTINED"
    return path.read_text().strip() if path.exists() else None


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries (created, renamed, removed files) durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(file: Path, what: str, remedy: str) -> int:
    """Take a lock for this process; the descriptor holds it until it is closed.

    Args:
        what: what is locked, and `remedy` what to do when it is: both for the error's message.

    Raises:
        LaneLockedError: another process holds it.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise LaneLockedError(f"{what} process {holder}: stop that process, or {remedy}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
