"""The operations of a log, and those with their bodies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def wholes(log: Store, operations: Sequence[Operation]) -> Iterator[OperationAccepted]:
    """Operations with their bodies, in this order, by one reading of the log. Few are in memory at once, if
    they came in about that order."""
    seqs: dict[str, list[int]] = {}
    for operation in operations:
        if operation.ended is not None:
            lane, seq = operation.accepted_at
            seqs.setdefault(lane, []).append(seq)
    places = {(lane, seq) for lane, own in seqs.items() for seq in own}
    start, cut = ({lane: at(own) for lane, own in seqs.items()} for at in (min, max))
    came = log.events_of({OperationAccepted.KIND}, {lane: seq + 1 for lane, seq in cut.items()}, start)
    early: dict[Place, Any] = {}
    for operation in operations:
        if operation.ended is None:
            yield operation.accepted
            continue
        while operation.accepted_at not in early:
            event = next(came)
            if (place := (event.lane, event.seq)) in places:
                early[place] = event.record
        yield replace(operation.accepted, body=early.pop(operation.accepted_at).body)
