"""In which order lanes wrote a trajectory: one after the other, each by adoption from the one before. Pure.

Lanes have no common order and may be read in any. What orders an adopted trajectory is the chain of its
`trajectory.adopted` events: each stands at the beginning of a tenure, names the last event of the tenure
before, and so all of that one comes first. A lane may have several tenures of one trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Place = tuple[str, int]
"""(lane, seq)"""


@dataclass(slots=True)
class Tenures:
    """Where a trajectory was opened, and each adoption: its place -> the event it goes on from."""

    opened: Place
    adoptions: dict[Place, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    """event_id -> place, of every event of the trajectory."""

    def rank(self, place: Place) -> int | None:
        """How many tenures came before the one an event is in; None in a lane that had none (a judge's)."""
        start = self._start(place)
        rank = 0
        while start is not None and start != self.opened and rank <= len(self.adoptions):
            before = self.places.get(self.adoptions[start])
            start = self.opened if before is None else self._start(before)
            rank += 1
        return None if start is None else rank

    def key(self, place: Place) -> tuple[str, int, int]:
        """Sorts the trajectory's events: its writers as if they were one lane, others by their lanes."""
        rank = self.rank(place)
        lane, seq = place
        return (lane, 0, seq) if rank is None else (self.opened[0], rank, seq)

    def last(self) -> tuple[str, str]:
        """(the lane that writes the trajectory now, id of its last event there)."""
        lane, _ = max([self.opened, *self.adoptions], key=lambda start: self.rank(start) or 0)
        there = {place: event_id for event_id, place in self.places.items() if place[0] == lane}
        return lane, there[max(there)]

    def _start(self, place: Place) -> Place | None:
        """Where the tenure began that an event is in."""
        starts: Mapping[int, Place] = {
            start[1]: start
            for start in (self.opened, *self.adoptions)
            if start[0] == place[0] and start[1] <= place[1]
        }
        return starts[max(starts)] if starts else None
