"""SQL over the log: a DuckDB connection in memory, over sealed files and the live tail, at one cut."""

from __future__ import annotations

import os
from dataclasses import replace

import duckdb
from duckdb.func import FunctionNullHandling, PythonUDFType
from duckdb.sqltypes import INTEGER, VARCHAR

from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.sealed.leases import lease_units
from rollbook.store.spill import QUIET, Spill
from rollbook.store.sql.agent_views import TOKEN_TEXT
from rollbook.store.sql.object_storage import read_object_storage
from rollbook.store.sql.relations import INTERNAL, LIVE, LazyViews, definitions, snapshot
from rollbook.store.sql.sandbox import CLOSED, Connection, close_doors, explained, folders_of
from rollbook.store.sql.views import VIEWS
from rollbook.store.sql.vocabularies import Vocabularies


def connect(
    path: str | os.PathLike[str],
    *,
    as_of: str = "head",
    run: str | None = None,
    allow_files: bool = False,
    model: str | os.PathLike[str] | None = None,
) -> Connection:
    """A DuckDB connection with the views of `store.sql.views` over the store at a cut.

    It shows the cut at which it was opened; connect again to see later events. The store is only read: any
    process may do this while others write. Close the connection when done: it keeps the sealed files that it
    reads from being replaced.

    Args:
        allow_files: let queries open other files, write files and load extensions. Without it they are in a
            sandbox (`store.sql.sandbox`): they read the store, and reach nothing else.
        model: a model directory, whose tokenizer gives the text of tokens.

    Raises:
        NotAStoreError, CutError, CorruptionError: as `store.open` and `Store.cut`.
        ModelError: the model directory holds no tokenizer.
    """
    store = open_store(path)
    return connect_at(store, as_of, run, allow_files=allow_files, model=model)


def connect_at(
    store: Store,
    as_of: str = "head",
    run: str | None = None,
    *,
    allow_files: bool = False,
    model: str | os.PathLike[str] | None = None,
) -> Connection:
    """`connect` for a store that is open."""
    cut = store.cut(as_of, run)
    vocabularies = Vocabularies(store, cut, model)
    units, lease = lease_units(store.path, cut)
    contents = snapshot(store.path, cut, units)
    live = store.table(cut, contents.sealed_to())
    spill = Spill()
    closed = {"python_enable_replacements": False} if allow_files else CLOSED
    connection = duckdb.connect(":memory:", config=closed | spill.config)
    # Sealed files never change, so their footers are read once a connection.
    connection.execute(f"LOAD parquet; SET parquet_metadata_cache = true; {QUIET}")
    # A view, because a registered table would be listed among the views and be missing in cursors.
    connection.execute(f"CREATE SCHEMA {INTERNAL}; USE {INTERNAL}")
    connection.from_arrow(live).create_view(LIVE)
    connection.execute("USE main")
    if contents.is_remote():
        read_object_storage(connection, store.settings().remote)
    # The connection holds the function, which holds the lease, so that compaction removes none of its files;
    # and the folder it may spill into.
    connection.create_function("rollbook_lease", lambda: repr((lease, spill)), [], VARCHAR)
    connection.create_function(
        TOKEN_TEXT,
        vocabularies.say,
        [VARCHAR, INTEGER],
        VARCHAR,
        type=PythonUDFType.ARROW,
        null_handling=FunctionNullHandling.SPECIAL,
    )
    try:
        if not allow_files:
            close_doors(connection, folders_of(contents.folders()))
    except duckdb.Error as error:
        raise explained(error) from error
    relations = definitions(replace(contents, live=live.num_rows > 0))
    views = LazyViews([*relations, *((view.name, view.sql) for view in VIEWS)])
    return Connection(connection, views, allow_files=allow_files)
