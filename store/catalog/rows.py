"""Reads and writes the catalog's rows of lanes, segments, units and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from rollbook.store.catalog.tables import (
    CLOSED,
    DROPPED,
    OPEN,
    SEALED,
    CheckpointRow,
    LaneRow,
    SegmentRow,
    UnitRow,
    as_dict,
)
from rollbook.store.events import CheckpointWritten
from rollbook.store.sealed.unit import Unit


def find_lane(session: Session, lane: str) -> LaneRow:
    """The lane's row, made where it is not yet known."""
    row = session.get(LaneRow, lane)
    if row is None:
        row = LaneRow(name=lane)
        session.add(row)
        session.flush()
    return row


def write_segment(
    session: Session,
    lane: str,
    number: int,
    first_seq: int,
    events: int | None = None,
    bytes_: int | None = None,
) -> None:
    """Note a segment that is in no unit: closed, or open where its size is not given."""
    row = session.get(SegmentRow, (lane, number))
    if row is not None and row.state in (SEALED, DROPPED):
        return
    state = OPEN if events is None else CLOSED
    session.merge(
        SegmentRow(
            lane=lane, number=number, first_seq=first_seq, events=events, bytes=bytes_, state=state, unit=None
        )
    )


def write_units(session: Session, lane: str, units: Iterable[Unit]) -> None:
    """Replace the lane's units by these, and update the states of its segments accordingly."""
    units = list(units)
    find_lane(session, lane)
    known = {row.name: row for row in session.scalars(select(UnitRow).where(UnitRow.lane == lane))}
    current = {unit.name: _unit_row(lane, unit) for unit in units}
    for name in known.keys() - current.keys():
        # Its segments are in another unit now, which the loop below notes; if in none, they are only closed.
        session.execute(
            update(SegmentRow)
            .where(SegmentRow.lane == lane, SegmentRow.unit == name)
            .values(state=CLOSED, unit=None)
        )
        session.execute(delete(UnitRow).where(UnitRow.lane == lane, UnitRow.name == name))
    for unit in units:
        row = current[unit.name]
        if unit.name in known and as_dict(known[unit.name]) == as_dict(row):
            continue
        session.merge(row)
        for segment in unit.segments:
            session.merge(
                SegmentRow(
                    lane=lane,
                    number=segment.number,
                    first_seq=segment.first_seq,
                    events=segment.events,
                    bytes=segment.bytes,
                    state=SEALED if unit.dropped_us is None else DROPPED,
                    unit=unit.name,
                )
            )


def write_checkpoint(session: Session, run: str, record: CheckpointWritten) -> None:
    """Record a checkpoint of a run; an earlier row of the same path is replaced."""
    session.merge(
        CheckpointRow(
            path=record.path,
            run=run,
            policy=record.policy,
            policy_version=record.policy_version,
            weights_digest=record.weights_digest,
            bytes=record.bytes,
        )
    )


def delete_checkpoint(session: Session, run: str, path: str) -> None:
    """Delete the row of a checkpoint that was removed."""
    session.execute(delete(CheckpointRow).where(CheckpointRow.run == run, CheckpointRow.path == path))


def _unit_row(lane: str, unit: Unit) -> UnitRow:
    return UnitRow(
        lane=lane,
        name=unit.name,
        first_segment=unit.first,
        last_segment=unit.last,
        generation=unit.generation,
        first_seq=unit.first_seq,
        next_seq=unit.next_seq,
        bytes=unit.bytes,
        remote=unit.remote,
        sealed_us=unit.sealed_us,
        dropped_us=unit.dropped_us,
        chain=unit.chain,
    )
