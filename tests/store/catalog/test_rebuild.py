"""`rollbook store rebuild-catalog`: from the files alone, the rows that were noted one by one."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, inspect

from rollbook import store as rb
from rollbook.cli import app as cli
from rollbook.store import Event, Store
from rollbook.store.catalog import Catalog
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.catalog.database import Base
from rollbook.store.catalog.rebuild import rebuild_catalog
from rollbook.store.errors import CatalogError, CorruptionError
from rollbook.store.events import CheckpointWritten
from rollbook.store.sealed.seal import seal_segments
from rollbook.store.sealed.unit import current_units, unit_folder, write_manifest
from rollbook.store.settings import SealSettings
from rollbook.store.wal.files import segment_path

Rows = dict[str, list[dict[str, Any]]]
CHECKPOINT = CheckpointWritten("actor", 2, "checkpoints/2", "w2", None, None, 4096)


def _rows(store: Store) -> Rows:
    """The catalog's rows but for what no file keeps: when a lane was opened, what was cut off then."""
    catalog = Catalog.of(store.path)
    rows = catalog.rows()
    catalog.close()
    for lane in rows["lanes"]:
        del lane["opened_us"], lane["truncated_bytes"]
    return rows


def _grow(story_store: Store, story: dict[str, list[Event]], notes: Callable[..., list[Event]]) -> None:
    for lane, events in story.items():
        with story_store.writer(lane) as writer:
            writer.append(events).result(30)
    catalog = Catalog.of(story_store.path)
    for i in range(4):
        with story_store.writer("bulk") as writer:
            writer.append(notes(5, start=5 * i)).result(30)
            if i == 3:
                writer.append([Event(CHECKPOINT, "demo")]).result(30)
    for event in story_store.events():
        if isinstance(event.record, CheckpointWritten):
            catalog.record_checkpoint(event.run, event.record)
    for numbers in ([1], [2, 3]):
        seal_segments(story_store.path, "bulk", numbers, SealSettings())
        catalog.record_units("bulk", current_units(story_store.path, "bulk"))
    first = current_units(story_store.path, "bulk")[0]
    write_manifest(unit_folder(story_store.path, first), replace(first, dropped_us=1_700_000_000_000_001))
    for file in first.files:
        (unit_folder(story_store.path, first) / file.name).unlink()
    for number in (1, 2):
        segment_path(story_store.path / "lanes" / "bulk", number).unlink()
    catalog.record_units("bulk", current_units(story_store.path, "bulk"))
    story_store.writer("bulk").close()
    catalog.close()


@pytest.fixture(scope="module")
def grown_once(
    tmp_path_factory: pytest.TempPathFactory,
    story: dict[str, list[Event]],
    notes: Callable[..., list[Event]],
) -> Path:
    """The folder of a store as `grown`, with its catalog in it; only read it."""
    store = rb.open(tmp_path_factory.mktemp("grown") / "store", create=True)
    _grow(store, story, notes)
    return store.path


@pytest.fixture
def grown(
    store: Store,
    backend: str,
    request: pytest.FixtureRequest,
    story: dict[str, list[Event]],
    notes: Callable[..., list[Event]],
) -> Store:
    """The story and a lane `bulk` of five segments: one dropped, two in a unit, one closed, one open.

    Everything was noted in the catalog when it happened.
    """
    if backend == "sqlite":
        shutil.rmtree(store.path)
        return rb.open(shutil.copytree(request.getfixturevalue("grown_once"), store.path))
    _grow(store, story, notes)
    return store


@pytest.mark.more_but("sqlite*")
def test_a_rebuilt_catalog_has_the_same_rows(grown: Store) -> None:
    """A rebuilt catalog has the rows of one that was kept up to date, in every table."""
    before = _rows(grown)
    assert all(before.values()), "every table has rows"
    bulk = [(r["state"], r["events"], r["unit"]) for r in before["segments"] if r["lane"] == "bulk"]
    assert bulk == [
        ("dropped", 5, "00000001-00000001.1"),
        ("sealed", 5, "00000002-00000003.1"),
        ("sealed", 5, "00000002-00000003.1"),
        ("closed", 6, None),
        ("open", None, None),
    ]
    done = rebuild_catalog(grown)
    assert _rows(grown) == before
    assert done.rows == {name: len(rows) for name, rows in before.items()}
    assert (done.moved, done.events) == (None, sum(grown.head().values()))
    assert rebuild_catalog(grown).rows == done.rows


