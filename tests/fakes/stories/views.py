"""The views of SQL over events that are in no store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sql.relations import INTERNAL, LIVE, Snapshot, definitions
from rollbook.store.sql.views import VIEWS


class EventViews:
    """The views that a connection to a store without sealed units has, made once for many tables of events.

    To make those of the ledger takes as long as to ask them.
    """

    def __init__(self) -> None:
        self.connection = duckdb.connect(":memory:", config={"threads": 1})
        self.connection.execute(f"CREATE SCHEMA {INTERNAL}")
        self.put(pa.Table.from_batches([], TABLE_SCHEMA))
        for name, query in definitions(Snapshot(Path("nowhere"), (), ())):
            self.connection.execute(f"CREATE VIEW {name} AS {query}")
        self.connection.execute("CREATE MACRO token_text(run, token_id) AS NULL::VARCHAR")
        for view in VIEWS:
            self.connection.execute(f'CREATE VIEW "{view.name}" AS {view.sql}')

    def put(self, events: pa.Table) -> None:
        """From now on the views are of these events, which are as `Store.table` gives them."""
        self.connection.execute(f"USE {INTERNAL}")
        self.connection.from_arrow(events).create_view(LIVE, replace=True)
        self.connection.execute("USE main")

    def ask(self, query: str) -> list[Any]:
        """The rows of a query."""
        return list(self.connection.execute(query).fetchall())
