"""A trajectory: its turns as a tree, its messages as the agent saw them, its time, and what it led to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.lineage.records import TrajectoryLineage
from rollbook.lineage.trajectories import trajectory_lineage
from rollbook.store.errors import CutError, RequestError
from rollbook.store.events import Event
from rollbook.store.events.event_json import as_json
from rollbook.transcript.facts import TrajectoryFacts, TurnFacts
from rollbook.transcript.reading import facts_of
from rollbook.viewer.pages import Page, Query, missing
from rollbook.viewer.snapshots import Snapshot

WIDTH = 1000
"""Of the lane of time, in units of its own."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Turns that follow each other, and the branches that begin behind the last of them."""

    turns: Sequence[TurnFacts]
    branches: Sequence[Branch]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time on the lane: what went on, of which turn, from and to where on it.

    Attributes:
        kind: waiting, held, sampling or agent (its tools, and all else between two turns).
    """

    kind: str
    turn: int
    start: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrajectoryPage:
    """A trajectory.

    Attributes:
        branches: its roots, as a tree.
        lane: of time, by turn; sums: kind of stretch -> seconds in all.
        leaves: turns that are the last of a sample.
    """

    facts: TrajectoryFacts
    branches: Sequence[Branch]
    lane: Sequence[Stretch]
    sums: Mapping[str, float]
    seconds: float
    leaves: Sequence[str]


def read_trajectory(snapshot: Snapshot, query: Query) -> TrajectoryPage:
    """A trajectory, by its id.

    Raises:
        RequestError: 404, the log does not hold it.
    """
    facts = facts_of(_events(snapshot, query))
    lane, seconds = _lane(facts)
    sums: dict[str, float] = {}
    for stretch in lane:
        sums[stretch.kind] = sums.get(stretch.kind, 0.0) + stretch.seconds
    parents = {turn.parent for turn in facts.turns if turn.status == "completed"}
    leaves = [t.turn_id for t in facts.turns if t.status == "completed" and t.turn_id not in parents]
    return TrajectoryPage(facts, _branches(facts.turns), lane, sums, seconds, leaves)


def _events(snapshot: Snapshot, query: Query) -> list[Event]:
    events = snapshot.store.events_about([query["trajectory_id"]])
    if not events:
        raise _absent(query)
    return events


def _absent(query: Query) -> RequestError:
    return missing(f"trajectory {query['trajectory_id']!r}", "was it dropped, or is its id cut short?")


def _branches(turns: Sequence[TurnFacts]) -> list[Branch]:
    """The tree of turns: a turn goes on in its branch as long as one alone extends the one before."""
    known = {turn.turn_id for turn in turns}
    behind: dict[str | None, list[TurnFacts]] = {}
    for turn in turns:
        behind.setdefault(turn.parent if turn.parent in known else None, []).append(turn)

    def branch(turn: TurnFacts) -> Branch:
        chain = [turn]
        while len(after := behind.get(chain[-1].turn_id, [])) == 1:
            chain += after
        return Branch(chain, [branch(first) for first in after])

    return [branch(root) for root in behind.get(None, [])]


def _lane(facts: TrajectoryFacts) -> tuple[list[Stretch], float]:
    """Where the time of a trajectory went, and how many seconds it took."""
    timed = [turn for turn in facts.turns if turn.latency_ms is not None]
    if not timed:
        return [], 0.0
    start = facts.opened_us
    end = max(turn.requested_us + 1000 * (turn.latency_ms or 0) for turn in timed)
    whole = max(end - start, 1)
    stretches: list[Stretch] = []

    def add(kind: str, turn: int, begin: float, until: float) -> None:
        if until > begin:
            at, width = (begin - start) / whole * WIDTH, (until - begin) / whole * WIDTH
            stretches.append(Stretch(kind, turn, round(at, 2), round(width, 2), (until - begin) / 1e6))

    idle = float(start)
    for turn in sorted(timed, key=lambda turn: turn.requested_us):
        asked, done = turn.requested_us, turn.requested_us + 1000 * (turn.latency_ms or 0)
        add("agent", turn.number, idle, asked)
        timings = turn.answer.timings if turn.answer is not None else {}
        held = min(float(timings.get("held_us") or 0), done - asked)
        engine = min(float(timings.get("engine_us") or done - asked - held), done - asked - held)
        add("waiting", turn.number, asked, done - held - engine)
        add("held", turn.number, done - held - engine, done - engine)
        add("sampling", turn.number, done - engine, done)
        idle = max(idle, done)
    return stretches, whole / 1e6


# Raw, and lineage ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawTurn:
    """The events of a turn, as they are in the log."""

    trajectory_id: str
    turn_id: str
    events: Sequence[Mapping[str, Any]]


def read_raw(snapshot: Snapshot, query: Query) -> RawTurn:
    """A turn as it is in the log: the request and the reply, verbatim but for secrets.

    Raises:
        RequestError: 404, the log does not hold it.
    """
    turn_id = query["turn_id"]
    events = [event for event in _events(snapshot, query) if _is_of(event, turn_id)]
    if not events:
        raise missing(f"turn {turn_id!r}", "the trajectory's page lists its turns")
    return RawTurn(query["trajectory_id"], turn_id, [as_json(event) for event in events])


def _is_of(event: Event, turn_id: str) -> bool:
    return getattr(event.record, "turn_id", None) == turn_id


def read_lineage(snapshot: Snapshot, query: Query) -> TrajectoryLineage:
    """Where a trajectory comes from, and what it led to."""
    with snapshot.connection.cursor() as cursor:
        try:
            return trajectory_lineage(snapshot.store, cursor, snapshot.cut, query["trajectory_id"])
        except CutError as error:
            raise _absent(query) from error


PAGES = (
    Page("/trajectories/{trajectory_id}", "trajectory.html", read_trajectory),
    Page("/trajectories/{trajectory_id}/turns/{turn_id}", "raw.html", read_raw),
    Page("/trajectories/{trajectory_id}/lineage", "lineage.html", read_lineage),
)
