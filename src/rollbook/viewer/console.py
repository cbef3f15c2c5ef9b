"""SQL over the log, in the sandbox, bounded in time and rows; and its rows as a file.

Each query has a connection of its own: what tables and views it makes, no other page sees.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rollbook.store.cut import format_cut
from rollbook.store.errors import QueryError, RequestError
from rollbook.store.sql.object_storage import outage
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import Connection, explained
from rollbook.viewer.examples import EXAMPLES, Example
from rollbook.viewer.pages import Page, Query
from rollbook.viewer.snapshots import Snapshot, Snapshots

MOST_S = 20.0
"""Longest time of a query."""
SHOWN, SENT = 500, 100_000
"""Most rows that a page shows, and that a file has."""
CELL = 300
"""Characters of a value that a page shows."""
LINKS = {"trajectory_id": "trajectories", "run": "runs"}
"""Columns whose values are addresses of pages."""


@dataclass(frozen=True, slots=True)
class Console:
    """A query and its rows.

    Attributes:
        error: why there is no answer; empty where there is one.
        more: whether there are rows beyond those that are shown.
    """

    sql: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    more: bool
    seconds: float
    error: str
    examples: Sequence[Example]
    links: dict[str, str]


def read_console(snapshot: Snapshot, query: Query) -> Console:
    """The answer to the query that an address has; an error is part of the page."""
    sql = query.get("q", "").strip()
    begun = time.monotonic()
    columns: Sequence[str] = ()
    rows: list[Any] = []
    error = ""
    if sql:
        try:
            with _asking(snapshot) as connection:
                answer = connection.execute(sql)
                columns = [column[0] for column in answer.description or ()]
                rows = answer.fetchmany(SHOWN + 1)
        except QueryError as failure:
            error = str(failure)
    cells = [[_cell(value) for value in row] for row in rows[:SHOWN]]
    seconds = time.monotonic() - begun
    return Console(sql, columns, cells, len(rows) > SHOWN, seconds, error, EXAMPLES, LINKS)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return text if len(text) <= CELL else f"{text[:CELL]}…"


@contextmanager
def _asking(snapshot: Snapshot) -> Iterator[Connection]:
    """Context of a query: a connection at the snapshot's cut, which is interrupted after `MOST_S`.

    Raises:
        QueryError: the query is wrong, or takes too long.
    """
    late = threading.Event()
    with connect_at(snapshot.store, format_cut(snapshot.cut)) as connection:

        def stop() -> None:
            late.set()
            connection.interrupt()

        timer = threading.Timer(MOST_S, stop)
        timer.start()
        try:
            yield connection
        except duckdb.Error as error:
            if late.is_set():
                raise QueryError(
                    f"it took longer than {MOST_S:.0f} s: ask `rollbook sql`, or less"
                ) from error
            raise outage(error) or explained(error) from error
        finally:
            timer.cancel()


def add_downloads(app: FastAPI, snapshots: Snapshots) -> None:
    """Add the rows of a query as CSV and as Parquet."""

    def table(sql: str) -> pa.Table:
        with snapshots.reading() as snapshot, _asking(snapshot) as connection:
            relation = connection.sql(sql)
            if relation is None:
                raise QueryError("the query has no rows")
            return relation.limit(SENT).to_arrow_table()

    async def download(request: Request) -> Response:
        kind, sql = request.path_params["kind"], request.query_params.get("q", "").strip()
        if kind not in WRITERS:
            raise RequestError(404, "not_found", f"rows as {kind!r}: use {' or '.join(WRITERS)}")
        if not sql:
            raise RequestError(400, "bad_query", "q is empty: give a query")
        rows, out = await run_in_threadpool(table, sql), io.BytesIO()
        await run_in_threadpool(WRITERS[kind], rows, out)
        headers = {"content-disposition": f'attachment; filename="rows.{kind}"'}
        return Response(out.getvalue(), media_type="application/octet-stream", headers=headers)

    app.add_route("/sql/rows.{kind}", download, methods=["GET"])


def _write_csv(rows: pa.Table, out: io.BytesIO) -> None:
    """Lists and structs as their text: CSV has no form of them."""
    plain = [
        pa.array([None if v is None else str(v) for v in column.to_pylist()])
        if pa.types.is_nested(column.type)
        else column
        for column in rows.columns
    ]
    pa.csv.write_csv(pa.table(plain, names=rows.column_names), out)


WRITERS = {"csv": _write_csv, "parquet": pa.parquet.write_table}
PAGES = (Page("/sql", "console.html", read_console),)
