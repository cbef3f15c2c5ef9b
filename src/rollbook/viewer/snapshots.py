"""The log as pages see it: a connection at a recent cut, which requests share.

A connection costs more than most queries, so that one serves all requests until the log has grown and it is
a moment old. Requests that still read an older one keep it until they are done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.compute as pc

from rollbook.lineage.line import Line, Lines, read_line
from rollbook.store import Store
from rollbook.store.cut import Cut, format_cut
from rollbook.store.events import Event, codec
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection

FRESH_S = 1.0
"""A page may show the log as it was so long ago."""
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Snapshot:
    """The log at a cut.

    Attributes:
        readers: requests that read it now.
        checked_s: when the log was last seen not to have grown beyond it, by the monotonic clock.
    """

    store: Store
    cut: Cut
    connection: Connection
    readers: int = 0
    checked_s: float = field(default_factory=time.monotonic)
    _answers: dict[tuple[Any, ...], Future[Any]] = field(default_factory=dict)

    def rows(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        """The rows of a query, each by the names of its columns.

        Args:
            parameters: the values of `$name` in the query.
        """
        with self.connection.cursor() as cursor:
            cursor.execute(query, parameters)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def row(self, query: str, **parameters: Any) -> dict[str, Any] | None:
        """The first row of a query, if it has one."""
        return next(iter(self.rows(query, **parameters)), None)

    def events(self, where: str, **parameters: Any) -> list[Event]:
        """The events of a condition, in no order; not of turns' requests and replies, which are most
        of a log."""
        with self.connection.cursor() as cursor:
            query = f"SELECT * FROM internal.mark_events WHERE {where}"
            table = cursor.sql(query, params=parameters).to_arrow_table()
        lanes = table["lane"].unique().to_pylist()
        batches = (
            (lane, batch)
            for lane in lanes
            for batch in table.filter(pc.field("lane") == lane).drop_columns("lane").to_batches()
        )
        return [event for lane, batch in batches for event in codec.decode(codec.conform(batch), lane)]

    def lines(self) -> Lines:
        """The lines of policies, each of which pages of one cut share."""

        def read(run: str, policy: str) -> Line:
            with self.connection.cursor() as cursor:
                return read_line(cursor, run, policy)

        return Lines(lambda run, policy: self.once(("line", run, policy), lambda: read(run, policy)))

    def once(self, key: tuple[Any, ...], answer: Callable[[], _T]) -> _T:
        """An answer that pages of one cut share; whoever asks first computes it, and others wait."""
        mine: Future[_T] = Future()
        first = self._answers.setdefault(key, mine)
        if first is mine:
            try:
                mine.set_result(answer())
            except BaseException as error:
                del self._answers[key]
                mine.set_exception(error)
        value: _T = first.result()
        return value


class Snapshots:
    """Snapshots of a growing log, one after the other.

    Args:
        model: a model directory, whose tokenizer gives the text of tokens; default: as each run names it.
    """

    def __init__(self, store: Store, model: Path | None = None) -> None:
        self.store, self._model = store, model
        self._newest: Snapshot | None = None
        self._lock, self._making = threading.Lock(), threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Context: a snapshot at most `FRESH_S` behind the log, and somewhat more while one is made."""
        self._refresh()
        with self._lock:
            snapshot = self._newest
            assert snapshot is not None
            snapshot.readers += 1
        try:
            yield snapshot
        finally:
            with self._lock:
                snapshot.readers -= 1
                self._close_unread(snapshot)

    def outdate(self) -> None:
        """Have the next page look at the log anew: it has just grown."""
        if (newest := self._newest) is not None:
            newest.checked_s = -FRESH_S

    def close(self) -> None:
        """Close the newest one, once nobody reads it."""
        with self._lock:
            last, self._newest = self._newest, None
            if last is not None:
                self._close_unread(last)

    def _refresh(self) -> None:
        newest = self._newest
        if newest is not None and time.monotonic() - newest.checked_s < FRESH_S:
            return
        if not self._making.acquire(blocking=newest is None):
            return  # another request is making one: the last one will do
        try:
            if self._newest is newest:
                self._replace(newest)
        finally:
            self._making.release()

    def _replace(self, old: Snapshot | None) -> None:
        now = time.monotonic()
        cut = self.store.head()
        if old is not None and old.cut == cut:
            old.checked_s = now
            return
        new = Snapshot(self.store, cut, connect_at(self.store, format_cut(cut), model=self._model))
        with self._lock:
            self._newest = new
            if old is not None:
                self._close_unread(old)

    def _close_unread(self, snapshot: Snapshot) -> None:
        if snapshot is not self._newest and not snapshot.readers:
            snapshot.connection.close()
