"""What happens when the database is away, broken, busy, or the process writing it is killed."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, make_url

from rollbook.store import Store
from rollbook.store.catalog import Catalog, database
from rollbook.store.catalog.catalog import catalog_url, note_checkpoint
from rollbook.store.catalog.database import without_secrets
from rollbook.store.errors import CatalogError, StoreError
from rollbook.store.events import CheckpointWritten

REBUILD = "rollbook store rebuild-catalog"
CHECKPOINT = CheckpointWritten("actor", 1, "checkpoints/1", "w1", None, None, 1)

Refused = Callable[[str], str]


@pytest.fixture
def refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Open the store's catalog at a URL, and give back the error's text."""

    def refuse(url: str) -> str:
        monkeypatch.setenv("ROLLBOOK_CATALOG_URL", url)
        with pytest.raises(CatalogError) as refusal:
            Catalog.of(store.path)
        assert isinstance(refusal.value, StoreError)
        assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)
        return str(refusal.value)

    return refuse


def test_a_server_that_is_away(refused: Refused) -> None:
    """The message names the URL without its password, what went wrong, and the remedy."""
    pytest.importorskip("psycopg")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening: nobody answers there
        port = taken.getsockname()[1]
        text = refused(f"postgresql+psycopg://ann:s3cret@127.0.0.1:{port}/rolls")
    assert f"catalog postgresql+psycopg://ann@127.0.0.1:{port}/rolls: connection" in text
    assert "refused" in text.lower()
    assert "see that it can be reached" in text
    assert REBUILD in text
    assert "s3cret" not in text


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_wrong_password(store: Store, refused: Refused) -> None:
    """The server refuses; neither the wrong password nor the right one is in the message."""
    url = catalog_url(store.path).set(password="gu@ess")
    text = refused(url.render_as_string(hide_password=False))
    assert "password authentication failed" in text
    assert "gu@ess" not in text
    assert "gu%40ess" not in text


def test_no_password_is_shown() -> None:
    """A password in the URL's query is left out too; the rest is there."""
    url = make_url("postgresql+psycopg://ann:one@h/d?password=two&sslpassword=three&host=/tmp")
    assert without_secrets(url) == "postgresql+psycopg://ann@h/d?host=%2Ftmp"
    assert without_secrets(make_url("sqlite:////x/catalog.db")) == "sqlite:////x/catalog.db"


def test_a_path_that_cannot_be(refused: Refused, tmp_path: Path) -> None:
    """A SQLite file in a folder that does not exist."""
    text = refused(f"sqlite:///{tmp_path}/missing/catalog.db")
    assert text.startswith(f"catalog sqlite:///{tmp_path}/missing/catalog.db: unable to open database file")
    assert REBUILD in text


def test_what_is_no_url(refused: Refused) -> None:
    """A setting that is no URL is not repeated: who knows what is in it."""
    text = refused("ann:s3cret")
    assert "is not a SQLAlchemy URL" in text
    assert "s3cret" not in text


def test_a_driver_that_is_not_there(refused: Refused) -> None:
    """A dialect nobody knows, and one whose driver is not installed."""
    assert "nosuchdb" in refused("nosuchdb://h/d")
    text = refused("oracle+oracledb://ann:s3cret@h/d")
    assert "install oracledb" in text
    assert "s3cret" not in text


