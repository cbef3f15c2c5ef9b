"""Which events a lane already holds, by `event_id`: what makes appends idempotent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

REMEMBERED = 65_536
_ABOVE_ALL = "~"


class EventWindow:
    """The newest event ids of a lane, and their sequence numbers.

    Ids are UUIDv7, so they rise with the time they were made. An id above all that were forgotten cannot
    be one of those: the window alone decides. For an older one `search` looks in the log; that happens
    only when somebody repeats an append after tens of thousands of others.

    Args:
        search: finds the sequence number of an event id in the whole lane, or None.
    """

    def __init__(self, search: Callable[[str], int | None], size: int = REMEMBERED) -> None:
        self._search, self._size = search, size
        self._seqs: dict[str, int] = {}
        self._order: deque[str] = deque()
        self._forgotten = ""

    def find(self, event_id: str) -> int | None:
        """The sequence number of the event, or None where the lane does not hold it."""
        seq = self._seqs.get(event_id)
        if seq is None and self._forgotten and event_id <= self._forgotten:
            return self._search(event_id)
        return seq

    def add(self, event_id: str, seq: int) -> None:
        """Remember an event; perhaps forget the oldest."""
        self._seqs[event_id] = seq
        self._order.append(event_id)
        if len(self._order) > self._size:
            oldest = self._order.popleft()
            self._forgotten = max(self._forgotten, oldest)
            self._seqs.pop(oldest, None)

    def preload(self, ids: Sequence[tuple[str, int]], *, complete: bool) -> None:
        """Fill with (id, sequence number) of the lane's newest events, in order.

        Args:
            complete: whether these are all the lane has. If not, what came before is unknown; ids do not
                rise strictly, so everything up to the highest of the older half is searched for.
        """
        if not complete:
            older = ids[: len(ids) // 2 + 1]
            self._forgotten = max((event_id for event_id, _ in older), default=_ABOVE_ALL)
        for event_id, seq in ids:
            self.add(event_id, seq)