@pytest.mark.more_but("sqlite*")
def test_the_last_opening_is_read_off_the_lock_file(grown: Store) -> None:
    """When and by which process a lane was opened last is read off its lock file."""
    catalog = Catalog.of(grown.path)
    before = {r["name"]: r for r in catalog.rows()["lanes"]}
    rebuild_catalog(grown)
    for row in catalog.rows()["lanes"]:
        noted = before[row["name"]]
        assert row["process"] == noted["process"]
        assert 0 <= noted["opened_us"] - row["opened_us"] < 60_000_000
        assert row["truncated_bytes"] is None
    catalog.close()


@pytest.mark.more_but("sqlite*")
def test_a_catalog_is_rebuilt_without_tables(grown: Store, raw: Engine) -> None:
    """Without any table there, and with rows that nothing in the log accounts for."""
    before = _rows(grown)
    catalog = Catalog.of(grown.path)
    catalog.record_checkpoint("never", CheckpointWritten("actor", 9, "never", "w", None, None, 1))
    catalog.record_units("never", [])
    assert _rows(grown) != before
    rebuild_catalog(grown)
    assert _rows(grown) == before
    catalog.close()
    with raw.begin() as connection:
        for name in reversed(["alembic_version", *before]):
            connection.exec_driver_sql(f"drop table {name}")
    rebuild_catalog(grown)
    assert _rows(grown) == before


@pytest.mark.more_but("sqlite-*")
@pytest.mark.parametrize(
    "harm",
    [
        ["drop table checkpoints"],
        ["alter table units drop column chain"],
        ["drop table alembic_version"],
        ["drop table store_meta", "update alembic_version set version_num = '0001'"],
        ["create table steps (step integer)", "update alembic_version set version_num = '0002'"],
    ],
)
def test_from_other_tables(grown: Store, raw: Engine, harm: list[str]) -> None:
    """Tables that are missing, or not as this release has them, are made anew."""
    before = _rows(grown)
    with raw.begin() as connection:
        for statement in harm:
            connection.exec_driver_sql(statement)
    assert rebuild_catalog(grown).moved is None
    assert _rows(grown) == before
    assert set(inspect(raw).get_table_names()) == {"alembic_version", *Base.metadata.tables}


Break = Callable[[Path], None]


def _delete(file: Path) -> None:
    file.unlink()


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 + 100])


def _garbage(file: Path) -> None:
    file.write_bytes(b"\x17garbage\x00" * 3000)


def _inner_pages(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8192:-4096] = b"\xff" * (len(data) - 12288)
    file.write_bytes(data)


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.parametrize("harm", [_delete, _truncate, _garbage, _inner_pages])
def test_from_a_broken_file(grown: Store, harm: Break) -> None:
    """A SQLite file that cannot be read is kept under another name, and a new one is made."""
    before = _rows(grown)
    file = grown.path / "catalog.db"
    harm(file)
    left = file.read_bytes() if file.exists() else None
    done = rebuild_catalog(grown)
    assert _rows(grown) == before
    if left is None:
        assert done.moved is None
    else:
        assert done.moved is not None
        assert re.fullmatch(r"catalog\.db\.broken-\d{16}", done.moved.name)
        assert done.moved.read_bytes() == left
    assert [f.name for f in grown.path.glob("catalog.db.broken*")] == (
        [done.moved.name] if done.moved else []
    )


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_sound_file_stays(grown: Store) -> None:
    """A catalog that is in use is not moved away from under its users."""
    user = Catalog.of(grown.path)
    inode = (grown.path / "catalog.db").stat().st_ino
    rebuild_catalog(grown)
    assert (grown.path / "catalog.db").stat().st_ino == inode
    user.record_checkpoint("run", CheckpointWritten("actor", 1, "later", "w", None, None, 1))
    user.close()
    assert "later" in [r["path"] for r in Catalog.of(grown.path).rows()["checkpoints"]]


@pytest.mark.more_but("sqlite*")
def test_a_segment_just_begun(grown: Store) -> None:
    """A file behind the watermark is not durable yet: nothing is noted of it, and it is in nobody's way."""
    before = _rows(grown)
    segment_path(grown.path / "lanes" / "train", 2).touch()
    rebuild_catalog(grown)
    assert _rows(grown) == before


