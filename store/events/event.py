"""The envelope that every event travels in, and the union of all records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollbook.store.events.about import About
from rollbook.store.events.rollouts import (
    LabelAdded,
    LaunchEnded,
    LaunchLeaked,
    LaunchStarted,
    PreferenceAdded,
    RewardAssigned,
    RunOpened,
    TrajectoryAdopted,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    TurnRequested,
)
from rollbook.store.events.training import (
    CheckpointRemoved,
    CheckpointWritten,
    EngineControlled,
    EvalFinished,
    EvalSampled,
    EvalStarted,
    PolicyActivated,
    PolicyPublished,
    SampleDropped,
    StepAbandoned,
    StepCommitted,
    StepFailed,
    StepPlanned,
    StepRetired,
    StepVectors,
    StopFired,
    SyncFailed,
    SyncFinished,
    SyncStarted,
)
from rollbook.store.events.upkeep import (
    BodyStored,
    CursorMoved,
    SegmentDropped,
    SegmentRepaired,
    TrajectoryErased,
)
from rollbook.store.ids import new_id, now_us

Record = (
    RunOpened
    | TrajectoryOpened
    | TrajectoryFinished
    | TurnRequested
    | TurnCompleted
    | TurnFailed
    | TurnDelivered
    | RewardAssigned
    | PolicyPublished
    | PolicyActivated
    | CheckpointWritten
    | SampleDropped
    | StepPlanned
    | StepCommitted
    | StepFailed
    | StepRetired
    | SyncStarted
    | SyncFinished
    | SyncFailed
    | BodyStored
    | CursorMoved
    | SegmentDropped
    | TrajectoryErased
    | TrajectoryAdopted
    | LabelAdded
    | EngineControlled
    | StepAbandoned
    | SegmentRepaired
    | PreferenceAdded
    | EvalFinished
    | StopFired
    | StepVectors
    | CheckpointRemoved
    | LaunchStarted
    | LaunchEnded
    | LaunchLeaked
    | EvalStarted
    | EvalSampled
)

RECORDS: Mapping[str, type[Any]] = {record.KIND: record for record in Record.__args__}
"""Kind -> record type."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """A record in its envelope. `lane` and `seq` are empty until the event is appended."""

    record: Record
    run: str
    event_id: str = field(default_factory=new_id)
    time_us: int = field(default_factory=now_us)
    lane: str = ""
    seq: int = -1

    @property
    def kind(self) -> str:
        """The record's kind, as stored."""
        return self.record.KIND


def about(kind: str) -> About:
    """The properties of a kind; the defaults for a kind that this release does not know."""
    record = RECORDS.get(kind)
    return About() if record is None else record.ABOUT


def kinds_where(said: Callable[[About], object]) -> list[str]:
    """The kinds of which `said` holds."""
    return [kind for kind, record in RECORDS.items() if said(record.ABOUT)]
