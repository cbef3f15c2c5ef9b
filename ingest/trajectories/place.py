"""The place of a worker or proxy among several, and which of them owns a trajectory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from rollbook.store.events import QUARANTINE
from rollbook.store.ids import new_id

FIRST = 0
"""The worker that does what one must do for all: what names nothing is its own; it admits, seals and moves
cursors."""


def owner_of(name: str, workers: int) -> int:
    """The number of the worker that a trajectory of this name belongs to."""
    if workers == 1 or name.startswith(f"{QUARANTINE}/"):
        return FIRST
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) % workers


@dataclass(frozen=True, slots=True)
class Place:
    """One worker of several, or one proxy of several.

    Attributes:
        number: its own, from 0.
        stands_in_for: the numbers of others that are gone, whose names are this one's until they are back.
        leaves: it is ending, and no name is its own any more.
    """

    number: int = FIRST
    workers: int = 1
    stands_in_for: frozenset[int] = frozenset()
    leaves: bool = False

    @property
    def holds(self) -> frozenset[int]:
        """The numbers whose names are this one's."""
        return frozenset() if self.leaves else self.stands_in_for | {self.number}

    def owns(self, name: str) -> bool:
        """Whether a trajectory of this name is this one's."""
        return owner_of(name, self.workers) in self.holds

    def remembers(self, name: str) -> bool:
        """Whether a trajectory of this name has been this one's ever since it began."""
        return owner_of(name, self.workers) == self.number

    def new_name(self) -> str:
        """A fresh id that, taken as a trajectory's name, makes it this one's."""
        while not self.remembers(name := new_id()):
            pass
        return name

    def lane(self, lane: str) -> str:
        """The lane that this worker writes, given the proxy's."""
        return lane if self.workers == 1 else f"{lane}-{self.number}"

    def lanes(self, lane: str) -> list[str]:
        """The lanes of all workers, given the proxy's."""
        return [Place(number, self.workers).lane(lane) for number in range(self.workers)]

    @property
    def is_first(self) -> bool:
        """Whether this one does what one must do for all."""
        return FIRST in self.holds


ALONE = Place()
"""The place of a proxy that is one process."""