def test_what_is_noted_meanwhile_stays(grown: Store) -> None:
    """An event appended and noted while the log is being read is in the rebuilt catalog."""
    appended: list[str] = []

    def append(_events: int) -> None:
        if not appended:
            record = CheckpointWritten("actor", 5, "meanwhile", "w5", None, None, 1)
            with grown.writer("another") as writer:
                writer.append([Event(record, "demo")]).result(30)
            catalog = Catalog.of(grown.path)
            catalog.record_checkpoint("demo", record)
            catalog.close()
            appended.append("meanwhile")

    done = rebuild_catalog(grown, append)
    assert done.events == sum(grown.head().values())
    catalog = Catalog.of(grown.path)
    assert "meanwhile" in [r["path"] for r in catalog.rows()["checkpoints"]]
    assert "another" in [r["name"] for r in catalog.rows()["lanes"]]
    catalog.close()


@pytest.mark.more_but("sqlite*")
def test_a_damaged_log_changes_nothing(grown: Store) -> None:
    """Where acknowledged events cannot be read, the catalog stays as it was."""
    before = _rows(grown)
    path = segment_path(grown.path / "lanes" / "train", 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"00000001\.wal"):
        rebuild_catalog(grown)
    assert _rows(grown) == before


def test_all_or_nothing(grown: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild that fails while it writes leaves the rows as they were."""
    before = _rows(grown)
    segment = segment_path(grown.path / "lanes" / "bulk", 4)
    header = segment.read_bytes()

    def break_header(events: int) -> None:
        # All events have been read; what is read now is where the segments begin.
        if events == sum(grown.head().values()):
            segment.write_bytes(b"\x00" * 64 + header[64:])

    with pytest.raises(CorruptionError, match=r"00000004\.wal"):
        rebuild_catalog(grown, break_header)
    segment.write_bytes(header)
    assert _rows(grown) == before


@pytest.mark.more_but("sqlite*")
def test_a_newer_catalog_is_not_rebuilt(grown: Store, raw: Engine) -> None:
    """A newer release may be using it: its tables are left alone."""
    with raw.begin() as connection:
        connection.exec_driver_sql("update alembic_version set version_num = '0099'")
        connection.exec_driver_sql("alter table units add column newer text")
    with pytest.raises(CatalogError, match="revision '0099'"):
        rebuild_catalog(grown)
    assert "newer" in [column["name"] for column in inspect(raw).get_columns("units")]


@pytest.mark.more_but("sqlite*")
def test_another_stores_catalog_is_not_rebuilt(grown: Store, raw: Engine) -> None:
    """Nor is one that belongs to another store."""
    before = _rows(grown)
    with raw.begin() as connection:
        connection.exec_driver_sql("update store_meta set store_id = 'another'")
    with pytest.raises(CatalogError, match="is that of store another, not of"):
        rebuild_catalog(grown)
    with raw.begin() as connection:
        connection.exec_driver_sql(f"update store_meta set store_id = '{grown.store_id}'")
    assert _rows(grown) == before


def _command(monkeypatch: Any, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rollbook", "store", "rebuild-catalog", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.mark.more_but("sqlite*")
def test_the_command_as_json(
    grown: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json stdout is one object; progress goes to stderr."""
    assert _command(monkeypatch, "--store", str(grown.path), "--json") == 0
    done = orjson.loads(capsys.readouterr().out)
    assert done.pop("seconds") >= 0
    assert done == {
        "catalog": Catalog.of(grown.path).name,
        "moved": None,
        "events": sum(grown.head().values()),
        "rows": {name: len(rows) for name, rows in _rows(grown).items()},
    }


@pytest.mark.more_but("sqlite*")
def test_the_command_for_people(grown: Store, monkeypatch: Any, capsys: Any, backend: str) -> None:
    """Without, it says what was there, what is there now, and where a broken file went."""
    if backend == "sqlite":
        _garbage(grown.path / "catalog.db")
    assert _command(monkeypatch, "--store", str(grown.path)) == 0
    out = capsys.readouterr().out
    assert re.search(rf"made anew from {sum(grown.head().values())} events in \d+\.\d s", out)
    assert "lanes 3, segments 7, units 2" in out
    moved = [line for line in out.splitlines() if "broken" in line]
    if backend == "sqlite":
        (aside,) = grown.path.glob("catalog.db.broken-*[0-9]")
        assert moved == [f"the catalog was broken; what was there is now {aside}"]
    else:
        assert moved == []
        assert catalog_url(grown.path).password not in out


@pytest.mark.more_but("sqlite*")
def test_the_command_on_what_it_cannot_do(
    grown: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A database that is away is one line and exit code 2."""
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", "sqlite:////nowhere/at/all/catalog.db")
    assert _command(monkeypatch, "--store", str(grown.path)) == 2
    err = capsys.readouterr().err
    assert "error: catalog sqlite:////nowhere/at/all/catalog.db: unable to open database file" in err
