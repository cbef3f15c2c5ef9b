"""What is noted of lanes, segments, units and checkpoints, and that the log never needs the catalog."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Engine, create_engine, event

from rollbook import store as rb
from rollbook.cli import app as cli
from rollbook.store import Event, Store
from rollbook.store.catalog import Catalog
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.errors import CatalogError, NotAStoreError
from rollbook.store.events import CheckpointWritten
from rollbook.store.sealed.unit import SealedFile, SealedSegment, Unit


def _unit(first: int, last: int, generation: int = 1) -> Unit:
    """A unit of segments with ten events and 1,000 bytes each."""
    segments = tuple(SealedSegment(n, (n - 1) * 10, 10, 1000, f"{n:032x}") for n in range(first, last + 1))
    file = SealedFile("marks.parquet", 10, 400, "sha")
    return Unit("a", generation, "00" * 16, segments, (file,), 1_700_000_000_000_000)


def _states(catalog: Catalog) -> list[tuple[Any, ...]]:
    return [(r["number"], r["state"], r["unit"], r["events"]) for r in catalog.rows()["segments"]]


def test_opening_a_lane_is_noted(store: Store, notes: Callable[..., list[Event]]) -> None:
    """The catalog has the lane's last writer, the closed segments it found, and the one it began."""
    for i in range(3):
        with store.writer("a") as writer:
            writer.append(notes(2 + i)).result(30)
    rows = Catalog.of(store.path).rows()
    assert [(r["name"], r["process"], r["truncated_bytes"]) for r in rows["lanes"]] == [("a", os.getpid(), 0)]
    size = [(store.path / "lanes" / "a" / f"{n:08d}.wal").stat().st_size for n in (1, 2)]
    closed = {"lane": "a", "state": "closed", "unit": None}
    assert rows["segments"] == [
        {"number": 1, "first_seq": 0, "events": 2, "bytes": size[0]} | closed,
        {"number": 2, "first_seq": 2, "events": 3, "bytes": size[1]} | closed,
        {"number": 3, "first_seq": 5, "events": None, "bytes": None} | closed | {"state": "open"},
    ]
    assert rows["store_meta"] == [{"store_id": store.store_id, "format": 1}]


def test_a_unit_is_noted_with_its_segments(store: Store) -> None:
    """A unit's row says what its manifest says; its segments are sealed, those of no unit are not."""
    catalog = Catalog.of(store.path)
    catalog.record_units("a", [_unit(1, 2)])
    assert catalog.rows()["units"] == [
        {
            "lane": "a",
            "name": "00000001-00000002.1",
            "first_segment": 1,
            "last_segment": 2,
            "generation": 1,
            "first_seq": 0,
            "next_seq": 20,
            "bytes": 400,
            "remote": None,
            "sealed_us": 1_700_000_000_000_000,
            "dropped_us": None,
            "chain": f"{2:032x}",
        }
    ]
    name = "00000001-00000002.1"
    assert _states(catalog) == [(1, "sealed", name, 10), (2, "sealed", name, 10)]
    assert [(r["name"], r["opened_us"]) for r in catalog.rows()["lanes"]] == [("a", None)]


def test_compaction_supersedes(store: Store) -> None:
    """A wider unit replaces those it was made of; their segments are in it."""
    catalog = Catalog.of(store.path)
    catalog.record_units("a", [_unit(1, 1), _unit(2, 3)])
    catalog.record_units("a", [_unit(1, 3, generation=2), _unit(4, 4)])
    assert [r["name"] for r in catalog.rows()["units"]] == ["00000001-00000003.2", "00000004-00000004.1"]
    assert {(n, unit) for n, _, unit, _ in _states(catalog)} == {
        *((n, "00000001-00000003.2") for n in (1, 2, 3)),
        (4, "00000004-00000004.1"),
    }


def test_upload_and_retention_are_noted(store: Store) -> None:
    """A unit that moved has its new place; of one that was dropped the numbers stay."""
    catalog = Catalog.of(store.path)
    catalog.record_units("a", [_unit(1, 1), _unit(2, 2)])
    gone = replace(_unit(1, 1), dropped_us=7)
    catalog.record_units("a", [gone, replace(_unit(2, 2), remote="s3://bucket/x")])
    rows = catalog.rows()["units"]
    assert [(r["dropped_us"], r["remote"]) for r in rows] == [(7, None), (None, "s3://bucket/x")]
    assert [state for _, state, _, _ in _states(catalog)] == ["dropped", "sealed"]


