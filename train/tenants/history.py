"""The operations of a log, and one with its body."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

from rollbook.store import Event, Store
from rollbook.store.cut import Cut
from rollbook.store.events import (
    LaneOrdered,
    OperationAccepted,
    OperationEnded,
    SamplerOpened,
    SessionEnded,
    SessionOpened,
    WeightsChanged,
    WeightsCopied,
    WeightsFreed,
)
from rollbook.train.tenants.operations import Operation, Operations, Place

KINDS = frozenset(
    kind.KIND
    for kind in (
        *(SessionOpened, SessionEnded, SamplerOpened, OperationAccepted, OperationEnded),
        *(WeightsChanged, WeightsCopied, WeightsFreed),
    )
)


def fold_operations(log: Store, cut: Cut | None = None) -> Operations:
    """What clients asked in the cut (default: head)."""
    operations = Operations()
    for event in events_of_clients(log, cut):
        operations.add(event.record, (event.lane, event.seq), event.time_us)
    return operations


def events_of_clients(log: Store, cut: Cut | None = None) -> Iterator[Event]:
    """The events about clients in the cut (default: head), in the order in which they count."""
    lanes = sorted((log.head() if cut is None else cut).items())
    for _, event in heapq.merge(*(_placed(log, lane, end) for lane, end in lanes), key=itemgetter(0)):
        yield event


def _placed(log: Store, lane: str, end: int) -> Iterator[tuple[int, Event]]:
    """(position, event) of a lane, in order; 0 where no position was noted before."""
    position = 0
    for event in log.events_of(KINDS | {LaneOrdered.KIND}, {lane: end}):
        if isinstance(event.record, LaneOrdered):
            position = event.record.position
        else:
            yield position, event


def last_position(log: Store, cut: Cut) -> int:
    """The last position that was noted in a cut; 0 for none."""
    noted = (event.record for event in log.events_of([LaneOrdered.KIND], cut))
    return max((record.position for record in noted if isinstance(record, LaneOrdered)), default=0)


def record_at(log: Store, place: Place) -> Any:
    """The record at a place of the log."""
    lane, seq = place
    (event,) = log.events({lane: seq + 1}, {lane: seq})
    return event.record


def whole(log: Store, operation: Operation) -> OperationAccepted:
    """An operation with its body."""
    if operation.ended is None:
        return operation.accepted
    accepted = record_at(log, operation.accepted_at)
    assert isinstance(accepted, OperationAccepted)
    return replace(operation.accepted, body=accepted.body)
