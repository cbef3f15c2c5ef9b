"""The names of a run's trajectories that are finished: in bounded memory, however many they are."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace

import numpy as np
import xxhash
from cachetools import FIFOCache

from rollbook.ingest.trajectories.live import LiveTrajectory
from rollbook.store.events import TrajectoryOpened
from rollbook.store.sealed.names import Hashes, name_hash

RECENT = 8192
"""Newest ended trajectories kept by name: late rewards ask for these most."""
FILTER_BYTES = 4 << 20
HASHES = 5
"""With a million names one in 50,000 that are new is looked up in the log for nothing; with ten million, one
in three."""


class NameFilter:
    """A Bloom filter: says for sure that a name is not among those it has been given."""

    def __init__(self, size: int = FILTER_BYTES) -> None:
        self._bits = bytearray(size)

    def add(self, name: str) -> None:
        """Take a name."""
        for place in self._places(name):
            self._bits[place >> 3] |= 1 << (place & 7)

    def __contains__(self, name: str) -> bool:
        """False: it was never given. True: it probably was."""
        return all(self._bits[place >> 3] & 1 << (place & 7) for place in self._places(name))

    def _places(self, name: str) -> list[int]:
        high, low = divmod(xxhash.xxh3_128_intdigest(name.encode()), 1 << 64)
        return [(high + i * (low | 1)) % (8 * len(self._bits)) for i in range(HASHES)]


@dataclass(frozen=True, slots=True)
class SealedNames:
    """The names of a run's trajectories that sealed units opened: eight bytes for each.

    Attributes:
        hashes: sorted, as `Store.sealed_names` gives them; of other runs as well.
    """

    run: str
    hashes: Hashes

    def __contains__(self, name: str) -> bool:
        """False: there was none. True: there probably was."""
        wanted = np.uint64(name_hash(self.run, name))
        place = int(np.searchsorted(self.hashes, wanted))
        return place < len(self.hashes) and self.hashes[place] == wanted


@dataclass(slots=True)
class EndedNames:
    """Of all finished trajectories whether a name may be one of theirs; of the latest, which they are.

    Attributes:
        sealed: names that were there when this began, of open trajectories too.
    """

    recent: InitVar[int] = RECENT
    sealed: SealedNames = SealedNames("", np.empty(0, np.uint64))
    _filter: NameFilter = field(default_factory=NameFilter)
    _latest: FIFOCache[str, LiveTrajectory] = field(init=False)

    def __post_init__(self, recent: int) -> None:
        self._latest = FIFOCache(recent)

    def add(self, opened: TrajectoryOpened, lane: str) -> None:
        """Take one that is finished, or that was found to be."""
        name = opened.name
        self._filter.add(name)
        # What a client may make large goes: for it the log is asked.
        bare = replace(opened, group=None, task=None, labels={})
        self._latest[name] = LiveTrajectory(bare, lane, contents=None, finished=True)

    def get(self, name: str) -> LiveTrajectory | None:
        """The trajectory, if it is one of the latest."""
        return self._latest.get(name)

    def may_hold(self, name: str) -> bool:
        """Whether the name may be one of a finished trajectory that is not among the latest."""
        return name not in self._latest and (name in self._filter or name in self.sealed)
