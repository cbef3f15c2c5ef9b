"""The interface of a medium, and the names of what is in it.

A **sequence** is a row of immutable entries, numbered from 0 without gaps. `put` succeeds for one writer
only, so that the medium orders and fences: who finds other bytes at its number has lost the sequence. Nothing
else is asked of a medium, so that object storage with conditional writes, and NATS JetStream, are both one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import quote

from rollbook.store.cut import LANE_NAME
from rollbook.store.errors import MediumError
from rollbook.store.medium.chunk import Chunk, decode_chunk

LANES, UNITS, SESSIONS, CLAIMS = "lanes", "units", "sessions", "claims"
"""The first part of a sequence's name says what its entries are."""
AGREED = "agreed"
"""The first part of sequences of one entry, in which hosts find what all of them must have."""
OPENED = "opened"
"""The sequence that has the name of each lane's sequence, once its writer has put something."""
STORE = "store"
"""The sequence whose one entry is the store's marker, by which a host knows what it joins."""
Wanted = tuple[str, int, int]
"""(sequence, start, most) of entries to read."""


class Medium(Protocol):
    """Where sequences are. Threads may share it.

    Attributes:
        address: for people.
        most_bytes: of one entry.
        pace_s: how long a writer waits from one put to the next while nobody waits for it, at least and at
            most.
    """

    address: str
    most_bytes: int
    pace_s: tuple[float, float]

    def put(self, sequence: str, number: int, data: bytes) -> bool:
        """Make an entry, durably; whether it holds these bytes now, by this call or an earlier one.

        Raises:
            MediumError: no answer, or a refusal; the entry may be there or not.
        """

    def read(self, sequence: str, start: int, most: int = 1) -> list[bytes]:
        """The entries from a number on, in order, at most so many; empty where that one is not there yet.

        Raises:
            MediumError: no answer, or a refusal.
        """

    def read_each(self, wanted: Sequence[Wanted], *, newest: bool = False) -> list[list[bytes]]:
        """`read` of several sequences, at the same time.

        Args:
            newest: whether what was put before this call is to be found; otherwise it may be missing for a
                while, where the medium has copies that are behind.

        Raises:
            MediumError: no answer, or a refusal.
        """

    def last(self, sequence: str) -> int | None:
        """Number of the newest entry; None where there is none.

        Raises:
            MediumError: no answer, or a refusal.
        """

    def first(self, sequence: str) -> int | None:
        """Number of the oldest entry that is kept; None where there is none.

        Raises:
            MediumError: no answer, or a refusal.
        """

    def sequences(self, kind: str) -> list[str]:
        """Names of all sequences that begin with these parts, sorted.

        Raises:
            MediumError: no answer, or a refusal.
        """

    def forget(self, sequence: str, before: int) -> None:
        """Remove the entries before a number. The newest entry is never removed.

        Raises:
            MediumError: no answer, or a refusal; some may be gone.
        """

    def listen(self, heard: Callable[[str], None]) -> None:
        """Have a function called, in any thread, with each sequence of lanes and units that was put to; a
        medium that tells nobody calls it never."""

    def close(self) -> None:
        """End connections. Safe to call twice."""


def lane_sequence(host: str, lane: str) -> str:
    """The sequence of a lane's chunks. The host comes first, so that a host's rights can end with its own."""
    return f"{LANES}/{host}/{lane}"


def lane_of(sequence: str) -> tuple[str, str]:
    """(host, lane) of a lane's sequence.

    Raises:
        MediumError: it is none; nobody but Rollbook writes there.
    """
    parts = sequence.split("/")
    if len(parts) != 3 or parts[0] != LANES or not LANE_NAME.fullmatch(parts[2]):
        raise MediumError(
            f"{sequence!r} in the medium is no lane's: remove what is not Rollbook's from there"
        )
    return parts[1], parts[2]


def units_sequence(host: str) -> str:
    """The sequence of what a host tells of its lanes' sealed units."""
    return f"{UNITS}/{host}"


def session_sequence(session: str) -> str:
    """The sequence of a session's renewals."""
    return f"{SESSIONS}/{session}"


def read_chunk(medium: Medium, sequence: str, number: int) -> Chunk | None:
    """One of a lane's chunks; None where it is not there.

    Raises:
        MediumError: no answer, or a refusal.
        CorruptionError: it is not what was put there.
        FormatError: a newer Rollbook put it.
    """
    entry = medium.read(sequence, number)
    return decode_chunk(entry[0], f"{medium.address}, {sequence}, {number}") if entry else None


def newest_chunk(medium: Medium, sequence: str) -> Chunk | None:
    """A lane's newest chunk; None where there is none. Raises as `read_chunk` does."""
    newest = medium.last(sequence)
    return None if newest is None else read_chunk(medium, sequence, newest)


def claim_sequence(what: str) -> str:
    """The sequence of a claim's holders."""
    return f"{CLAIMS}/{quote(what, safe='')}"
