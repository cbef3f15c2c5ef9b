"""The tables' catalog: SQLite or PostgreSQL, shared with the store's own; lost, another's, a stranger's."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import URL, create_engine, inspect
from sqlalchemy.exc import OperationalError
from tests.fakes.processes.postgresql import DATABASE, EMPTY, Server
from tests.fakes.storage.tables import NAMES, append, equal, odd_events, planned, table_of

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.catalog import Catalog
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.catalog.rebuild import rebuild_catalog
from rollbook.store.errors import CatalogError, OutsideError
from rollbook.store.tables.catalog import TableCatalog
from rollbook.store.tables.files import STORE_FOLDER, StoreFiles
from rollbook.store.tables.publish import publish_tables
from rollbook.store.upkeep.sealer import Sealer


@pytest.fixture
def sealed(store: Store) -> Store:
    """A store with a unit."""
    append(store, "a", odd_events("t1"))
    assert Sealer(store).run_once().damage == {}
    return store


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[URL]:
    """URL of an empty database of a real PostgreSQL server."""
    running: Server = request.getfixturevalue("postgres")
    yield running.url(DATABASE)
    running.run(*EMPTY, database=DATABASE)


def _uuids(store: Store) -> list[str]:
    return [str(table_of(store, name).metadata.table_uuid) for name in NAMES]


def _more(store: Store, name: str) -> None:
    append(store, "a", odd_events(name))
    Sealer(store).run_once()


# Beside the store's own tables --------------------------------------------------------------------


def test_postgresql_has_the_tables(sealed: Store, server: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a password in the URL, which is not shown."""
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", server.render_as_string(hide_password=False))
    report = publish_tables(sealed)
    equal(sealed)
    assert report.catalog.startswith("postgresql+psycopg://rollbook@")
    assert str(server.password) not in report.catalog
    _more(sealed, "t2")
    assert [table.added for table in publish_tables(sealed).tables] == [1, 1, 1]
    equal(sealed)
    rebuild_catalog(sealed)
    assert [table.added for table in publish_tables(sealed).tables] == [0, 0, 0]


def test_the_stores_catalog_is_undisturbed(sealed: Store) -> None:
    """Its rows are the same, a new process finds nothing to migrate, and a rebuild leaves the tables."""
    with contextlib.closing(Catalog.of(sealed.path)) as catalog:
        before = catalog.rows()
    publish_tables(sealed)
    uuids = _uuids(sealed)
    engine = create_engine(catalog_url(sealed.path))
    assert {"iceberg_tables", "iceberg_namespace_properties"} <= set(inspect(engine).get_table_names())
    engine.dispose()
    with contextlib.closing(Catalog.of(sealed.path)) as catalog:
        assert catalog.rows() == before
    rebuild_catalog(sealed)
    with contextlib.closing(Catalog.of(sealed.path)) as catalog:
        assert catalog.rows().keys() == before.keys()
    assert [(t.added, t.removed) for t in publish_tables(sealed).tables] == [(0, 0)] * 3
    assert _uuids(sealed) == uuids
    equal(sealed)


def test_tables_may_be_there_before_the_stores_own(sealed: Store) -> None:
    """A database in which only they are is no foreign one."""
    publish_tables(sealed)
    database = Path(str(catalog_url(sealed.path).database))
    engine = create_engine(catalog_url(sealed.path))
    with engine.begin() as connection:
        for name in inspect(engine).get_table_names():
            if not name.startswith("iceberg"):
                connection.exec_driver_sql(f"drop table {name}")
    engine.dispose()
    rebuild_catalog(sealed)
    assert database.exists()
    assert [(t.added, t.removed) for t in publish_tables(sealed).tables] == [(0, 0)] * 3


@pytest.mark.more_but("gone")
@pytest.mark.parametrize("how", ["gone", "broken"])
def test_a_lost_catalog_finds_the_same_tables(sealed: Store, how: str) -> None:
    """By their newest metadata: their ids and snapshots are those of before."""
    publish_tables(sealed)
    _more(sealed, "t2")
    publish_tables(sealed)
    uuids, snapshots = _uuids(sealed), [len(table_of(sealed, name).snapshots()) for name in NAMES]
    for path in sealed.path.glob("catalog.db*"):
        path.unlink() if how == "gone" else path.write_bytes(b"no database" * 100)
    rebuild_catalog(sealed)
    _more(sealed, "t3")
    assert [(t.added, t.removed) for t in publish_tables(sealed).tables] == [(1, 0)] * 3
    assert _uuids(sealed) == uuids
    assert [len(table_of(sealed, name).snapshots()) for name in NAMES] == [n + 1 for n in snapshots]
    equal(sealed)


@pytest.mark.more_but("gone-all", "cut-metadata.json", "cut--m0.avro")
@pytest.mark.parametrize("what", ["metadata.json", "snap-", "-m0.avro", "all"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_metadata_that_is_damaged_is_made_anew(sealed: Store, what: str, how: str) -> None:
    """Tables are derived: what cannot be read is written again."""
    publish_tables(sealed)
    _more(sealed, "t2")
    for path in (sealed.path / "iceberg").rglob("*.*"):
        if what == "all" or what in path.name:
            path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:50])
    publish_tables(sealed)
    equal(sealed)


