"""Migrations: they make the models, keep an older catalog's rows, and run once where several begin them."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import URL, Engine, create_engine, inspect

from rollbook.store import Event, Store
from rollbook.store.catalog import Catalog
from rollbook.store.catalog.database import FORMER_TABLES, SCHEMA_REVISION, Base
from rollbook.store.errors import CatalogError

NAMES = {*Base.metadata.tables}
OLD_ROWS = {
    "lanes": [("serve", 1_700_000_000_000_000, 41, 7), ("train", 1_700_000_000_000_001, 42, 0)],
    "segments": [("serve", 1, 0, 5, 4096), ("serve", 2, 5, 3, 2048)],
    "checkpoints": [("checkpoints/1", "demo", "actor", 1, "w1", 99)],
}
Run = Callable[[str, str], None]


@pytest.fixture
def engine(database_url: URL) -> Iterator[Engine]:
    """An engine on an empty database."""
    new = create_engine(database_url)
    yield new
    new.dispose()


@pytest.fixture
def run(engine: Engine) -> Run:
    """Run an alembic command (`upgrade`, `downgrade`) to a revision."""
    return lambda name, revision: _run(engine, name, revision)


def _run(engine: Engine, name: str, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", "rollbook:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        getattr(command, name)(config, revision)


def _fill(engine: Engine) -> None:
    with engine.begin() as connection:
        for table, rows in OLD_ROWS.items():
            for row in rows:
                values = ", ".join(repr(value) for value in row)
                connection.exec_driver_sql(f"insert into {table} values ({values})")


def _read(engine: Engine) -> dict[str, list[tuple[Any, ...]]]:
    with engine.connect() as connection:
        return {
            table: [tuple(row) for row in connection.exec_driver_sql(f"select * from {table} order by 1, 2")]
            for table in OLD_ROWS
        }


def test_migrations_make_the_models(engine: Engine, run: Run) -> None:
    """Upgrading from nothing gives exactly the tables of the models, at the revision this release names."""
    run("upgrade", "head")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert context.get_current_revision() == SCHEMA_REVISION
    assert set(inspect(engine).get_table_names()) == NAMES | {"alembic_version"}
    keys = [key["referred_table"] for key in inspect(engine).get_foreign_keys("segments")]
    assert keys == ["lanes"], "replacing the table keeps its reference"


def test_a_new_catalog_is_as_migrations_make_it(store: Store, raw: Engine) -> None:
    """An empty database gets its tables from the models: the very ones, and it can go back from there."""
    Catalog.of(store.path).close()
    described = _described(raw)
    _run(raw, "downgrade", "base")
    _run(raw, "upgrade", "head")
    assert _described(raw) == described


def _described(engine: Engine) -> dict[str, Any]:
    inspector = inspect(engine)
    tables = {
        name: (
            # Migrations add columns at the end, and a type has no equality of its own.
            {c["name"]: c | {"type": str(c["type"])} for c in inspector.get_columns(name)},
            inspector.get_pk_constraint(name),
            inspector.get_foreign_keys(name),
            inspector.get_indexes(name),
            inspector.get_unique_constraints(name),
            inspector.get_check_constraints(name),
        )
        for name in inspector.get_table_names()
    }
    with engine.connect() as connection:
        return tables | {"": connection.exec_driver_sql("select version_num from alembic_version").all()}


def test_downgrade_removes_everything(engine: Engine, run: Run) -> None:
    """Downgrading to base drops every table, and upgrading again works."""
    run("upgrade", "head")
    run("downgrade", "base")
    assert inspect(engine).get_table_names() == ["alembic_version"]
    run("upgrade", "head")
    assert set(inspect(engine).get_table_names()) >= NAMES


def test_there_and_back(engine: Engine, run: Run) -> None:
    """A catalog of revision 0001 keeps its rows when it is upgraded, and when it is downgraded again."""
    run("upgrade", "0001")
    before = inspect(engine).get_columns("segments")
    _fill(engine)
    run("upgrade", "0002")
    assert _read(engine) == OLD_ROWS | {
        "segments": [(*row, "closed", None) for row in OLD_ROWS["segments"]],
    }
    with engine.begin() as connection:
        connection.exec_driver_sql("insert into lanes (name) values ('noted')")
        connection.exec_driver_sql(
            "insert into segments (lane, number, first_seq, state) values ('serve', 3, 8, 'open')"
        )
    run("downgrade", "0001")
    assert _read(engine) == OLD_ROWS | {"lanes": [("noted", 0, 0, 0), *OLD_ROWS["lanes"]]}
    after = inspect(engine).get_columns("segments")
    assert [(c["name"], c["nullable"]) for c in after] == [(c["name"], c["nullable"]) for c in before]


def test_former_tables_go_and_come_back_empty(engine: Engine, run: Run) -> None:
    """Revision 0003 drops what is read from the log alone; other rows stay, and 0002 has the tables again."""
    run("upgrade", "0001")
    _fill(engine)
    run("upgrade", "0002")
    kept, before = _read(engine), _described(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("insert into consumers values ('c', 'serve=1', 1, 'train', 0)")
    run("upgrade", "0003")
    assert not set(FORMER_TABLES) & set(inspect(engine).get_table_names())
    assert _read(engine) == kept
    run("downgrade", "0002")
    assert _described(engine) == before
    assert _read(engine) == kept
    with engine.connect() as connection:
        assert connection.exec_driver_sql("select count(*) from consumers").scalar() == 0


def test_an_old_catalog_is_upgraded_when_opened(
    store: Store, raw: Engine, notes: Callable[..., list[Event]]
) -> None:
    """Opening a store with a catalog of 0001 migrates it; its rows stay, and new ones join them."""
    _run(raw, "upgrade", "0001")
    _fill(raw)
    rows = Catalog.of(store.path).rows()
    assert [(r["name"], r["truncated_bytes"]) for r in rows["lanes"]] == [("serve", 7), ("train", 0)]
    assert [(r["number"], r["state"], r["unit"]) for r in rows["segments"]] == [
        (1, "closed", None),
        (2, "closed", None),
    ]
    assert [r["path"] for r in rows["checkpoints"]] == ["checkpoints/1"]
    assert [r["store_id"] for r in rows["store_meta"]] == [store.store_id]
    with store.writer("a") as writer:
        writer.append(notes(1)).result(30)
    assert [r["name"] for r in Catalog.of(store.path).rows()["lanes"]] == ["a", "serve", "train"]


def test_a_newer_catalog_is_refused(store: Store, raw: Engine) -> None:
    """A revision that this release does not know is named, with the remedy, and nothing is changed."""
    Catalog.of(store.path).close()
    with raw.begin() as connection:
        connection.exec_driver_sql("update alembic_version set version_num = '0099'")
    with pytest.raises(CatalogError, match=r"revision '0099'.*up to 0004.*update rollbook") as refusal:
        Catalog.of(store.path)
    assert "rollbook store rebuild-catalog" in str(refusal.value)
    with raw.connect() as connection:
        assert connection.exec_driver_sql("select version_num from alembic_version").scalar() == "0099"


OPENER = """
import sys
from sqlalchemy import Engine, event
from rollbook import store as rb