def test_a_unit_that_vanished_leaves_closed_segments(store: Store) -> None:
    """Where a unit is in no other one, its segments are only closed again."""
    catalog = Catalog.of(store.path)
    catalog.record_units("a", [_unit(1, 1), _unit(2, 2)])
    catalog.record_units("a", [_unit(1, 1)])
    assert _states(catalog) == [(1, "sealed", "00000001-00000001.1", 10), (2, "closed", None, 10)]


def test_lanes_units_do_not_mix(store: Store) -> None:
    """Noting one lane's units leaves another lane's alone, where the names are the same."""
    catalog = Catalog.of(store.path)
    catalog.record_units("a", [_unit(1, 1)])
    catalog.record_units("b", [replace(_unit(1, 1), lane="b")])
    catalog.record_units("b", [])
    assert [(r["lane"], r["name"]) for r in catalog.rows()["units"]] == [("a", "00000001-00000001.1")]
    segments = catalog.rows()["segments"]
    assert [(r["lane"], r["state"]) for r in segments] == [("a", "sealed"), ("b", "closed")]


def test_opening_a_lane_does_not_unseal(store: Store, notes: Callable[..., list[Event]]) -> None:
    """A writer that finds a sealed segment's file still there leaves the segment's state."""
    with store.writer("a") as writer:
        writer.append(notes(10)).result(30)
    catalog = Catalog.of(store.path)
    catalog.record_units("a", [_unit(1, 1)])
    store.writer("a").close()
    assert _states(catalog) == [(1, "sealed", "00000001-00000001.1", 10), (2, "open", None, None)]


def test_checkpoints_are_noted_once(store: Store) -> None:
    """A checkpoint is a row by its path; noting it again replaces the row. Text may be long."""
    catalog = Catalog.of(store.path)
    run = "r" * 1000
    for size in (1, 1 << 40):
        catalog.record_checkpoint(run, CheckpointWritten("actor", 1, "checkpoints/1", "w1", None, None, size))
    catalog.close()
    assert Catalog.of(store.path).rows()["checkpoints"] == [
        {
            "path": "checkpoints/1",
            "run": run,
            "policy": "actor",
            "policy_version": 1,
            "weights_digest": "w1",
            "bytes": 1 << 40,
        }
    ]


def test_rows_come_in_the_order_of_their_keys(store: Store) -> None:
    """Text sorts by code point, whatever the database's own collation."""
    catalog = Catalog.of(store.path)
    for name in ("é", "a", "B", "Z", "_"):
        catalog.record_checkpoint("run", CheckpointWritten("actor", 1, name, "w", None, None, 1))
    assert [r["path"] for r in catalog.rows()["checkpoints"]] == ["B", "Z", "_", "a", "é"]


def test_another_stores_catalog_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores cannot share a database: each would forget the other's lanes."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(store.path), prepend=",")
    Catalog.of(store.path).close()
    other = rb.open(tmp_path / "other", create=True)
    url = catalog_url(store.path).render_as_string(hide_password=False)
    (other.path / "store.toml").write_text(f'[catalog]\nurl = "{url}"\n')
    with pytest.raises(CatalogError, match=f"is that of store {store.store_id}, not of {other.store_id}"):
        Catalog.of(other.path)
    assert [r["store_id"] for r in Catalog.of(store.path).rows()["store_meta"]] == [store.store_id]


