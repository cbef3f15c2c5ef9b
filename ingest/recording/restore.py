"""Reads a run's trajectories back from the log: after a restart, or where contents were dropped from
memory.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.engines.weights import log as weight_log
from rollbook.ingest.admission.outstanding import LOOSE_KEPT, TRAINABLE, Outstanding, used_by
from rollbook.ingest.tokens.tree import TreeTurn, TurnTree, grown
from rollbook.ingest.trajectories.live import Contents
from rollbook.ingest.trajectories.registry import SealedNames
from rollbook.ingest.turns.reply import STOP_STRING
from rollbook.store import Store
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
from rollbook.store.fold.standings import Drop, Plan, latest, running, unused
from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.store.sealed.derived import STANDING_SCHEMA

TOGETHER = 64
"""Open trajectories that are read together."""
_RARE = weight_log.KINDS | {r.KIND for r in (RunOpened, StepPlanned, StepCommitted, SampleDropped)}
"""Kinds of what trainers write, and of syncs: their events follow each other across lanes."""
_RESTORED = (
    "trajectory_id",
    "group",
    "split",
    "finished",
    "status",
    "productive",
    "policies",
    "oldest",
    "sampled",
)
_BY_END = [("finished", "ascending"), ("trajectory_id", "ascending")]

_Trained = Event | Plan | Drop


class RunReader:
    """Which trajectories of a run are open, which are outstanding, and what trainings and syncs there were.

    What was derived of sealed units is not read from events, so that a start takes as long as what is open,
    and not as long as the log.

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
        known = STANDING_SCHEMA.empty_table()
        if any(self.cut.values()):  # a query takes as long as all the rest of a start, also of nothing
            known = store.standings(run, self.cut)
        self._open = dict.fromkeys(running(known))
        known = latest(known, TRAINABLE, LOOSE_KEPT)
        ids = known["trajectory_id"]
        trainers = list(_in_time([self._rare(lane, count, ids) for lane, count in sorted(self.cut.items())]))
        self._take_standings(known, used_by(run, trainers))
        self._take_in_time(trainers)

    def _take_standings(self, known: pa.Table, used: set[str]) -> None:
        """Take which trajectories are outstanding, by how far the log says they have come.

        Args:
            used: those that trainers used or dropped, which need not be taken.
        """
        rows = unused(known, used)
        columns = (rows[name].to_pylist() for name in _RESTORED)
        for trajectory_id, group, split, ended, status, productive, policies, oldest, sampled in zip(
            *columns, strict=True
        ):
            self.outstanding.restore(
                *(trajectory_id, group, split),
                running=ended is None,
                given_up=status == "aborted",
                productive=productive,
                oldest=dict(zip(policies, oldest, strict=True)),
                sampled=sampled,
            )
        over = rows.filter(pc.is_valid(rows["finished"])).sort_by(_BY_END)
        self.outstanding.finished_before(over["trajectory_id"].to_pylist())

    def _rare(self, lane: str, count: int, among: pa.ChunkedArray) -> Iterable[_Trained]:
        """What trainers wrote up to the cut in a lane, in order; of sealed uses only those of these
        trajectories."""
        uses, sealed = self._store.sealed_uses(self._run, lane, count, among)
        others = self._store.events_of(_RARE - {StepPlanned.KIND, SampleDropped.KIND}, {lane: sealed})
        both = heapq.merge(uses, (e for e in others if e.run == self._run), key=lambda event: event.seq)
        live = self._store.events_of(_RARE, {lane: count}, {lane: sealed})
        return chain(both, (e for e in live if e.run == self._run))

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
        self._take_in_time(_in_time(list(trainers.values())))

    def _take_in_time(self, trainers: Iterable[_Trained]) -> None:
        """Take what trainers wrote, in the order of time; with it everything up to here is read."""
        self.outstanding.add_all(map(self._noted, trainers))

    def _noted(self, event: _Trained) -> _Trained:
        if not isinstance(event, Event):
            return event
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


def _in_time(lanes: Sequence[Iterable[_Trained]]) -> Iterator[_Trained]:
    """Events across lanes in the order of time; of each lane they are given in its order."""
    return heapq.merge(*lanes, key=lambda event: event.event_id)


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
