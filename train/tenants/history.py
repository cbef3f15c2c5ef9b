"""The operations of a log, and one with its body."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollbook.store import Store
from rollbook.store.events import (
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


def fold_operations(log: Store) -> Operations:
    """What clients asked so far."""
    operations = Operations()
    for event in log.events_of(KINDS):
        operations.add(event.record, (event.lane, event.seq), event.time_us)
    return operations


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