def test_the_environment_names_the_catalog(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ROLLBOOK_CATALOG_URL wins over the store's settings; a relative file lies in the store's folder."""
    monkeypatch.setenv("ROLLBOOK_CATALOG_URL", "sqlite:///elsewhere.db")
    monkeypatch.chdir(tmp_path)
    Catalog.of(store.path).close()
    assert (store.path / "elsewhere.db").exists()
    assert not (tmp_path / "elsewhere.db").exists()


def test_no_store_no_catalog(tmp_path: Path) -> None:
    """A folder that is no store has no catalog, and gets none."""
    with pytest.raises(NotAStoreError):
        Catalog.of(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_log_needs_no_catalog(story_store: Store, notes: Callable[..., list[Event]]) -> None:
    """Without its catalog a store loses nothing: reading makes no new one, and writing goes on."""
    before, head = story_store.table(), story_store.head()
    url = catalog_url(story_store.path)
    if url.database and url.get_backend_name() == "sqlite":
        for file in Path(url.database).parent.glob("catalog.db*"):
            file.unlink()
    (story_store.path / "store.toml").write_text('[catalog]\nurl = "sqlite:////nowhere/at/all/catalog.db"\n')
    opened = rb.open(story_store.path)
    assert opened.table().equals(before)
    assert rb.connect(story_store.path).execute("select count(*) from turns").fetchall() == [(4,)]
    with opened.writer("serve") as writer:
        assert writer.append(notes(1)).result(30) == head["serve"]
    assert opened.head() == head | {"serve": head["serve"] + 1}


def test_two_handles_write_at_once(store: Store) -> None:
    """Handles of several threads note things at the same time; none of it is lost or fails."""
    from concurrent.futures import ThreadPoolExecutor

    def note(handle: int) -> None:
        catalog = Catalog.of(store.path)
        for i in range(10):
            record = CheckpointWritten("actor", i, f"c/{handle}/{i}", "w", None, None, 1)
            catalog.record_checkpoint("run", record)
            catalog.record_units(f"lane-{i % 3}", [])
        catalog.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, range(4)))
    rows = Catalog.of(store.path).rows()
    assert len(rows["checkpoints"]) == 40
    assert [r["name"] for r in rows["lanes"]] == ["lane-0", "lane-1", "lane-2"]


def test_rows_are_of_one_moment(store: Store) -> None:
    """What another process notes between two tables' reading is in neither of them."""
    reader, writer = Catalog.of(store.path), Catalog.of(store.path)
    between: list[str] = []

    def write(_c: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "FROM checkpoints" in statement and statement.startswith("SELECT") and not between:
            between.append(statement)
            writer.record_units("a", [_unit(1, 1)])
            writer.record_checkpoint("run", CheckpointWritten("actor", 1, "c", "w", None, None, 1))

    event.listen(Engine, "before_cursor_execute", write)
    try:
        rows = reader.rows()
    finally:
        event.remove(Engine, "before_cursor_execute", write)
    assert between
    assert (rows["units"], rows["checkpoints"]) == ([], [])
    assert [len(reader.rows()[name]) for name in ("units", "checkpoints")] == [1, 1]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_sqlite_is_in_wal_mode(store: Store) -> None:
    """The default database lets readers read while one process writes."""
    Catalog.of(store.path).close()
    engine = create_engine(catalog_url(store.path))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("pragma journal_mode").scalar() == "wal"
    engine.dispose()
    assert catalog_url(store.path).database == str(store.path / "catalog.db")


@pytest.mark.more_but("sqlite*")
def test_info_as_json(
    story_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rollbook store info --json` prints the store's id, head, the catalog's place and its rows."""
    story_store.writer("train").close()
    monkeypatch.setattr(
        sys, "argv", ["rollbook", "store", "info", "--store", str(story_store.path), "--json"]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    info = orjson.loads(capsys.readouterr().out)
    assert (info["path"], info["id"]) == (str(story_store.path), story_store.store_id)
    assert info["head"] == rb.format_cut(story_store.head())
    assert info["catalog"] == Catalog.of(story_store.path).name
    assert [lane["name"] for lane in info["lanes"]] == ["serve", "train"]
    count = story_store.head()["train"]
    assert [(s["lane"], s["number"], s["state"], s["events"]) for s in info["segments"]] == [
        ("serve", 1, "open", None),
        ("train", 1, "closed", count),
        ("train", 2, "open", None),
    ]
    assert [info[name] for name in ("units", "checkpoints")] == [[], []]
    assert not {"steps", "consumers", "policy_versions"} & info.keys()


@pytest.mark.more_but("sqlite*")
def test_info_for_people(
    story_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --json the same is printed as tables; an empty one is left out."""
    catalog = Catalog.of(story_store.path)
    catalog.record_checkpoint("demo", CheckpointWritten("actor", 1, "checkpoints/1", "w1", None, None, 1))
    monkeypatch.setattr(sys, "argv", ["rollbook", "store", "info", "--store", str(story_store.path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"head     {rb.format_cut(story_store.head())}" in out
    assert story_store.store_id in out
    lines = out.splitlines()
    assert "checkpoints" in lines
    assert "units" not in lines
    assert "se/cr:et" not in out
    assert "se%2Fcr" not in out
