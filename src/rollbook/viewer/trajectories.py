"""A trajectory: its turns as a tree, its messages as the agent saw them, its time, and what it led to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollbook.lineage.records import TrajectoryLineage
from rollbook.lineage.trajectories import trajectory_lineage
from rollbook.store.errors import CutError, RequestError
from rollbook.store.events import Event
from rollbook.store.events.event_json import as_json
from rollbook.store.fold.trajectory import Turn, fold
from rollbook.transcript.facts import TrajectoryFacts, TurnFacts
from rollbook.transcript.reading import facts_of
from rollbook.viewer.pages import Page, Query, missing, whole_number
from rollbook.viewer.snapshots import Snapshot

WIDTH = 1000
"""Of the lane of time, in units of its own."""
SHOWN = 100
"""Turns of a page; `from` in its address is the number of the first of them."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Turns of a page that follow each other.

    Attributes:
        depth: how many times the tree forks above it.
        behind: number of the turn that the first of them extends; null where that is a root.
        numbers: of its turns.
    """

    depth: int
    behind: int | None
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time on the lane: what went on, of which turn, from and to where on it.

    Attributes:
        kind: waiting, held, prefill (until the engine's first token), sampling or agent (its tools, and all
            else between two turns).
    """

    kind: str
    turn: int
    start: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TrajectoryPage:
    """A trajectory, and some of its turns.

    Attributes:
        facts: with the turns that are shown; count: of all.
        before, after: number of the first turn of the page before and of the one behind.
        branches: of the turns that are shown, as a tree: behind each comes what it forks into.
        forks: whether the trajectory forks anywhere.
        lane: of time, by turn; sums: kind of stretch -> seconds in all.
        leaves: of the turns that are shown, those that are the last of a sample.
    """

    facts: TrajectoryFacts
    count: int
    before: int | None
    after: int | None
    branches: Sequence[Branch]
    forks: bool
    lane: Sequence[Stretch]
    sums: Mapping[str, float]
    seconds: float
    leaves: Sequence[str]

    def turns(self, branch: Branch) -> list[TurnFacts]:
        """The turns of a branch."""
        first = self.facts.turns[0].number
        return [self.facts.turns[number - first] for number in branch.numbers]


def read_trajectory(snapshot: Snapshot, query: Query) -> TrajectoryPage:
    """A trajectory, by its id.

    Raises:
        RequestError: 404, the log does not hold it.
    """
    events = _events(snapshot, query["trajectory_id"])
    trajectory = fold(events).get(query["trajectory_id"])
    if trajectory is None:
        raise absent(query["trajectory_id"])
    first = max((whole_number(query, "from") or 1) - 1, 0)
    facts = facts_of(events, slice(first, first + SHOWN))
    turns = list(trajectory.turns.values())
    forest, end = _Forest(turns), min(first + SHOWN, len(turns))
    lane, seconds = _lane(facts, facts.opened_us if first == 0 else None)
    sums: dict[str, float] = {}
    for stretch in lane:
        sums[stretch.kind] = sums.get(stretch.kind, 0.0) + stretch.seconds
    return TrajectoryPage(
        facts=facts,
        count=len(turns),
        before=max(first - SHOWN, 0) + 1 if first else None,
        after=end + 1 if first < end < len(turns) else None,
        branches=forest.branches(first, end),
        forks=forest.forks,
        lane=lane,
        sums=sums,
        seconds=seconds,
        leaves=[turns[at].turn_id for at in range(first, end) if forest.is_leaf(at)],
    )


def facts_at(snapshot: Snapshot, trajectory_id: str) -> TrajectoryFacts:
    """The facts of a trajectory.

    Raises:
        RequestError: 404, the log does not hold it.
    """
    return facts_of(_events(snapshot, trajectory_id))


def _events(snapshot: Snapshot, trajectory_id: str) -> list[Event]:
    events = snapshot.store.events_about([trajectory_id], snapshot.cut)
    if not events:
        raise absent(trajectory_id)
    return events


