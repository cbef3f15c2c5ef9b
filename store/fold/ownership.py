"""The order in which lanes wrote a trajectory: one after the other, each by adoption from the one
before. Pure.

Lanes have no common order and may be read in any. The chain of a trajectory's
`trajectory.adopted` events orders it: each begins a term in which its lane owns the trajectory,
and names the last event of the previous term, all of whose events come first. A lane may own one
trajectory in several terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Position = tuple[str, int]
"""(lane, seq)"""


@dataclass(slots=True)
class OwnershipChain:
    """The lanes that owned a trajectory, in order: its opening, then each adoption with the event
    before it."""

    opened: Position
    adoptions: dict[Position, str] = field(default_factory=dict)
    places: dict[str, Position] = field(default_factory=dict)
    """event_id -> place, of every event of the trajectory."""

    def rank(self, place: Position) -> int | None:
        """How many terms precede the one that an event is in; None in a lane that had none (a judge's)."""
        start = self._start(place)
        rank = 0
        while start is not None and start != self.opened and rank <= len(self.adoptions):
            before = self.places.get(self.adoptions[start])
            start = self.opened if before is None else self._start(before)
            rank += 1
        return None if start is None else rank

    def key(self, place: Position) -> tuple[str, int, int]:
        """Sorts the trajectory's events: its writers as if they were one lane, others by their lanes."""
        rank = self.rank(place)
        lane, seq = place
        return (lane, 0, seq) if rank is None else (self.opened[0], rank, seq)

    def last(self) -> tuple[str, str]:
        """(the lane that writes the trajectory now, id of its last event there)."""
        lane, _ = max([self.opened, *self.adoptions], key=lambda start: self.rank(start) or 0)
        there = {place: event_id for event_id, place in self.places.items() if place[0] == lane}
        return lane, there[max(there)]

    def _start(self, place: Position) -> Position | None:
        """Where the term that holds an event began."""
        starts: Mapping[int, Position] = {
            start[1]: start
            for start in (self.opened, *self.adoptions)
            if start[0] == place[0] and start[1] <= place[1]
        }
        return starts[max(starts)] if starts else None
