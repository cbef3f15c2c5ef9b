"""Kinds of events about the log itself: stored bodies, consumer cursors, removals and erasures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollbook.store.events.about import About, Record, marked


@dataclass(frozen=True, slots=True)
class BodyStored(Record, kind="body.stored", about=About(text={"body": marked})):
    """A large JSON value that requests of this segment name by its digest (see `events.blobs`)."""

    digest: str
    body: Any


@dataclass(frozen=True, slots=True)
class CursorMoved(Record, kind="cursor.moved"):
    """A consumer has processed every event of this cut (`lane=count,...`); `by` names the API key that moved
    it."""

    consumer: str
    cut: str
    by: str | None = None


@dataclass(frozen=True, slots=True)
class SegmentDropped(Record, kind="segment.dropped", about=About(lasting=True)):
    """Retention removed segments `first_segment..last_segment` of `of_lane`, with these events."""

    of_lane: str
    first_segment: int
    last_segment: int
    first_seq: int
    next_seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentRepaired(Record, kind="segment.repaired"):
    """The WAL file of segment `segment` of `of_lane` was damaged: `damage` says how.

    It was removed, since sealed unit `unit` holds its events, `first_seq` to `next_seq`, and was whole.
    """

    of_lane: str
    segment: int
    unit: str
    first_seq: int
    next_seq: int
    damage: str


@dataclass(frozen=True, slots=True)
class EventOrphaned(Record, kind="event.orphaned", about=About(of="trajectory", text={"event": marked})):
    """Event `of_seq` of `of_lane` was behind the end that another host gave that lane: it counts for nothing.

    `event` is all of it, as `rollbook tail --json` prints events.
    """

    trajectory_id: str | None
    of_lane: str
    of_seq: int
    event: Any


@dataclass(frozen=True, slots=True)
class TrajectoryErased(Record, kind="trajectory.erased", about=About(lasting=True)):
    """The text of a trajectory was removed from every sealed file; its ids too unless `tokens_kept`."""

    trajectory_id: str
    tokens_kept: bool
    reason: str
    events: int
