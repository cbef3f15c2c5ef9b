"""How long chunks stay in the medium: until the sealed units that hold their bytes are in object storage, and
then for as long as a host that was away may take to come for them."""

from __future__ import annotations

from rollbook.store.medium.chunk import Chunk
from rollbook.store.medium.medium import Medium, read_chunk


def forget_old(medium: Medium, sequence: str, segment: int, before_us: int) -> None:
    """Remove a lane's chunks that hold nothing behind a segment and were sent before a time. The newest one
    stays.

    Args:
        segment: the last one that is in a sealed unit in object storage.

    Raises:
        MediumError: no answer, or a refusal.
        CorruptionError: a chunk is damaged.
    """
    kept = first_behind(medium, sequence, segment, before_us)
    if kept is not None and kept > (medium.first(sequence) or 0):
        medium.forget(sequence, kept)


def forget_erased(medium: Medium, sequence: str, segment: int, sealed: int) -> bool:
    """Remove a lane's chunks that hold anything of a segment or those before it; whether none is left. The
    newest one stays, and one that holds more than is sealed.

    Args:
        segment: the last one of which something was erased.
        sealed: the last one that is in a sealed unit in object storage.

    Raises:
        MediumError: no answer, or a refusal.
        CorruptionError: a chunk is damaged.
    """
    kept = first_behind(medium, sequence, segment)
    if kept is None:
        return True
    chunk = read_chunk(medium, sequence, kept)
    if chunk is not None and _holds(chunk, segment) and chunk.end is not None and chunk.end[0] <= sealed:
        kept += 1
    medium.forget(sequence, kept)
    oldest = medium.first(sequence)
    left = None if oldest is None else read_chunk(medium, sequence, oldest)
    return left is None or not _holds(left, segment)


def first_behind(medium: Medium, sequence: str, segment: int, before_us: int | None = None) -> int | None:
    """Number of a lane's first chunk that holds something behind a segment, or was not sent before a time; of
    its newest one where none is so; None where there is none.

    Raises:
        MediumError: no answer, or a refusal.
        CorruptionError: a chunk is damaged.
    """
    low, high = medium.first(sequence), medium.last(sequence)
    if low is None or high is None:
        return None
    while low < high:
        middle = at = (low + high) // 2
        chunk = read_chunk(medium, sequence, at)
        # One without bytes goes with those before it.
        while chunk is not None and chunk.end is None and at > low:
            at -= 1
            chunk = read_chunk(medium, sequence, at)
        if chunk is None:
            break
        of = chunk.end is None or _is_of(chunk, segment)
        if of and (before_us is None or chunk.sent_us < before_us):
            low = middle + 1
        else:
            high = at
    return low


def _holds(chunk: Chunk, segment: int) -> bool:
    """Whether a chunk holds bytes of a segment or one before it."""
    return bool(chunk.parts) and chunk.parts[0].segment <= segment


def _is_of(chunk: Chunk, segment: int) -> bool:
    """Whether a chunk holds bytes, and none behind a segment."""
    return chunk.end is not None and chunk.end[0] <= segment