def absent(trajectory_id: str) -> RequestError:
    """The error of a trajectory that the log does not hold."""
    return missing(f"trajectory {trajectory_id!r}", "was it dropped, or is its id cut short?")


class _Forest:
    """Turns by the turns that they extend, which come before them; each is named by its place."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        places = {turn.turn_id: at for at, turn in enumerate(turns)}
        known = (places.get(turn.requested.parent_turn_id or "", -1) for turn in turns)
        self._parents = [parent if parent < at else -1 for at, parent in enumerate(known)]
        self._children = Counter(self._parents)
        self._completed = [turn.completed is not None for turn in turns]
        self._extended = {parent for parent, done in zip(self._parents, self._completed, strict=True) if done}
        self._depths: list[int] = []
        for parent in self._parents:
            above = 0 if parent < 0 else self._depths[parent]
            self._depths.append(above + (self._children[parent] > 1))

    @property
    def forks(self) -> bool:
        """Whether more than one turn extends the same, or begins the trajectory."""
        return any(count > 1 for count in self._children.values())

    def is_leaf(self, at: int) -> bool:
        """Whether it is the last turn of a sample."""
        return self._completed[at] and at not in self._extended

    def branches(self, first: int, end: int) -> list[Branch]:
        """The tree of these turns; a turn goes on in its branch while it alone extends the one before."""
        behind: dict[int, list[int]] = {}
        for at in range(first, end):
            parent = self._parents[at]
            behind.setdefault(parent if parent >= first else -1, []).append(at)
        found, waiting = [], behind.get(-1, [])[::-1]
        while waiting:
            chain = [waiting.pop()]
            while self._children[chain[-1]] == 1 and (after := behind.get(chain[-1])):
                chain += after
            parent = self._parents[chain[0]]
            numbers = [at + 1 for at in chain]
            found.append(Branch(self._depths[chain[0]], parent + 1 if parent >= 0 else None, numbers))
            waiting += behind.get(chain[-1], [])[::-1]
        return found


def _lane(facts: TrajectoryFacts, opened_us: int | None) -> tuple[list[Stretch], float]:
    """Where the time of its turns went, and how many seconds they took.

    Args:
        opened_us: when it was opened; None where earlier turns are not among these.
    """
    timed = [turn for turn in facts.turns if turn.latency_ms is not None]
    if not timed:
        return [], 0.0
    start = min(turn.requested_us for turn in timed) if opened_us is None else opened_us
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
        first = min(float(timings.get("first_token_us") or 0), engine)
        add("held", turn.number, done - held - engine, done - engine)
        add("prefill", turn.number, done - engine, done - engine + first)
        add("sampling", turn.number, done - engine + first, done)
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
    events = [event for event in _events(snapshot, query["trajectory_id"]) if _is_of(event, turn_id)]
    if not events:
        raise missing(f"turn {turn_id!r}", "the trajectory's page lists its turns")
    return RawTurn(query["trajectory_id"], turn_id, [as_json(event) for event in events])


def _is_of(event: Event, turn_id: str) -> bool:
    return getattr(event.record, "turn_id", None) == turn_id


def read_lineage(snapshot: Snapshot, query: Query) -> TrajectoryLineage:
    """Where a trajectory comes from, and what it led to."""
    with snapshot.connection.cursor() as cursor:
        try:
            log, trajectory_id, lines = snapshot.store, query["trajectory_id"], snapshot.lines()
            return trajectory_lineage(log, cursor, snapshot.cut, trajectory_id, lines=lines, shares=False)
        except CutError as error:
            raise absent(query["trajectory_id"]) from error


PAGES = (
    Page("/trajectories/{trajectory_id}", "trajectory.html", read_trajectory),
    Page("/trajectories/{trajectory_id}/turns/{turn_id}", "raw.html", read_raw),
    Page("/trajectories/{trajectory_id}/lineage", "lineage.html", read_lineage),
)
