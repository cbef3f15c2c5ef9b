"""The kinds of events, one frozen record each, and the envelope they travel in.

An event is one immutable fact. Its record says what happened; the envelope holds the run, the time and the
event id. The log assigns `lane` and `seq`, the event's position, on append.

Fields named in `events.schema.COLUMNS` become typed columns; all others go to the JSON column `extra`.
Token ids are int32 arrays and logprobs float32 arrays, one-dimensional.
"""

from rollbook.store.events.event import RECORDS, Event, Record
from rollbook.store.events.rollouts import (
    QUARANTINE,
    SPLITS,
    Json,
    LabelAdded,
    Logprobs,
    PreferenceAdded,
    RewardAssigned,
    RunOpened,
    TokenIds,
    TrajectoryAdopted,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnFailed,
    TurnRequested,
    VersionSpan,
    token_ids,
)
from rollbook.store.events.training import (
    CheckpointWritten,
    EngineControlled,
    EvalFinished,
    PolicyActivated,
    PolicyPublished,
    SampleDropped,
    StepAbandoned,
    StepCommitted,
    StepFailed,
    StepPlanned,
    StepRetired,
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

__all__ = [
    "QUARANTINE",
    "RECORDS",
    "SPLITS",
    "BodyStored",
    "CheckpointWritten",
    "CursorMoved",
    "EngineControlled",
    "EvalFinished",
    "Event",
    "Json",
    "LabelAdded",
    "Logprobs",
    "PolicyActivated",
    "PolicyPublished",
    "PreferenceAdded",
    "Record",
    "RewardAssigned",
    "RunOpened",
    "SampleDropped",
    "SegmentDropped",
    "SegmentRepaired",
    "StepAbandoned",
    "StepCommitted",
    "StepFailed",
    "StepPlanned",
    "StepRetired",
    "StopFired",
    "SyncFailed",
    "SyncFinished",
    "SyncStarted",
    "TokenIds",
    "TrajectoryAdopted",
    "TrajectoryErased",
    "TrajectoryFinished",
    "TrajectoryOpened",
    "TurnCompleted",
    "TurnDelivered",
    "TurnFailed",
    "TurnRequested",
    "VersionSpan",
    "token_ids",
]
