"""Reads a run's trajectories back from the log: after a restart, or where contents were dropped from
memory."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from rollbook.ingest.admission.outstanding import Outstanding
from rollbook.ingest.engines.weights import log as weight_log
from rollbook.ingest.tokens.tree import TreeTurn, TurnTree, grown
from rollbook.ingest.trajectories.live import Contents
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
from rollbook.store.fold.trajectory import Trajectory, Turn

TOGETHER = 64
"""Open trajectories that are read together."""
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
        self.outstanding.add_all(in_time)  # with these, everything up to the head is read
        kinds = SyncStarted | SyncFinished | SyncFailed
        self.syncs += [event.record for event in in_time if isinstance(event.record, kinds)]
        self.cut = head

    def open(self) -> Iterator[Trajectory]:
        """The open trajectories in the order they were opened, a few in memory at a time."""
        ids = iter([trajectory_id for trajectory_id in self.opened if trajectory_id not in self._finished])
        while some := list(islice(ids, TOGETHER)):
            found = self._store.trajectories(self.cut, some)
            yield from (found[trajectory_id] for trajectory_id in some if trajectory_id in found)

    def ended(self) -> Iterator[tuple[TrajectoryOpened, str]]:
        """The openings of finished trajectories, and their lanes."""
        return (opened for trajectory_id, opened in self.opened.items() if trajectory_id in self._finished)

    def forget(self) -> None:
        """Drop what is kept of single trajectories, once the recorder has restored them."""
        self.opened, self._finished = {}, set()


def _slim(event: Event) -> Event:
    """The event; of a plan only which trajectories it uses, since plans are large and a run has many."""
    record = event.record
    if not isinstance(record, StepPlanned):
        return event
    used = [{"trajectory_id": sample["trajectory_id"]} for sample in record.samples]
    bare = replace(record, samples=used, partition=[], recipe={}, input_digests={}, environment={})
    return replace(event, record=bare)


def restored(trajectory: Trajectory) -> Contents:
    """The contents of an open trajectory, as the proxy that recorded it holds them in memory."""
    contents = Contents()
    arrivals: dict[str, list[Turn]] = {}
    replaced = {turn.requested.wire.get("instead_of") for turn in trajectory.turns.values()}
    for turn in trajectory.turns.values():
        asked = turn.requested
        if (digest := asked.wire.get("digest")) and turn.turn_id not in replaced:
            arrivals.setdefault(f"{digest} {asked.request_id}", []).append(turn)
        if turn.completed is not None:
            items = trajectory.items(turn)
            contents.take(tree_turn(contents.tree, trajectory, turn), asked.request, items)
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
