"""How long chunks stay in the medium: until the sealed units that hold their bytes are in object storage, and
then for as long as a host that was away may take to come for them."""

from __future__ import annotations

from rollbook.store.medium.chunk import Chunk
from rollbook.store.medium.medium import Medium, read_chunk


def forget_chunks(medium: Medium, sequence: str, segment: int, before_us: int | None = None) -> bool:
    """Remove a lane's chunks that hold nothing behind a segment; whether none is left. The newest one stays.

    Args:
        segment: the last one that is in a sealed unit in object storage.
        before_us: remove only what was sent before this time; None: all of it.

    Raises:
        MediumError: no answer, or a refusal.
        CorruptionError: a chunk is damaged.
    """
    kept = first_behind(medium, sequence, segment, before_us)
    if kept is None:
        return True
    if kept > (medium.first(sequence) or 0):
        medium.forget(sequence, kept)
    left = read_chunk(medium, sequence, kept)
    return left is not None and left.end is not None and not _is_of(left, segment)


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
        middle = (low + high) // 2
        chunk = read_chunk(medium, sequence, middle)
        if chunk is None:
            break
        if _is_of(chunk, segment) and (before_us is None or chunk.sent_us < before_us):
            low = middle + 1
        else:
            high = middle
    return low


def _is_of(chunk: Chunk, segment: int) -> bool:
    """Whether a chunk holds bytes, and none behind a segment."""
    return chunk.end is not None and chunk.end[0] <= segment
