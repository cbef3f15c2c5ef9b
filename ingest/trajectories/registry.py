"""Which trajectories of the run the proxy has in memory, and how much of them.

Open ones are all here by name. Their contents are kept within a budget: the least recently used of those in
which nothing is under way go first, and are read back from the log when they are asked for again. Of
finished ones there are the names (`EndedNames`), in bounded memory, however many they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
import xxhash
from cachetools import FIFOCache

from rollbook.ingest.tokens.tree import TreeTurn
from rollbook.ingest.trajectories.live import Contents, LiveTrajectory
from rollbook.store.events import QUARANTINE, Json, TrajectoryOpened, TurnCompleted
from rollbook.store.sealed.names import Hashes, name_hash

TIPS_KEPT = 65536
"""How many ends of quarantined conversations are remembered."""
BUDGET_BYTES = 512 << 20


class Trajectories:
    """The run's trajectories.

    Args:
        budget: about how many bytes the contents of open ones may take.
    """

    def __init__(self, budget: int = BUDGET_BYTES) -> None:
        self.budget = budget
        self.bytes = 0
        """What the contents of open ones take."""
        self.ended = EndedNames()
        self._open: dict[str, LiveTrajectory] = {}
        self._by_id: dict[str, LiveTrajectory] = {}
        self._turns: dict[str, LiveTrajectory] = {}
        self._tips: FIFOCache[bytes, LiveTrajectory] = FIFOCache(TIPS_KEPT)
        self._responses: dict[str, LiveTrajectory] = {}
        self._held: OrderedDict[str, tuple[LiveTrajectory, int]] = OrderedDict()

    # Which there are --------------------------------------------------------------------------

    def get(self, name: str) -> LiveTrajectory | None:
        """The trajectory of that name: an open one, or one that ended not long ago."""
        return self._open.get(name) or self.ended.get(name)

    def open(self) -> Iterator[LiveTrajectory]:
        """Those that are not finished, whichever proxy writes them."""
        return iter(self._open.values())

    def by_id(self, trajectory_id: str) -> LiveTrajectory | None:
        """The open one of that id. Any thread may ask."""
        return self._by_id.get(trajectory_id)

    def of_turn(self, turn_id: str) -> LiveTrajectory | None:
        """The open one that has this turn."""
        return self._turns.get(turn_id)

    def of_response(self, response_id: str) -> LiveTrajectory | None:
        """The open one in which an upstream gave the response of that id, or an item of it."""
        return self._responses.get(response_id)

    def of_tip(self, tip: bytes) -> LiveTrajectory | None:
        """The quarantined trajectory whose conversation ends with this hash."""
        return self._tips.get(tip)

    # What becomes of them ---------------------------------------------------------------------

    def add(self, live: LiveTrajectory) -> None:
        """Take an open one."""
        self._open[live.opened.name] = self._by_id[live.opened.trajectory_id] = live
        if live.contents is not None:
            self._index(live, live.contents)

    def remove(self, live: LiveTrajectory) -> None:
        """Remove a trajectory whose opening is not in the log; its name is free again."""
        if live.contents is not None:
            self._unindex(live, live.contents)
        self._let_go(live)
        self._open.pop(live.opened.name, None)
        self._by_id.pop(live.opened.trajectory_id, None)

    def end(self, live: LiveTrajectory) -> None:
        """Finish a trajectory: only its name is kept."""
        self.remove(live)
        live.finished, live.contents = True, None
        self.ended.add(live.opened, live.lane)

    def take(
        self,
        live: LiveTrajectory,
        turn: TreeTurn,
        request: Json | None = None,
        items: list[Any] | None = None,
        completed: TurnCompleted | None = None,
    ) -> None:
        """A turn of it completed, and may be extended from now on.

        Args:
            request, items: for endpoints whose requests refer to earlier turns.
            completed: of an upstream, which calls its reply and that one's items by ids of its own.
        """
        if live.contents is None:
            return  # finished
        tip = live.known.take(turn, request, items)
        live.changes += 1
        named = [] if completed is None else live.known.passed(completed)
        if self._open.get(live.opened.name) is not live:
            return  # its opening is not in the log
        self._turns[turn.turn_id] = live
        self._responses |= dict.fromkeys(named, live)
        self._point(live, [tip])
        self.used(live)

    def restore(self, live: LiveTrajectory, contents: Contents) -> None:
        """Replace a trajectory's contents by what the log has; its running requests go on."""
        before = live.contents
        if before is not None:
            self._unindex(live, before)
            for digest, what in before.arrivals.items():
                if not isinstance(what, tuple):
                    contents.arrived(digest, what)
        live.contents = contents
        self._index(live, contents)

    def write_off(self, live: LiveTrajectory) -> None:
        """Drop a trajectory's contents; it is still found by name, turn and response."""
        live.contents = None
        self._let_go(live)

    def _let_go(self, live: LiveTrajectory) -> None:
        _, size = self._held.pop(live.opened.name, (live, 0))
        self.bytes -= size

    def used(self, live: LiveTrajectory) -> None:
        """Note that contents were used, and may have grown; drop the least recently used beyond the
        budget."""
        if live.opened.name not in self._open or live.contents is None:
            return  # only drafted
        _, size = self._held.pop(live.opened.name, (live, 0))
        self._held[live.opened.name] = (live, live.contents.size)
        self.bytes += live.contents.size - size
        if self.bytes > self.budget:
            self._make_room(live)

    def _make_room(self, but: LiveTrajectory) -> None:
        for live, _ in list(self._held.values()):
            if self.bytes <= self.budget:
                return
            if live is not but and live.idle:
                self.write_off(live)

    # What points to them ----------------------------------------------------------------------

    def _index(self, live: LiveTrajectory, contents: Contents) -> None:
        self._turns |= dict.fromkeys(contents.completed, live)
        self._responses |= dict.fromkeys([*contents.replies, *contents.outputs], live)
        self._point(live, contents.tree.tips())
        self.used(live)

    def _unindex(self, live: LiveTrajectory, contents: Contents) -> None:
        _take_away(self._turns, contents.completed, live)
        _take_away(self._responses, [*contents.replies, *contents.outputs], live)
        if live.opened.split == QUARANTINE:
            _take_away(self._tips, contents.tree.tips(), live)

    def _point(self, live: LiveTrajectory, tips: Any) -> None:
        """Index a quarantined conversation by its end: unnamed requests are matched by that."""
        if live.opened.split == QUARANTINE:
            self._tips.update(dict.fromkeys(tips, live))


def _take_away(index: MutableMapping[Any, LiveTrajectory], keys: Any, live: LiveTrajectory) -> None:
    for key in keys:
        if index.get(key) is live:
            del index[key]


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
