"""The newest event ids of a lane, which make appends idempotent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import lt

REMEMBERED = 65_536
_BLOCK = 512
"""Events that are remembered, and forgotten, together: a dict for each would take five times the memory."""
_ABOVE_ALL = "~"


class EventWindow:
    """The newest event ids of a lane, and their sequence numbers.

    Ids are UUIDv7, so they rise with the time they were made. An id above all that the lane holds is new,
    and one above all that were forgotten cannot be one of those: the window alone decides. For an older one
    `search` looks in the log; that happens only when somebody repeats an append after tens of thousands of
    others.

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
            complete: whether these are all the lane has. If not, what came before is unknown; ids do not
                rise strictly, so everything up to the highest of the older half is searched for.
        """
        if not complete:
            older = ids[: len(ids) // 2 + 1]
            self._forgotten = max((event_id for event_id, _ in older), default=_ABOVE_ALL)
            self._highest = self._forgotten
        for start in range(0, len(ids), _BLOCK):
            self.add(dict(ids[start : start + _BLOCK]))
