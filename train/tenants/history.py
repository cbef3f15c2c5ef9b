"""The operations of a log, and those with their bodies."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True)
class Folded:
    """What clients asked in a cut.

    Attributes:
        positions: of each lane, the last one that was noted in it.
    """

    operations: Operations = field(default_factory=Operations)
    cut: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Fold the next event of a lane."""
        if isinstance(event.record, LaneOrdered):
            self.positions[event.lane] = event.record.position
        self.operations.add(event.record, (event.lane, event.seq), event.time_us)
        self.cut[event.lane] = event.seq + 1


def fold_operations(log: Store, cut: Cut | None = None, start: Folded | None = None) -> Folded:
    """What clients asked in the cut (default: head).

    Args:
        start: of a cut before it, which becomes that of this one.
    """
    folded, end = start or Folded(), log.head() if cut is None else cut
    for event in events_of_clients(log, end, folded):
        folded.add(event)
    folded.cut = {**end}
    return folded


def events_of_clients(log: Store, cut: Cut | None = None, start: Folded | None = None) -> Iterator[Event]:
    """The events about clients in the cut (default: head) and not in `start`, in the order in which they
    count, and those that note their positions."""
    begin, end = start or Folded(), sorted((log.head() if cut is None else cut).items())
    lanes = [_placed(log, lane, stop, begin) for lane, stop in end]
    for _, event in heapq.merge(*lanes, key=itemgetter(0)):
        yield event


def _placed(log: Store, lane: str, stop: int, begin: Folded) -> Iterator[tuple[int, Event]]:
    """(position, event) of a lane, in order; 0 where no position was noted before."""
    position, start = begin.positions.get(lane, 0), begin.cut.get(lane, 0)
    for event in log.events_of(KINDS | {LaneOrdered.KIND}, {lane: stop}, {lane: start}):
        if isinstance(event.record, LaneOrdered):
            position = event.record.position
        yield position, event


def last_position(log: Store, cut: Cut, start: Folded) -> int:
    """The last position that was noted in a cut; 0 for none.

    Args:
        start: of a cut before it.
    """
    later = log.events_of([LaneOrdered.KIND], cut, {**start.cut})
    noted = (event.record.position for event in later if isinstance(event.record, LaneOrdered))
    return max([*start.positions.values(), *noted], default=0)


def event_at(log: Store, place: Place) -> Event:
    """The event at a place of the log."""
    lane, seq = place
    (event,) = log.events({lane: seq + 1}, {lane: seq})
    return event


def record_at(log: Store, place: Place) -> Any:
    """The record at a place of the log."""
    return event_at(log, place).record


def older_request(log: Store, request_id: str) -> Operation | None:
    """A request that came and ended long ago, by the log alone; None: it never came. It reads all of it."""
    known: Operation | None = None
    for event in events_of_clients(log):
        record, place = event.record, (event.lane, event.seq)
        if isinstance(record, OperationAccepted) and record.request_id == request_id:
            known = Operation(record, place)
        elif isinstance(record, OperationEnded) and record.request_id == request_id:
            assert known is not None
            known.end(record, place)
    return known


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
