"""The catalog: its migrations give its models, its rows, and it is never needed to read the log."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import orjson
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect

from rollbook import cli
from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.catalog import SCHEMA_REVISION, Base, Catalog
from rollbook.store.events import CheckpointWritten


@pytest.fixture
def migrate(tmp_path: Any) -> Any:
    """Run an alembic command on a fresh database: (its engine, run(name, revision))."""
    engine = create_engine(f"sqlite:///{tmp_path / 'fresh.db'}")

    def run(name: str, revision: str) -> None:
        config = Config()
        config.set_main_option("script_location", "rollbook:migrations")
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            getattr(command, name)(config, revision)

    yield engine, run
    engine.dispose()


def test_migrations_make_the_models(migrate: Any) -> None:
    """Upgrading from nothing gives exactly the tables of the models, at the revision this release names."""
    engine, run = migrate
    run("upgrade", "head")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert context.get_current_revision() == SCHEMA_REVISION


def test_downgrade_removes_everything(migrate: Any) -> None:
    """Downgrading to base drops every table, and upgrading again works."""
    engine, run = migrate
    run("upgrade", "head")
    run("downgrade", "base")
    assert inspect(engine).get_table_names() == ["alembic_version"]
    run("upgrade", "head")
    assert {"lanes", "segments", "checkpoints"} < set(inspect(engine).get_table_names())


def test_opening_a_lane_is_noted(store: Store, notes: Any) -> None:
    """The catalog has the lane's last writer and the closed segments it found."""
    import os

    for i in range(3):
        with store.writer("a") as writer:
            writer.append(notes(2 + i)).result(30)
    rows = store.catalog().rows()
    assert [(r["name"], r["process"], r["truncated_bytes"]) for r in rows["lanes"]] == [("a", os.getpid(), 0)]
    size = [(store.path / "lanes" / "a" / f"{n:08d}.wal").stat().st_size for n in (1, 2)]
    assert rows["segments"] == [
        {"lane": "a", "number": 1, "first_seq": 0, "events": 2, "bytes": size[0]},
        {"lane": "a", "number": 2, "first_seq": 2, "events": 3, "bytes": size[1]},
    ]


def test_checkpoints_are_noted_once(store: Store) -> None:
    """A checkpoint is a row by its path; noting it again replaces the row."""
    catalog = store.catalog()
    for size in (1, 4096):
        catalog.record_checkpoint(
            "demo", CheckpointWritten("actor", 1, "checkpoints/1", "w1", None, None, size)
        )
    catalog.close()
    assert store.catalog().rows()["checkpoints"] == [
        {
            "path": "checkpoints/1",
            "run": "demo",
            "policy": "actor",
            "policy_version": 1,
            "weights_digest": "w1",
            "bytes": 4096,
        }
    ]


def test_the_log_needs_no_catalog(told: Store, notes: Any) -> None:
    """Without its catalog a store loses nothing: reading makes no new one, and writing does."""
    before = told.table()
    (told.path / "catalog.db").unlink()
    opened = rb.open(told.path)
    assert opened.table().equals(before)
    assert rb.connect(told.path).execute("select count(*) from turns").fetchall() == [(4,)]
    assert not (told.path / "catalog.db").exists()
    with opened.writer("serve") as writer:
        assert writer.append(notes(1)).result(30) == 18
    assert [r["name"] for r in opened.catalog().rows()["lanes"]] == ["serve"]


def test_info_as_json(told: Store, monkeypatch: Any, capsys: Any) -> None:
    """`rollbook store info --json` prints the store's id, head and the catalog's rows."""
    told.writer("train").close()
    monkeypatch.setattr(sys, "argv", ["rollbook", "store", "info", "--store", str(told.path), "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    info = orjson.loads(capsys.readouterr().out)
    assert (info["path"], info["id"], info["head"]) == (str(told.path), told.store_id, "serve=18,train=8")
    assert [lane["name"] for lane in info["lanes"]] == ["serve", "train"]
    assert [(s["lane"], s["number"], s["events"]) for s in info["segments"]] == [("train", 1, 8)]
    assert info["checkpoints"] == []


def test_info_for_people(told: Store, monkeypatch: Any, capsys: Any) -> None:
    """Without --json the same is printed as tables."""
    monkeypatch.setattr(sys, "argv", ["rollbook", "store", "info", "--store", str(told.path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "head  serve=18,train=8" in out
    assert told.store_id in out


OPENER = """
import sys
from sqlalchemy import Engine, event
from rollbook import store as rb

def stop(connection, cursor, statement, *rest):
    if "CREATE TABLE lanes" in statement and sys.argv[2] == "first":
        print("migrating", flush=True)
        sys.stdin.readline()

event.listen(Engine, "before_cursor_execute", stop)
with rb.open(sys.argv[1]).writer(sys.argv[2]) as writer:
    print(writer.lane)
"""


def test_processes_may_open_a_new_store_together(store: Store, start_python: Any) -> None:
    """While one writer of a fresh store migrates the catalog, another one waits, and both go on."""
    first = start_python(OPENER, store.path, "first")
    assert first.stdout.readline() == "migrating\n"
    second = start_python(OPENER, store.path, "second")
    # A second process that did not wait would make the tables now, and the first one would fail.
    with contextlib.suppress(subprocess.TimeoutExpired):
        second.communicate(timeout=3)
    assert first.communicate("\n", timeout=60) == ("first\n", "")
    assert second.communicate(timeout=60) == ("second\n", "")
    assert [r["name"] for r in Catalog.beside(store.path).rows()["lanes"]] == ["first", "second"]