def test_a_store_that_was_moved_has_its_tables_anew(sealed: Store, tmp_path: Path) -> None:
    """Addresses in a table are whole paths. The copy touches nothing of the store that it was copied from."""
    publish_tables(sealed)
    before = {path: path.read_bytes() for path in (sealed.path / "iceberg").rglob("*.*")}
    copy = rb.open(shutil.copytree(sealed.path, tmp_path / "copy"))
    publish_tables(copy)
    equal(copy)
    assert all(str(copy.path) in path for path in planned(table_of(copy, "turns")))
    assert {path: path.read_bytes() for path in (sealed.path / "iceberg").rglob("*.*")} == before
    equal(sealed)


# Refused ------------------------------------------------------------------------------------------


def test_a_table_of_another_store_is_refused(sealed: Store, tmp_path: Path) -> None:
    """Whether the catalog says so, or the table in it."""
    publish_tables(sealed)
    other = rb.open(tmp_path / "other", create=True)
    shutil.copy(sealed.path / "catalog.db", other.path / "catalog.db")
    with pytest.raises(CatalogError, match=f"is that of store {sealed.store_id}, not of {other.store_id}"):
        publish_tables(other)
    url = catalog_url(other.path)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("delete from iceberg_tables")
        connection.exec_driver_sql("update store_meta set store_id = ?", (other.store_id,))
    engine.dispose()
    theirs = SqlCatalog("rollbook", uri=str(url))
    schema = table_of(sealed, "marks").schema()
    properties = {"rollbook.store": "0190-another"}
    theirs.create_table(
        "rollbook.marks", schema, str(other.path / "iceberg" / "marks"), properties=properties
    )
    with pytest.raises(CatalogError, match=r"has a table rollbook\.marks of store 0190-another: give this"):
        publish_tables(other)
    assert publish_tables(other, anew=True).tables[1].files == 0
    assert table_of(other, "marks").properties["rollbook.store"] == other.store_id


def test_a_copy_that_shares_a_server_is_told(
    sealed: Store, server: URL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two copies would take the tables from each other; the one that counts is named by --anew."""
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", server.render_as_string(hide_password=False))
    publish_tables(sealed)
    copy = rb.open(shutil.copytree(sealed.path, tmp_path / "copy"))
    with pytest.raises(CatalogError, match=r"rollbook\.turns of another copy of this store.*--anew"):
        publish_tables(copy)
    equal(sealed)
    publish_tables(copy, anew=True)
    equal(copy)


def test_a_catalog_out_of_reach_is_named(sealed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what can be done."""
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", "postgresql+psycopg://127.0.0.1:1/none")
    with pytest.raises(CatalogError, match=r"127\.0\.0\.1:1/none: .*see that it can be reached"):
        publish_tables(sealed)


@pytest.mark.parametrize(
    "error", [OperationalError("select", {}, Exception("locked")), OSError(24, "EMFILE")]
)
def test_what_does_not_answer_is_not_made_anew(
    sealed: Store, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is locked, a process that is short of descriptors: the tables stay as they are."""
    publish_tables(sealed)
    uuids = _uuids(sealed)

    def fail(self: Any, name: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(TableCatalog, "load_table", fail)
        with pytest.raises((CatalogError, OSError), match=r"locked: see that|EMFILE"):
            publish_tables(sealed)
    publish_tables(sealed)
    assert _uuids(sealed) == uuids


# A stranger's store -------------------------------------------------------------------------------


def _rewrite(store: Store, name: str, change: Callable[[Any], None]) -> None:
    path = Path(table_of(store, name).metadata_location)
    metadata = orjson.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(orjson.dumps(metadata))


def test_properties_of_a_strangers_table_are_not_followed(
    sealed: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could name code to import, files to remove, and folders to write to."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    publish_tables(sealed)
    _more(sealed, "t2")
    mine = tmp_path / "mine.json"
    mine.write_text("precious")

    def poison(metadata: Any) -> None:
        metadata["properties"] |= {
            "py-io-impl": "planted.Files",
            "write.py-location-provider.impl": "planted.Provider",
            "write.metadata.path": str(tmp_path / "outside"),
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": "1",
        }
        metadata["metadata-log"] = [{"timestamp-ms": 1, "metadata-file": str(mine)}]

    _rewrite(sealed, "turns", poison)
    publish_tables(sealed)
    assert mine.read_text() == "precious"
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "imported").exists()
    table = table_of(sealed, "turns")
    assert not {"py-io-impl", "write.py-location-provider.impl"} & table.properties.keys()
    equal(sealed)


def test_addresses_of_a_strangers_table_lead_nowhere(sealed: Store, tmp_path: Path) -> None:
    """Neither its metadata, nor what that names, is read outside of the store."""
    publish_tables(sealed)
    outside = tmp_path / "list.avro"

    def poison(metadata: Any) -> None:
        shutil.copy(metadata["snapshots"][0]["manifest-list"], outside)
        metadata["snapshots"][0]["manifest-list"] = str(outside)

    _rewrite(sealed, "turns", poison)
    _more(sealed, "t2")
    publish_tables(sealed)
    assert str(outside) not in Path(table_of(sealed, "turns").metadata_location).read_text()
    equal(sealed)
    files = StoreFiles({STORE_FOLDER: str(sealed.path)})
    for location in (
        "/etc/passwd",
        f"{sealed.path}/sealed/../SECRET",
        f"{sealed.path}/STORE.json",
        "file:///x",
    ):
        for deed in (files.new_input, files.new_output, files.delete):
            with pytest.raises(OutsideError, match="is not in"):
                deed(location)


def test_files_have_the_stores_modes(sealed: Store) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        publish_tables(sealed)
    finally:
        os.umask(before)
    entries = list((sealed.path / "iceberg").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in entries if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in entries if path.is_dir()} == {0o700}
