"""Folds events into the catalog's rows, in any order of lanes, and again without a change.

A lane's own events come in order, but lanes have no common order, and the same event may be noted twice.
So a row never depends on which lane was read first: an attempt's status only rises, and what a publication
says of weights overrules an activation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from rollbook.store.catalog.tables import (
    COMMITTED,
    FAILED,
    PLANNED,
    RETIRED,
    UNKNOWN_ATTEMPT,
    Base,
    CheckpointRow,
    ConsumerRow,
    PolicyVersionRow,
    StepRow,
)
from rollbook.store.events import Event

Row = TypeVar("Row", bound=Base)
_RANK = {PLANNED: 0, FAILED: 1, COMMITTED: 2, RETIRED: 3}


def note(session: Session, event: Event) -> None:
    """Fold one event into the rows; a kind that `NOTED` does not name changes nothing."""
    fold = NOTED.get(event.kind)
    if fold is not None:
        fold(session, event, event.record)


def note_checkpoint(session: Session, run: str, record: Any) -> None:
    """Note a `checkpoint.written` record of a run."""
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


def _checkpoint(session: Session, event: Event, record: Any) -> None:
    note_checkpoint(session, event.run, record)


def _published(session: Session, event: Event, record: Any) -> None:
    row = _version(session, event, record)
    # A version that was published again, after a crash, is what the later one says.
    if row.published_us is None or event.time_us > row.published_us:
        row.published_us = event.time_us
        row.weights_digest, row.path = record.weights_digest, record.path


def _activated(session: Session, event: Event, record: Any) -> None:
    row = _version(session, event, record)
    if row.activated_us is None or event.time_us < row.activated_us:
        row.activated_us = event.time_us
        if row.published_us is None:
            row.weights_digest, row.path = record.weights_digest, record.path


def _version(session: Session, event: Event, record: Any) -> PolicyVersionRow:
    key = (event.run, record.policy, record.policy_version)
    row = session.get(PolicyVersionRow, key)
    return row or _add(
        session,
        PolicyVersionRow(
            run=event.run,
            policy=record.policy,
            policy_version=record.policy_version,
            weights_digest=record.weights_digest,
            path=record.path,
        ),
    )


def _cursor(session: Session, event: Event, record: Any) -> None:
    row = session.get(ConsumerRow, record.consumer)
    place = {"cut": record.cut, "moved_us": event.time_us, "lane": event.lane, "seq": event.seq}
    if row is None:
        _add(session, ConsumerRow(name=record.consumer, **place))
        return
    # Within a lane its order counts; between a consumer's lanes, one after the other, only time tells.
    if row.lane == event.lane:
        later = event.seq > row.seq
    else:
        later = (event.time_us, event.lane) > (row.moved_us, row.lane)
    if later:
        row.cut, row.moved_us, row.lane, row.seq = record.cut, event.time_us, event.lane, event.seq


def _planned(session: Session, event: Event, record: Any) -> None:
    row = _attempt(session, event, record, PLANNED)
    row.input_version, row.cut = record.policy_version, record.cut
    row.lane, row.seq = event.lane, event.seq


def _committed(session: Session, event: Event, record: Any) -> None:
    _attempt(session, event, record, COMMITTED).output_version = record.policy_version


def _failed(session: Session, event: Event, record: Any) -> None:
    _attempt(session, event, record, FAILED)


def _retired(session: Session, event: Event, record: Any) -> None:
    """A step is retired with all its attempts, those too whose events are noted later."""
    rows = _attempts(session, event, record)
    for row in rows:
        row.status = RETIRED
    if not rows:
        _add(
            session,
            StepRow(
                run=event.run,
                policy=record.policy,
                step=record.step,
                attempt=UNKNOWN_ATTEMPT,
                status=RETIRED,
            ),
        )


def _attempt(session: Session, event: Event, record: Any, status: str) -> StepRow:
    """The row of the record's attempt, its status at least this one."""
    row = session.get(StepRow, (event.run, record.policy, record.step, record.attempt))
    if row is None:
        others = _attempts(session, event, record)
        for other in others:
            if other.status == RETIRED:
                status = RETIRED
            if other.attempt == UNKNOWN_ATTEMPT:
                session.delete(other)
        row = _add(
            session,
            StepRow(
                run=event.run,
                policy=record.policy,
                step=record.step,
                attempt=record.attempt,
                status=status,
            ),
        )
    if _RANK[status] > _RANK[row.status]:
        row.status = status
    return row


def _attempts(session: Session, event: Event, record: Any) -> list[StepRow]:
    query = select(StepRow).where(
        StepRow.run == event.run, StepRow.policy == record.policy, StepRow.step == record.step
    )
    return list(session.scalars(query))


def _add(session: Session, row: Row) -> Row:
    session.add(row)
    session.flush()  # so that `get` finds it
    return row


NOTED: Mapping[str, Callable[[Session, Event, Any], None]] = {
    "checkpoint.written": _checkpoint,
    "policy.published": _published,
    "policy.activated": _activated,
    "cursor.moved": _cursor,
    "step.planned": _planned,
    "step.committed": _committed,
    "step.failed": _failed,
    "step.retired": _retired,
}
"""Kind -> how it is folded."""
