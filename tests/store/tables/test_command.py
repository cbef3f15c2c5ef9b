"""`rollbook store publish`, what the sealer says of tables, and what either says where there are none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from tests.fakes.storage.tables import append, odd_events, table_of
from typer.testing import CliRunner

from rollbook.cli.app import app
from rollbook.store import Store
from rollbook.store.errors import CorruptionError, RemoteError
from rollbook.store.sealed.unit import current_units, unit_folder
from rollbook.store.tables import following
from rollbook.store.tables.publish import publish_tables
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.upload import upload_units

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage


@pytest.fixture
def sealed(store: Store) -> Store:
    """A store with a unit."""
    append(store, "a", odd_events("t1"))
    assert Sealer(store).run_once().damage == {}
    return store


def _run(*words: object) -> Any:
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})


def test_the_command_prints_tables(sealed: Store) -> None:
    """For people and for machines: snapshot, files, rows, and what was added and removed."""
    done = _run("store", "publish", "--store", sealed.path)
    assert done.exit_code == 0, done.output
    snapshot = table_of(sealed, "turns").metadata.current_snapshot_id
    assert done.stdout.splitlines()[1].split() == ["rollbook.turns", str(snapshot), "1", "4", "1", "0"]
    assert f"rollbook.marks: {sealed.path}/iceberg/marks/metadata/00001-" in done.stdout
    assert f"catalog: sqlite:///{sealed.path}/catalog.db" in done.stdout
    report = orjson.loads(_run("store", "publish", "--store", sealed.path, "--json").stdout)
    assert report["catalog"] == f"sqlite:///{sealed.path}/catalog.db"
    assert report["tables"][0] == {
        **{"table": "rollbook.turns", "snapshot": snapshot, "files": 1, "rows": 4, "added": 0, "removed": 0},
        "metadata": table_of(sealed, "turns").metadata_location,
    }


def test_the_sealers_command_says_that_tables_are_behind(
    sealed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit code 1; what is sealed is sealed."""
    (sealed.path / "store.toml").write_text("[iceberg]\npublish = true\n")
    append(sealed, "a", odd_events("t2"))
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    for name in [name for name in sys.modules if name.startswith(("pyiceberg.", "rollbook.store.tables."))]:
        if name != following.__name__:
            monkeypatch.delitem(sys.modules, name)
    done = _run("store", "seal", "--store", sealed.path)
    assert done.exit_code == 1
    why = "tables are behind until the next pass: pyiceberg is not installed: pip install 'rollbook[iceberg]'"
    assert why in done.output
    report = orjson.loads(_run("store", "seal", "--store", sealed.path, "--json").stdout)
    assert report["unpublished"] == why
    assert len(current_units(sealed.path, "a")) == 2


def test_erasure_warns_that_tables_are_behind(
    sealed: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And erases all the same."""
    from rollbook.store.upkeep.erase import erase_trajectory

    (sealed.path / "store.toml").write_text("[iceberg]\npublish = true\n")
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", "postgresql+psycopg://127.0.0.1:1/none")
    assert erase_trajectory(sealed, "t1", "asked").events == 7
    assert (
        "tables are behind until the next pass: catalog postgresql+psycopg://127.0.0.1:1/none" in caplog.text
    )


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_damaged_unit_is_named(sealed: Store, how: str) -> None:
    """Its tables are not published, as they would lack its rows; the others are not held up."""
    [unit] = current_units(sealed.path, "a")
    path = unit_folder(sealed.path, unit) / "marks.parquet"
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptionError, match=f"{path}"):
        publish_tables(sealed)
    assert table_of(sealed, "turns").current_snapshot() is not None


def test_an_outage_of_object_storage_is_named_and_mended(sealed: Store, storage: ObjectStorage) -> None:
    """It is no damage: nothing is made anew, and the next call goes on."""
    text = f'[remote]\nuri = "{storage.uri}"\nendpoint = "{storage.endpoint}"\n'
    (sealed.path / "store.toml").write_text(text)
    upload_units(sealed)
    publish_tables(sealed)
    storage.stop()
    try:
        with pytest.raises(RemoteError, match=r"rollbook\.turns \(at 127\.0\.0\.1:\d+\)"):
            publish_tables(sealed)
    finally:
        storage.start()
    storage.check_credentials(True)
    try:
        with pytest.raises(RemoteError, match=r"rollbook\.turns \(at 127\.0\.0\.1:\d+\)"):
            publish_tables(sealed)
    finally:
        storage.check_credentials(False)
    assert [(table.added, table.removed) for table in publish_tables(sealed).tables] == [(0, 0)] * 3


def test_a_bucket_that_is_not_allowed_is_not_asked(
    sealed: Store, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one, and how to allow it."""
    text = f'[remote]\nuri = "s3://elsewhere/x"\nendpoint = "{storage.endpoint}"\n'
    (sealed.path / "store.toml").write_text(text)
    with pytest.raises(RemoteError, match="ROLLBOOK_ALLOW=s3://elsewhere"):
        publish_tables(sealed)
    assert storage.requests == []
