"""A run's trajectories read back from the log, by a proxy that starts again."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace

from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.ingest.engines import weight_log
from rollbook.ingest.live import LiveTrajectory
from rollbook.ingest.reply import STOP_STRING
from rollbook.ingest.tokens.tree import TreeTurn, TurnTree, grown
from rollbook.store import Store
from rollbook.store.events import (
    QUARANTINE,
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
from rollbook.store.trajectory import Trajectory, Turn

_OF_TRAINERS = (RunOpened, StepPlanned, StepCommitted, SampleDropped, SyncStarted, SyncFinished, SyncFailed)


class RunReader:
    """Which trajectories of a run there are, and the open ones whole.

    Attributes:
        outstanding: those that wait to be trained on.
        syncs: what became of engines' weights.
        weights: all that says which weights are which version.
        cut: how far it has read.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.opened: dict[str, tuple[TrajectoryOpened, str]] = {}
        self.outstanding = Outstanding(run)
        self.syncs: list[SyncStarted | SyncFinished | SyncFailed] = []
        self.weights: list[Event] = []
        self._store, self._run = store, run
        self._finished: set[str] = set()
        self.cut: dict[str, int] = {}
        self._open: list[Trajectory] = []
        self.refresh()

    def refresh(self) -> None:
        """Read what became durable since the last time.

        Lanes are read one after the other, so that little is in memory at once. What trainers wrote is kept
        to the end: trainings and syncs follow each other across lanes.
        """
        head = self._store.head()
        trainers: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self._store.events(head, self.cut):
            record = event.record
            if event.run != self._run:
                continue
            if event.kind in weight_log.KINDS:
                self.weights.append(event)
            if isinstance(record, _OF_TRAINERS):
                trainers[event.lane].append(_slim(event))
                continue
            self.outstanding.add(event)
            if isinstance(record, TrajectoryOpened):
                self.opened[record.trajectory_id] = (record, event.lane)
            elif isinstance(record, TrajectoryFinished):
                self._finished.add(record.trajectory_id)
        in_time = list(heapq.merge(*trainers.values(), key=lambda event: event.event_id))
        self.outstanding.add_all(in_time)  # with them, that was all up to the head
        kinds = SyncStarted | SyncFinished | SyncFailed
        self.syncs += [event.record for event in in_time if isinstance(event.record, kinds)]
        self.cut = head
        ids = set(self.opened) - self._finished
        self._open = list(self._store.trajectories(head, ids).values()) if ids else []

    def open(self) -> list[Trajectory]:
        """Those that are not finished."""
        return self._open


def _slim(event: Event) -> Event:
    """The event, of a plan no more than which trajectories it uses: plans are large, and a run has many."""
    record = event.record
    if not isinstance(record, StepPlanned):
        return event
    used = [{"trajectory_id": sample["trajectory_id"]} for sample in record.samples]
    bare = replace(record, samples=used, partition=[], recipe={}, input_digests={}, environment={})
    return replace(event, record=bare)


def restored(trajectory: Trajectory, lane: str, tips: dict[bytes, LiveTrajectory]) -> LiveTrajectory:
    """An open trajectory as it was in the memory of the proxy that recorded it.

    Args:
        tips: where one that is quarantined says how far it goes.
    """
    quarantined = trajectory.opened.split == QUARANTINE
    live = LiveTrajectory(trajectory.opened, lane, tips=tips if quarantined else None)
    arrivals: dict[str, list[Turn]] = {}
    replaced = {turn.requested.wire.get("instead_of") for turn in trajectory.turns.values()}
    for turn in trajectory.turns.values():
        asked = turn.requested
        if (digest := asked.wire.get("digest")) and turn.turn_id not in replaced:
            arrivals.setdefault(f"{digest} {asked.request_id}", []).append(turn)
        if turn.completed is not None:
            live.take(tree_turn(live.tree, trajectory, turn))
            live.passed(turn.completed)
            items = trajectory.items(turn)
            if items is not None:
                live.items[turn.turn_id] = items
                live.requests[turn.turn_id] = asked.request
        if turn.delivered:
            live.delivered.add(turn.turn_id)
    for key, turns in arrivals.items():
        done = [t.completed for t in turns if t.completed is not None]
        if len(done) == len(turns) and all(c.finish_reason != "abort" for c in done):
            live.arrived(key.split()[0], tuple(t.turn_id for t in turns))
    return live


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
