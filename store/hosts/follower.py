"""Follows the lanes of other hosts: their chunks become replicas here, which readers see as closed cuts.

A chunk ends a closed cut of its sender: all of its events' names were readable there. Here it counts once
this host holds all of that cut; then the replicas that it names are let see together, by one file that says
how far each may be read. What a chunk needs of a lane that has ended, and never came, is lost with its host:
it is not waited for.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.errors import CorruptionError, RemoteError, StoreError
from rollbook.store.hosts.lifetime import first_behind
from rollbook.store.hosts.openings import IDLE_S, Openings
from rollbook.store.hosts.replica import Replica, opened_replica
from rollbook.store.hosts.session import seconds
from rollbook.store.hosts.units import Listening
from rollbook.store.medium.medium import LANES, Medium, lane_of
from rollbook.store.permissions import make_empty, open_file
from rollbook.store.wal.files import FENCED, REPLICA, REPLICAS, lane_folder, read_replicas, replicas_bytes

WINDOW = 32
"""Chunks of a lane that are asked for at once, where there are many."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, PATIENCE = 0.03, 1.0, 10.0
"""Between two looks at a lane: this share of how long nothing came."""
IDLE_PAUSE_S = 60.0
"""The same of a lane that is idle for hours."""
FIRST_UNITS_PAUSE_S, LONGEST_UNITS_PAUSE_S = 5.0, 60.0
"""Until sealed units are looked for again where object storage did not answer."""
GAP_LOOK_S = 30.0
"""Between two looks whether the chunk to come was removed, as units in object storage hold the same."""
DISCOVER_S = 1.0
"""Between two looks for lanes that were taken."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lane:
    """A replica, and when it is looked at."""

    replica: Replica
    due: float = 0.0
    grew: float = 0.0
    heard: float = 0.0
    """When somebody was last heard to put something."""
    empty_at: float = 0.0
    """When the look began that found nothing new."""
    window: int = 1
    looked: float = 0.0
    """When it was last looked whether the chunk to come was removed."""
    failure: StoreError | None = None
    """Why nothing more is taken of it."""


class Follower:
    """Copies lanes of other hosts, as one thread calls `step`.

    Args:
        follow: patterns of names of lanes.
        take_units: called with a replica, and the addresses of its sealed units, where they have changed.
    """

    def __init__(
        self,
        medium: Medium,
        store: Path,
        store_id: str,
        host: str,
        follow: Sequence[str],
        take_units: Callable[[Replica, list[str]], None],
    ) -> None:
        self._medium, self._store, self._store_id, self._host = medium, store, store_id, host
        self._follow, self._take_units = follow, take_units
        self._listening, self._openings = Listening(medium), Openings(medium)
        self._opened = deque[str]()
        """Sequences of lanes that were taken, and are to be looked at."""
        self._lanes: dict[str, _Lane] = {}
        self._visible: dict[str, int] = {}
        self._earlier = _readable_before(store)
        self._hurried = True
        """Whether the next look is to find all that is in the medium."""
        self._stale = True
        """Whether the file of what may be read is to be written, whatever it says."""
        self._discovered_at = self._discover_due = 0.0
        self._units_due, self._units_pause = 0.0, FIRST_UNITS_PAUSE_S
        self._fd = open_file(store / REPLICAS, os.O_RDWR | os.O_CREAT)

    def close(self) -> None:
        """End it; nothing is lost."""
        os.close(self._fd)

    @property
    def as_of(self) -> float:
        """All that was in the medium at this time (`session.seconds`) is here."""
        looks = [lane.empty_at for lane in self._lanes.values() if not lane.replica.fenced]
        return min([self._discovered_at, self._listening.as_of, *looks])

    def heard(self, sequence: str) -> None:
        """Look at a lane, or at what a host tells of its units, at once: something was put there. Any thread
        may call it."""
        if not sequence.startswith(f"{LANES}/"):
            self._listening.hurry()
            return
        _, lane = lane_of(sequence)
        known = self._lanes.get(lane)
        if known is not None:
            known.heard, known.due = seconds(), 0.0
        else:
            self._discover_due = 0.0

    def hurry(self) -> None:
        """Look at every lane, and for lanes, in the next step."""
        self._discover_due, self._hurried = 0.0, True
        self._listening.hurry()
        for lane in self._lanes.values():
            lane.due = 0.0

    def replica(self, lane: str) -> Replica | None:
        """The replica of a lane."""
        known = self._lanes.get(lane)
        return None if known is None else known.replica

    @property
    def failure(self) -> StoreError | None:
        """Why nothing more is taken of a lane, or None."""
        return next((lane.failure for lane in self._lanes.values() if lane.failure is not None), None)

    def step(self) -> float:
        """Take what has come, let readers see what they may; seconds until there is something to do again.

        Raises:
            MediumError: the medium does not answer.
        """
        now = seconds()
        if now >= self._discover_due:
            self._discover()
        due = [lane for lane in self._lanes.values() if lane.due <= now and not lane.replica.fenced]
        grown = list(self._taken(due))
        if grown or self._stale:
            self._show()
            for lane in grown:
                lane.replica.save()
            self._note_ends()
        if self._listening.due() <= now:
            self._listening.look({lane.replica.host for lane in self._lanes.values()})
            self._learn_units()
        dues = [lane.due for lane in self._lanes.values() if not lane.replica.fenced]
        return max(min([self._discover_due, self._listening.due(), *dues]) - seconds(), 0.0)

    def _learn_units(self) -> None:
        """Have the manifests of all units that their owners have told of; later, if object storage does not
        answer. Their events are in the medium, too."""
        if seconds() < self._units_due:
            return
        for lane in self._lanes.values():
            replica = lane.replica
            told = self._listening.of(replica.host, replica.lane)
            if told == replica.units:
                continue
            try:
                self._take_units(replica, told)
                self._units_pause = FIRST_UNITS_PAUSE_S
            except RemoteError as error:
                self._units_failed(error)
                return
            replica.save()
            self._stale = True  # events may have come with them

    def _units_failed(self, error: RemoteError) -> None:
        # Each try takes as long as the network does to give up, and meanwhile nothing is followed.
        self._units_due = seconds() + self._units_pause
        logger.warning("sealed units are looked for again in %.0f s: %s", self._units_pause, error)
        self._units_pause = min(2 * self._units_pause, LONGEST_UNITS_PAUSE_S)

    def _note_ends(self) -> None:
        """Let others of this host know which lanes have ended, and are all here."""
        for lane in self._lanes.values():
            if lane.replica.fenced and lane.replica.visible == lane.replica.held:
                make_empty(lane.replica.folder / FENCED)

    def _discover(self) -> None:
        begun = seconds()
        self._opened += self._openings.since()
        while self._opened:
            host, lane = lane_of(self._opened[0])
            if host != self._host and self._follows(lane):
                self._open(host, lane, begun)
            self._opened.popleft()
        self._discovered_at, self._discover_due = begun, begun + DISCOVER_S

    def _open(self, host: str, lane: str, begun: float) -> None:
        """Follow a lane that was taken, or look at it anew."""
        if lane in self._lanes:
            self._refuse_other(lane, host)
            self._lanes[lane].grew, self._lanes[lane].due = begun, 0.0
            return
        folder = lane_folder(self._store, lane)
        if folder.exists() and not (folder / REPLICA).exists():
            raise CorruptionError(
                f"lane {lane!r} is written by {host} and by this host too: this folder is a copy of that "
                "one's; move it away, and join the store again"
            )
        replica = opened_replica(self._store, self._store_id, host, lane)
        self._begin(replica, begun)
        replica.show(max(replica.visible, min(self._earlier.get(lane, 0), replica.held)))
        self._lanes[lane] = _Lane(replica, grew=begun)
        self._visible[lane], self._stale = replica.visible, True

    def _follows(self, lane: str) -> bool:
        return any(fnmatch.fnmatchcase(lane, pattern) for pattern in self._follow)

    def _refuse_other(self, lane: str, host: str) -> None:
        if (first := self._lanes[lane].replica.host) != host:
            raise CorruptionError(
                f"lane {lane!r} is in the medium of {first} and of {host}: remove one of the two"
            )

    def _taken(self, due: list[_Lane]) -> Iterable[_Lane]:
        """Take the chunks that have come; the lanes that grew."""
        begun = seconds()
        wanted = [(lane.replica.sequence, lane.replica.number, lane.window) for lane in due]
        newest, self._hurried = self._hurried, False
        for lane, entries in zip(due, self._medium.read_each(wanted, newest=newest), strict=True):
            now = seconds()
            replica = lane.replica
            try:
                for entry in entries:
                    replica.take(entry)
                    if replica.fenced:
                        break
                lane.failure = None
            except StoreError as error:
                self._failed(lane, error)
                continue
            if entries:
                self._hurried |= newest  # what is behind them is to be seen as soon
                lane.grew, lane.due = now, now if len(entries) == lane.window else now + FIRST_PAUSE_S
                lane.due = now if lane.heard >= begun else lane.due
                lane.window = min(2 * lane.window, WINDOW) if len(entries) == lane.window else 1
                yield lane
            else:
                lane.window = 1
                if newest:
                    lane.empty_at = begun
                if now - lane.looked > GAP_LOOK_S:
                    lane.looked = now
                    self._pass_over_gap(replica)
                idle = now - lane.grew
                pause = min(max(idle / PATIENCE, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                if idle > IDLE_S:  # whoever writes it announces that
                    pause = min(idle / IDLE_S * LONGEST_PAUSE_S, IDLE_PAUSE_S)
                # What was put while this was asked for, and was heard of, is not waited for.
                lane.due = now + (0.0 if lane.heard >= begun else pause)

    def _failed(self, lane: _Lane, error: StoreError) -> None:
        """Note why nothing more is taken of a lane; perhaps its sealed units hold what is missing here."""
        if lane.looked and lane.failure is None:
            logger.warning("%s", error)
        lane.failure = error if lane.looked else None
        lane.looked, lane.due = seconds(), seconds() + (LONGEST_PAUSE_S if lane.failure else 0.0)
        self._learn_again(lane.replica, seconds())

    def _begin(self, replica: Replica, since: float) -> None:
        """Begin, or go on, behind the sealed units, where these hold more than is here: what is in them need
        not be copied."""
        segment = replica.segment
        if seconds() >= self._units_due:
            try:
                self._learn_again(replica, since)
            except RemoteError as error:  # chunks hold the same, as far as they are there
                self._units_failed(error)
        if replica.segment > segment:
            number = first_behind(self._medium, replica.sequence, replica.segment - 1)
            replica.number = max(replica.number, number or 0)
        self._pass_over_gap(replica)

    def _pass_over_gap(self, replica: Replica) -> None:
        """Go on behind sealed units where the chunks that hold the same are not in the medium any more."""
        oldest = self._medium.first(replica.sequence)
        if oldest is None or oldest <= replica.number:
            return
        self._learn_again(replica, seconds())
        replica.number = oldest

    def _learn_again(self, replica: Replica, since: float) -> None:
        """Have a replica's units as its owner had told of them at a time, at least.

        Raises:
            StoreError: the medium, or object storage, does not answer.
        """
        self._listening.look_whole(replica.host, since)
        self._take_units(replica, self._listening.of(replica.host, replica.lane))

    # Letting readers see ------------------------------------------------------------------------

    def _show(self) -> None:
        """Let readers see all that is closed."""
        shown = dict(self._visible)
        while self._shown_once(shown):
            pass
        if shown == self._visible and not self._stale:
            return
        for name, count in shown.items():
            if count > self._visible.get(name, 0):
                self._lanes[name].replica.show(count)
        self._visible, self._stale = shown, False
        os.pwrite(self._fd, replicas_bytes(shown), 0)

    def _shown_once(self, shown: dict[str, int]) -> bool:
        """Let one chunk after the other count whose needs are here; whether one did."""
        changed = False
        for name, lane in self._lanes.items():
            pending = lane.replica.pending
            while pending and all(self._holds(n, count) for n, count in pending[0].needs.items()):
                chunk = pending.popleft()
                for other, count in (*chunk.needs.items(), (name, chunk.end)):
                    if other in self._lanes:
                        count = min(count, self._lanes[other].replica.held)
                        shown[other] = max(shown.get(other, 0), count)
                changed = True
        return changed

    def _holds(self, name: str, count: int) -> bool:
        known = self._lanes.get(name)
        if known is not None:
            return known.replica.held >= count or known.replica.fenced
        folder = lane_folder(self._store, name)
        if folder.exists() and not (folder / REPLICA).exists():
            return True  # what others know of this host's own lanes they have from here
        if not self._follows(name):
            return True  # this host is not to have it
        self._discover_due = min(self._discover_due, seconds() + FIRST_PAUSE_S * 5)
        return False


def _readable_before(store: Path) -> dict[str, int]:
    """How far replicas could be read when they were followed last; nothing where that is not known."""
    try:
        return read_replicas(store)
    except CorruptionError as error:
        logger.warning("%s", error)
        return {}
