"""Folds events into the catalog's rows, in any order of lanes, and again without a change.

A lane's own events come in order, but lanes have no common order, and the same event may be noted twice.
So a row never depends on which lane was read first: an attempt's status only rises, and what a publication
says of weights overrules an activation's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from rollbook.store.catalog.tables import (
    ABANDONED,
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

R = TypeVar("R", bound=Base)
_RANK = {PLANNED: 0, FAILED: 1, COMMITTED: 2, ABANDONED: 3, RETIRED: 4}


class Rows:
    """The rows that events are folded into. Each is read at most once; the session writes them at its end.

    Args:
        empty: the tables hold nothing yet, so that nothing needs to be read.
    """

    def __init__(self, session: Session, *, empty: bool = False) -> None:
        self._session, self._empty = session, empty
        self._found: dict[tuple[Any, ...], Any] = {}
        self._steps: dict[tuple[str, str, int], dict[int, StepRow]] = {}

    def get(self, table: type[R], *key: Any) -> R | None:
        """The row with this key, or None."""
        place = (table, *key)
        if place not in self._found:
            self._found[place] = None if self._empty else self._session.get(table, key)
        row: R | None = self._found[place]
        return row

    def add(self, row: R, *key: Any) -> R:
        """Take in a new row, whose key this is."""
        self._session.add(row)
        self._found[type(row), *key] = row
        return row

    def attempts(self, run: str, policy: str, step: int) -> dict[int, StepRow]:
        """Rows of a step, by attempt."""
        place = (run, policy, step)
        if place not in self._steps:
            query = select(StepRow).where(StepRow.run == run, StepRow.policy == policy, StepRow.step == step)
            rows: Iterable[StepRow] = [] if self._empty else self._session.scalars(query)
            self._steps[place] = {row.attempt: row for row in rows}
        return self._steps[place]

    def begin_attempt(self, run: str, policy: str, step: int, attempt: int, status: str) -> StepRow:
        """A new attempt at a step."""
        row = StepRow(run=run, policy=policy, step=step, attempt=attempt, status=status)
        self._session.add(row)
        self.attempts(run, policy, step)[attempt] = row
        return row

    def forget_attempt(self, row: StepRow) -> None:
        """Take a row away again."""
        del self.attempts(row.run, row.policy, row.step)[row.attempt]
        if row in self._session.new:
            self._session.expunge(row)
        else:
            self._session.delete(row)


def note(rows: Rows, event: Event) -> None:
    """Fold one event into the rows; a kind that `NOTED` does not name changes nothing."""
    fold = NOTED.get(event.kind)
    if fold is not None:
        fold(rows, event, event.record)


def checkpoint_row(rows: Rows, run: str, record: Any) -> None:
    """Note a `checkpoint.written` record of a run."""
    row = rows.get(CheckpointRow, record.path) or rows.add(CheckpointRow(path=record.path), record.path)
    row.run, row.policy, row.policy_version = run, record.policy, record.policy_version
    row.weights_digest, row.bytes = record.weights_digest, record.bytes


def _checkpoint(rows: Rows, event: Event, record: Any) -> None:
    checkpoint_row(rows, event.run, record)


def _published(rows: Rows, event: Event, record: Any) -> None:
    row = _version(rows, event, record)
    # A version that was published again, after a crash, is what the later one says.
    if row.published_us is None or event.time_us > row.published_us:
        row.published_us = event.time_us
        row.weights_digest, row.path = record.weights_digest, record.path


def _activated(rows: Rows, event: Event, record: Any) -> None:
    row = _version(rows, event, record)
    if row.activated_us is None or event.time_us < row.activated_us:
        row.activated_us = event.time_us
        if row.published_us is None:
            row.weights_digest, row.path = record.weights_digest, record.path


def _version(rows: Rows, event: Event, record: Any) -> PolicyVersionRow:
    key = (event.run, record.policy, record.policy_version)
    row = rows.get(PolicyVersionRow, *key)
    if row is None:
        row = PolicyVersionRow(run=key[0], policy=key[1], policy_version=key[2])
        row.weights_digest, row.path = record.weights_digest, record.path
        rows.add(row, *key)
    return row


def _cursor(rows: Rows, event: Event, record: Any) -> None:
    row = rows.get(ConsumerRow, record.consumer)
    if row is None:
        row = rows.add(ConsumerRow(name=record.consumer), record.consumer)
        later = True
    elif row.lane == event.lane:
        later = event.seq > row.seq
    else:
        # Between a consumer's lanes, one after the other, only time tells.
        later = (event.time_us, event.lane) > (row.moved_us, row.lane)
    if later:
        row.cut, row.moved_us, row.lane, row.seq = record.cut, event.time_us, event.lane, event.seq


def _planned(rows: Rows, event: Event, record: Any) -> None:
    row = _attempt(rows, event, record, PLANNED)
    row.input_version, row.cut = record.policy_version, record.cut
    row.lane, row.seq = event.lane, event.seq


def _committed(rows: Rows, event: Event, record: Any) -> None:
    _attempt(rows, event, record, COMMITTED).output_version = record.policy_version


def _failed(rows: Rows, event: Event, record: Any) -> None:
    _attempt(rows, event, record, FAILED)


def _abandoned(rows: Rows, event: Event, record: Any) -> None:
    _attempt(rows, event, record, ABANDONED).output_version = record.policy_version


def _retired(rows: Rows, event: Event, record: Any) -> None:
    """A step is retired with all its attempts, those too whose events are noted later."""
    attempts = rows.attempts(event.run, record.policy, record.step)
    for row in attempts.values():
        row.status = RETIRED
    if not attempts:
        rows.begin_attempt(event.run, record.policy, record.step, UNKNOWN_ATTEMPT, RETIRED)


def _attempt(rows: Rows, event: Event, record: Any, status: str) -> StepRow:
    """The row of the record's attempt, its status at least this one."""
    attempts = rows.attempts(event.run, record.policy, record.step)
    if any(other.status == RETIRED for other in attempts.values()):
        status = RETIRED
    if UNKNOWN_ATTEMPT in attempts:
        rows.forget_attempt(attempts[UNKNOWN_ATTEMPT])
    row = attempts.get(record.attempt)
    if row is None:
        return rows.begin_attempt(event.run, record.policy, record.step, record.attempt, status)
    if _RANK[status] > _RANK[row.status]:
        row.status = status
    return row


NOTED: Mapping[str, Callable[[Rows, Event, Any], None]] = {
    "checkpoint.written": _checkpoint,
    "policy.published": _published,
    "policy.activated": _activated,
    "cursor.moved": _cursor,
    "step.planned": _planned,
    "step.committed": _committed,
    "step.failed": _failed,
    "step.abandoned": _abandoned,
    "step.retired": _retired,
}
"""Kind -> how it is folded."""
