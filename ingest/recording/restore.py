"""Reads a run's trajectories back from the log: after a restart, or where contents were dropped from
memory.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from rollbook.engines.weights import log as weight_log
from rollbook.ingest.admission.outstanding import LOOSE_KEPT, TRAINABLE, Outstanding
from rollbook.ingest.tokens.tree import TreeTurn, TurnTree, grown
from rollbook.ingest.trajectories.live import Contents
from rollbook.ingest.trajectories.registry import SealedNames
from rollbook.ingest.turns.reply import STOP_STRING
from rollbook.store import Store, format_cut
from rollbook.store.events import (
    Event,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepPlanned,
    SyncFailed,
    SyncFinished,
    SyncStarted,
    TrajectoryFinished,
    TrajectoryOpened,
)
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.store.sql.query import connect_at

TOGETHER = 64
"""Open trajectories that are read together."""
_RARE = weight_log.KINDS | {r.KIND for r in (RunOpened, StepPlanned, StepCommitted, SampleDropped)}
"""Kinds of what trainers write, and of syncs: their events follow each other across lanes."""

_OPEN = """
    SELECT trajectory_id FROM internal.trajectory_scalars
    WHERE run = $run AND finished IS NULL ORDER BY opened, trajectory_id"""
_CANDIDATES = """
    SELECT trajectory_id, "group", split, status, opened, finished FROM internal.trajectory_scalars
    WHERE run = $run AND list_contains($splits, split) AND finished IS NULL
    UNION ALL
    (SELECT trajectory_id, "group", split, status, opened, finished FROM internal.trajectory_scalars
     WHERE run = $run AND list_contains($splits, split) AND finished IS NOT NULL
     ORDER BY finished DESC, trajectory_id DESC LIMIT $latest)"""
_RESTORED = f"""
    WITH candidate AS MATERIALIZED ({_CANDIDATES})
    SELECT c.trajectory_id, c."group", c.split, c.status, epoch_us(c.finished),
           coalesce(t.productive, false), t.policies, t.oldest, coalesce(t.sampled, [])
    FROM candidate c
    LEFT JOIN (
      SELECT trajectory_id, bool_or(productive) AS productive, list(policy) AS policies,
             list(oldest) AS oldest, flatten(list(sampled)) AS sampled
      FROM (
        SELECT trajectory_id, policy, bool_or(delivered IS NOT NULL) AS productive,
               min(min_version) AS oldest,
               coalesce(list(turn_id) FILTER (delivered IS NULL), []) AS sampled
        FROM internal.turn_scalars
        WHERE trajectory_id IN (SELECT trajectory_id FROM candidate)
          AND min_version IS NOT NULL AND NOT coalesce(altered, false)
        GROUP BY trajectory_id, policy)
      GROUP BY trajectory_id) t USING (trajectory_id)
    ORDER BY c.opened, c.trajectory_id"""


class RunReader:
    """Which trajectories of a run are open, which are outstanding, and what trainings and syncs there were.

    What the units' scalars hold is not read from events, so that a start takes as long as what is open, and
    not as long as the log.

    Attributes:
        outstanding: those that wait to be trained on.
        syncs: what became of engines' weights.
        weights: all that says which weights are which version.
        cut: how far it has read.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.outstanding = Outstanding(run)
        self.syncs: list[SyncStarted | SyncFinished | SyncFailed] = []
        self.weights: list[Event] = []
        self._store, self._run = store, run
        self.cut = store.head()
        self._open: dict[str, None] = {}
        if any(self.cut.values()):  # a query takes as long as all the rest of a start, also of nothing
            self._take_scalars()
        self._take_rare()

    def _take_scalars(self) -> None:
        """Take which trajectories are open, and which are outstanding, by the scalars of the log."""
        params = {"run": self._run, "splits": sorted(TRAINABLE), "latest": LOOSE_KEPT}
        with connect_at(self._store, format_cut(self.cut)) as connection:
            opened = connection.read(_OPEN, {"run": self._run}).fetchall()
            self._open = dict.fromkeys(row[0] for row in opened)
            rows = connection.read(_RESTORED, params).fetchall()
        finished = []
        for trajectory_id, group, split, status, finished_us, productive, policies, oldest, sampled in rows:
            self.outstanding.restore(
                trajectory_id,
                group,
                split,
                running=finished_us is None,
                given_up=status == "aborted",
                productive=productive,
                oldest=dict(zip(policies or (), oldest or (), strict=True)),
                sampled=sampled,
            )
            if finished_us is not None:
                finished.append((finished_us, trajectory_id))
        self.outstanding.finished_before(trajectory_id for _, trajectory_id in sorted(finished))

    def refresh(self) -> None:
        """Read what became durable since the last time."""
        head = self._store.head()
        self._take(self._store.events(head, self.cut))
        self.cut = head

    def _take(self, events: Iterable[Event]) -> None:
        """Take events, lanes one after the other; what trainers wrote is kept to the end."""
        trainers: defaultdict[str, list[Event]] = defaultdict(list)
        for event in events:
            record = event.record
            if event.run != self._run:
                continue
            if event.kind in _RARE:
                trainers[event.lane].append(event)
                continue
            self.outstanding.add(event)
            if isinstance(record, TrajectoryOpened):
                self._open[record.trajectory_id] = None
            elif isinstance(record, TrajectoryFinished):
                self._open.pop(record.trajectory_id, None)
        self._take_in_time(list(trainers.values()))

    def _take_rare(self) -> None:
        """Take what trainers wrote up to the cut, one event of each lane in memory at a time."""
        lanes = [{lane: count} for lane, count in sorted(self.cut.items())]
        self._take_in_time(
            [(e for e in self._store.events_of(_RARE, lane) if e.run == self._run) for lane in lanes]
        )

    def _take_in_time(self, lanes: Sequence[Iterable[Event]]) -> None:
        """Take events of trainers across lanes in the order of time; with them everything up to here is read.

        Args:
            lanes: of each its events, in order.
        """
        in_time = heapq.merge(*lanes, key=lambda event: event.event_id)
        self.outstanding.add_all(map(self._noted, in_time))

    def _noted(self, event: Event) -> Event:
        if event.kind in weight_log.KINDS:
            self.weights.append(event)
        if isinstance(event.record, SyncStarted | SyncFinished | SyncFailed):
            self.syncs.append(event.record)
        return event

    def open(self) -> Iterator[Trajectory]:
        """The open trajectories in the order they were opened, a few in memory at a time."""
        ids = iter(list(self._open))
        while some := list(islice(ids, TOGETHER)):
            trajectories = self._store.trajectories(self.cut, some)
            yield from (
                trajectories[trajectory_id] for trajectory_id in some if trajectory_id in trajectories
            )

    def ended(self) -> tuple[SealedNames, list[tuple[TrajectoryOpened, str]]]:
        """The names that were used before: sealed ones, and the openings and lanes of ended ones since."""
        hashes, ends = self._store.sealed_names()
        opened = [
            (event.record, event.lane)
            for event in self._store.events_of({TrajectoryOpened.KIND}, self.cut, ends)
            if event.run == self._run and isinstance(event.record, TrajectoryOpened)
        ]
        return SealedNames(self._run, hashes), [
            pair for pair in opened if pair[0].trajectory_id not in self._open
        ]


