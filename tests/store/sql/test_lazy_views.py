"""Views are made when a query names them: no other is planned, and every way to name one finds it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import duckdb
import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.sql.sandbox import Connection
from rollbook.store.sql.views import VIEWS

COUNT = "SELECT count(*) FROM duckdb_views() WHERE NOT internal AND view_name <> 'live'"


def _made(connection: Connection) -> int:
    """How many views the database has by now."""
    return int(connection._connection.execute(COUNT).fetchall()[0][0])


@pytest.mark.more_but("ledger")
@pytest.mark.parametrize("name", [view.name for view in VIEWS])
def test_each_view_alone(story_store: Store, name: str) -> None:
    """A view is found by the first query of a connection, in whatever case it is written."""
    with rb.connect(story_store.path) as connection:
        first = sorted(connection.execute(f'SELECT * FROM "{name.upper()}"').fetchall(), key=repr)
    with rb.connect(story_store.path) as connection:
        again = connection.raw.execute(f"SELECT * FROM {name}").fetchall()
        assert sorted(again, key=repr) == first


def test_only_what_is_named_is_planned(story_store: Store) -> None:
    """A query makes its view and none beneath it, a query of none makes none, and a list makes all."""
    with rb.connect(story_store.path) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
        assert _made(connection) == 0
        connection.execute("SELECT count(*) FROM rewards")
        few = _made(connection)
        connection.execute("SHOW TABLES")
        assert few == 1 < len(VIEWS) < _made(connection)


@pytest.mark.more_but("SELECT count(?) FROM query_table*", "WITH*")
@pytest.mark.parametrize(
    "query",
    [
        "WITH a AS (SELECT * FROM turns) SELECT count(*) FROM a",
        "SELECT count(*) FROM main.turns",
        "SELECT 1; SELECT count(*) FROM turns",
        "SELECT count(*) FROM query_table('tur' || 'ns')",
        "CREATE TEMP MACRO mine() AS TABLE SELECT * FROM turns; SELECT count(*) FROM mine()",
    ],
)
def test_every_way_to_name_a_view(story_store: Store, query: str) -> None:
    """A view is found within other queries, behind its schema, and where only DuckDB sees its name."""
    with rb.connect(story_store.path) as connection:
        [[count]] = connection.execute(query).fetchall()
    with rb.connect(story_store.path) as connection:
        assert connection.raw.execute("SELECT count(*) FROM turns").fetchall() == [(count,)]
        assert count > 0


def test_a_misspelt_view_is_suggested(story_store: Store) -> None:
    """The error for a name that no view has suggests the nearest."""
    with (
        rb.connect(story_store.path) as connection,
        pytest.raises(duckdb.CatalogException, match='Did you mean "trajectories"'),
    ):
        connection.execute("SELECT * FROM trajectoriez")


def test_threads_that_name_the_same_view_at_once(story_store: Store) -> None:
    """Cursors of several threads find a view that none of them has used before."""
    with rb.connect(story_store.path) as connection:
        cursors = [connection.cursor() for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            counts = list(
                pool.map(lambda cursor: cursor.execute("SELECT count(*) FROM steps").fetchall(), cursors)
            )
    assert len(set(map(tuple, counts))) == 1