def stop(connection, cursor, statement, *rest):
    if "CREATE TABLE units" in statement and sys.argv[2] == "first":
        print("migrating", flush=True)
        sys.stdin.readline()

event.listen(Engine, "before_cursor_execute", stop)
with rb.open(sys.argv[1]).writer(sys.argv[2]) as writer:
    print(writer.lane)
"""


@pytest.mark.more
def test_processes_may_open_a_new_store_together(store: Store, start_python: Any) -> None:
    """While one writer of a fresh store migrates the catalog, another one waits, and both go on."""
    first = start_python(OPENER, store.path, "first")
    assert first.stdout.readline() == "migrating\n"
    second = start_python(OPENER, store.path, "second")
    # A second process that did not wait would make the tables now, and the first one would fail.
    with contextlib.suppress(subprocess.TimeoutExpired):
        second.communicate(timeout=3)
    assert second.poll() is None, "the second one waits"
    assert first.communicate("\n", timeout=60) == ("first\n", "")
    assert second.communicate(timeout=60) == ("second\n", "")
    assert [r["name"] for r in Catalog.of(store.path).rows()["lanes"]] == ["first", "second"]


def test_the_format_page_names_every_column(root: Path) -> None:
    """docs/format.md lists this release's tables in order, each with all its columns."""
    section = (root / "docs" / "format.md").read_text().split("## catalog.db")[1].split("\n## ")[0]
    assert f"(`alembic_version`: `{SCHEMA_REVISION}`)" in section
    rows = [line.split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    assert sorted(name.strip("| `") for name, _ in rows) == sorted(NAMES)
    for name, text in rows:
        table = Base.metadata.tables[name.strip("| `")]
        named = re.findall(r"`(\w+)`", text)
        assert [name for name in named if name in table.columns] == table.columns.keys()