def restored(trajectory: Trajectory) -> Contents:
    """The contents of an open trajectory, as the proxy that recorded it holds them in memory."""
    contents = Contents()
    arrivals: dict[str, list[Turn]] = {}
    replaced = {turn.requested.wire.get("instead_of") for turn in trajectory.turns.values()}
    for turn in trajectory.turns.values():
        requested = turn.requested
        if (digest := requested.wire.get("digest")) and turn.turn_id not in replaced:
            arrivals.setdefault(f"{digest} {requested.request_id}", []).append(turn)
        if turn.completed is not None:
            items = trajectory.items(turn)
            contents.take(tree_turn(contents.tree, trajectory, turn), requested.request, items)
            contents.passed(turn.completed)
        if turn.delivered:
            contents.delivered.add(turn.turn_id)
    for key, turns in arrivals.items():
        done = [t.completed for t in turns if t.completed is not None]
        if len(done) == len(turns) and all(c.finish_reason != "abort" for c in done):
            contents.arrived(key.split()[0], tuple(t.turn_id for t in turns))
    return contents


def tree_turn(tree: TurnTree, trajectory: Trajectory, turn: Turn) -> TreeTurn:
    """A folded turn as a possible parent of later ones.

    Raises:
        CorruptionError: its prompt does not fold to the ids that were sent.
    """
    assert turn.completed is not None
    trajectory.prompt_ids(turn)
    messages, hashes = tree.known_part(trajectory.messages(turn))
    parent_id = turn.requested.parent_turn_id
    parent = None if parent_id is None else tree.by_id(parent_id)
    done = turn.completed
    return grown(
        turn.turn_id,
        turn.requested.context_key,
        messages,
        hashes,
        done.reply,
        parent,
        (done.prompt_ids, done.completion_ids),
        cut=STOP_STRING in done.flags,
    )
