"""Verifies segments (frames, chain, sequence numbers), and describes the state of a lane."""

from __future__ import annotations

import builtins
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rollbook.store.inside import open_plain
from rollbook.store.wal.files import Watermark
from rollbook.store.wal.frame import HEADER_FRAME, BadFrameError, Frame, scan, valid_frame_after

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
