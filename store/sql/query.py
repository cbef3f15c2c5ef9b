"""SQL over the log: a DuckDB connection in memory, over the files' own bytes, at one cut."""

from __future__ import annotations

import os

import duckdb

from rollbook.store.log import open_store
from rollbook.store.sql.views import VIEWS


def connect(
    path: str | os.PathLike[str], *, as_of: str = "head", run: str | None = None
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the views of `store.views` over the store at a cut.

    It sees what was durable when it was opened, and keeps seeing that; connect again for more. The
    store is only read: any process may do this while others write.

    Raises:
        NotAStoreError, CutError, CorruptionError: as `store.open` and `Store.cut`.
    """
    store = open_store(path)
    table = store.table(store.cut(as_of, run))
    connection = duckdb.connect(":memory:", config={"python_enable_replacements": False})
    connection.register("log", table)
    for view in VIEWS:
        connection.execute(f'CREATE VIEW "{view.name}" AS {view.sql}')
    return connection