def test_an_outage_stops_no_checkpoint(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever notes a checkpoint in a catalog that is away goes on, with a warning of what is not known."""
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", "sqlite:////nowhere/at/all/catalog.db")
    note_checkpoint(store.path, "run", CHECKPOINT)
    assert "checkpoint checkpoints/1 is written, but the catalog does not know" in caplog.text
    monkeypatch.delenv("ROLLBOOK_CATALOG_URL")
    note_checkpoint(store.path, "run", CHECKPOINT)
    assert [r["path"] for r in Catalog.of(store.path).rows()["checkpoints"]] == ["checkpoints/1"]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_garbage_instead_of_a_database(store: Store) -> None:
    """A file that is no database is an error with the remedy."""
    file = store.path / "catalog.db"
    file.write_bytes(b"this is no database, and long enough to be looked at" * 100)
    with pytest.raises(CatalogError, match=f"file is not a database: run `{REBUILD}`"):
        Catalog.of(store.path)


def test_a_missing_table(store: Store, raw: Engine) -> None:
    """Tables that somebody dropped are missed when they are used."""
    catalog = Catalog.of(store.path)
    with raw.begin() as connection:
        connection.exec_driver_sql("drop table checkpoints")
    with pytest.raises(CatalogError, match=f"checkpoints.*run `{REBUILD}`"):
        catalog.record_checkpoint("run", CHECKPOINT)


def test_a_busy_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits in vain says so; the rows it wanted are not there, and the next try goes well."""
    monkeypatch.setattr(database, "PATIENCE_S", 0.4)
    busy, waiting = Catalog.of(store.path), Catalog.of(store.path)
    with busy._database.write():
        began = time.monotonic()
        with pytest.raises(CatalogError, match=r"busy for 0\.4 seconds; try again") as refusal:
            waiting.record_checkpoint("run", CHECKPOINT)
        assert 0.36 < time.monotonic() - began < 10
        assert waiting.rows()["checkpoints"] == [], "reading goes on meanwhile"
    assert REBUILD not in str(refusal.value)
    waiting.record_checkpoint("run", CHECKPOINT)
    assert [r["path"] for r in busy.rows()["checkpoints"]] == ["checkpoints/1"]


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_server_that_was_restarted(store: Store, raw: Engine) -> None:
    """A catalog that was open while its connections were cut goes on over new ones."""
    catalog = Catalog.of(store.path)
    catalog.record_checkpoint("run", CHECKPOINT)
    with raw.connect() as connection:
        ended = connection.exec_driver_sql(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        ).scalar()
    assert ended is not None
    assert ended >= 1
    assert [r["path"] for r in catalog.rows()["checkpoints"]] == ["checkpoints/1"]


KILLED = """
import sys
from sqlalchemy import Engine, event
from rollbook import store as rb
from rollbook.store.catalog import Catalog
from rollbook.store.sealed.unit import SealedSegment, Unit

def unit(first, last, generation):
    segments = tuple(SealedSegment(n, n * 10, 10, 100, "") for n in range(first, last + 1))
    return Unit("a", generation, "", segments, (), 1)

catalog = Catalog.of(rb.open(sys.argv[1]).path)
catalog.record_units("a", [unit(1, 1, 1), unit(2, 2, 1)])

def stop(connection, cursor, statement, *rest):
    if "DELETE FROM units" in statement:
        print("half done", flush=True)
        sys.stdin.readline()

event.listen(Engine, "after_cursor_execute", stop)
catalog.record_units("a", [unit(1, 2, 2)])
print("not killed", flush=True)
"""


@pytest.mark.more_but("sqlite*")
def test_kill_in_the_middle_of_a_transaction(store: Store, fork_python: Any, raw: Engine) -> None:
    """What a killed process had half written is not there, and others write on at once."""
    process = fork_python(KILLED, store.path)
    assert process.stdout.readline() == "half done\n"
    process.kill()
    process.communicate(timeout=30)
    catalog = Catalog.of(store.path)
    began = time.monotonic()
    catalog.record_checkpoint("run", CHECKPOINT)
    assert time.monotonic() - began < 10
    rows = catalog.rows()
    names = ["00000001-00000001.1", "00000002-00000002.1"]
    assert [r["name"] for r in rows["units"]] == names
    assert [(r["state"], r["unit"]) for r in rows["segments"]] == [("sealed", name) for name in names]
    assert [r["path"] for r in rows["checkpoints"]] == ["checkpoints/1"]
