"""Whatever changes units, one commit has tables follow; a kill at any point is mended by the next call."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table
from tests.fakes.storage.tables import (
    NAMES,
    READERS,
    append,
    bits,
    equal,
    odd_events,
    planned,
    sealed_rows,
    table_of,
)

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.errors import LaneLockedError
from rollbook.store.sealed.derived import SCALARS
from rollbook.store.sealed.remote import remote_folder, remote_place
from rollbook.store.sealed.unit import current_units, derived_folder
from rollbook.store.settings import read_settings
from rollbook.store.tables import publish
from rollbook.store.tables.publish import CLAIM, PublishReport, publish_tables
from rollbook.store.upkeep.attach import attach
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.retain import retain
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.upload import upload_units

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage

FOLLOW = "[iceberg]\npublish = true\n[seal]\nkeep_wal_bytes = 0\n"


@pytest.fixture
def followed(store: Store) -> Store:
    """A store whose tables follow its units."""
    (store.path / "store.toml").write_text(FOLLOW)
    return store


def _seal(store: Store, *names: str, lane: str = "a") -> None:
    append(store, lane, odd_events(*names))
    report = Sealer(store).run_once()
    assert (report.damage, report.unpublished) == ({}, None)


def _counts(report: PublishReport) -> list[tuple[int, int, int]]:
    return [(table.files, table.added, table.removed) for table in report.tables]


def _snapshots(store: Store) -> list[int]:
    return [len(table_of(store, name).snapshots()) for name in NAMES]


def _operations(table: Table) -> list[str]:
    return [str(s.summary.operation.value) for s in table.snapshots() if s.summary is not None]


# By hand, and by the sealer -----------------------------------------------------------------------


def test_a_call_adds_what_is_new_and_a_second_one_nothing(store: Store) -> None:
    """Files and rows are counted, and where nothing is new there is no snapshot."""
    assert _counts(publish_tables(store)) == [(0, 0, 0)] * 3
    _seal(store, "t1")
    _seal(store, "t2", lane="b")
    report = publish_tables(store)
    assert [(t.table, t.rows) for t in report.tables] == [
        *(("rollbook.turns", 8), ("rollbook.marks", 10), ("rollbook.scalars", 8)),
    ]
    assert _counts(report) == [(2, 2, 0)] * 3
    equal(store)
    again = publish_tables(store)
    assert _counts(again) == [(2, 0, 0)] * 3
    assert [t.snapshot for t in again.tables] == [t.snapshot for t in report.tables]
    assert [t.metadata for t in again.tables] == [t.metadata for t in report.tables]
    assert _snapshots(store) == [1, 1, 1]


def test_many_files_come_in_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit each, and what a call that was cut short has committed is not done again."""
    for i in range(5):
        _seal(store, f"t{i}", lane=f"l{i}")
    monkeypatch.setattr(publish, "BATCH", 2)
    described = publish._described
    calls: list[int] = []

    def cut_short(*args: Any) -> Any:
        calls.append(len(args[3]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return described(*args)

    monkeypatch.setattr(publish, "_described", cut_short)
    with pytest.raises(KeyboardInterrupt):
        publish_tables(store)
    assert len(planned(table_of(store, "turns"))) == 4
    assert _counts(publish_tables(store)) == [(5, 1, 0), (5, 5, 0), (5, 5, 0)]
    assert calls == [2, 2, 1, 1, 2, 2, 1, 2, 2, 1]
    equal(store)


def test_the_sealer_publishes_what_it_seals_and_merges(
    followed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge is one snapshot that swaps the files, made before the old ones go."""
    for i in range(3):
        _seal(followed, f"t{i}")
        equal(followed)
    before = planned(table_of(followed, "turns"))
    assert (len(before), _snapshots(followed)) == (3, [3, 3, 3])
    commit = publish._commit
    there: list[bool] = []

    def looked_at(table: Table, added: Any, removed: Any, about: Any) -> None:
        there.extend(Path(file.file_path).exists() for file in removed)
        commit(table, added, removed, about)

    monkeypatch.setattr(publish, "_commit", looked_at)
    _seal(followed, "t3")
    assert there == [True] * 9
    equal(followed)
    table = table_of(followed, "turns")
    assert len(planned(table)) == 1
    assert _operations(table) == ["append"] * 3 + ["overwrite"]
    assert not any(Path(path).exists() for path in before)
    assert Sealer(followed).run_once().idle
    assert _snapshots(followed) == [4, 4, 4]


def test_a_sealer_with_nothing_to_do_asks_nobody(followed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows what it has published."""
    append(followed, "a", odd_events("t"))
    sealer = Sealer(followed)
    assert sealer.run_once().unpublished is None
    monkeypatch.setattr(publish, "publish_tables", lambda log: pytest.fail("asked again"))
    assert sealer.run_once().unpublished is None


def test_sealing_goes_on_without_tables(followed: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says why they are behind, and the next pass catches up."""
    append(followed, "a", odd_events("t"))
    with followed.claim(CLAIM, "try again"):
        monkeypatch.setattr(publish, "PATIENCE_S", 0.0)
        sealer = Sealer(followed)
        report = sealer.run_once()
    assert report.damage == {}
    assert report.unpublished is not None
    assert report.unpublished.startswith("tables are behind until the next pass: publishing tables in ")
    assert [lane.sealed for lane in report.lanes] == [["00000001-00000001.1"]]
    assert sealer.run_once().unpublished is None
    equal(followed)


# Erased, dropped, derived anew ----------------------------------------------------------------------


@pytest.mark.more_but("pyarrow")
@pytest.mark.parametrize("engine", READERS)
def test_erasure_swaps_and_an_old_snapshot_fails_loudly(followed: Store, engine: str) -> None:
    """The current snapshot has the rows without the text, an older one names files that are gone."""
    _seal(followed, "t1", "t2")
    planned_before = planned(table_of(followed, "turns"))
    [old] = table_of(followed, "turns").snapshots()
    assert erase_trajectory(followed, "t1", "asked").units
    equal(followed)
    assert _operations(table_of(followed, "turns"))[1:] == ["overwrite"]
    assert bits("turns", READERS[engine](planned(table_of(followed, "turns")))) == bits(
        "turns", sealed_rows(followed, "turns")
    )
    # Somebody who planned before and reads now.
    with pytest.raises((OSError, duckdb.IOException)):
        READERS[engine](planned_before)
    with pytest.raises(FileNotFoundError):
        table_of(followed, "turns").scan(snapshot_id=old.snapshot_id).to_arrow()


def test_no_text_is_in_the_metadata(followed: Store) -> None:
    """Erasure has nothing to look for there: bounds of columns with text are never written."""
    _seal(followed, "t1")
    data = b"".join(path.read_bytes() for path in (followed.path / "iceberg").rglob("*") if path.is_file())
    table = table_of(followed, "scalars")
    [task] = table.scan().plan_files()
    named = {table.schema().find_column_name(i) for i in [*task.file.lower_bounds, *task.file.upper_bounds]}
    assert not named & {"error", "requested_model", "root_reason", "finish_reason", "policy"}
    assert b"no such model" not in data


def test_retention_takes_files_out(followed: Store) -> None:
    """Dropped units are in no table; those that stay are."""
    _seal(followed, "t1", lane="a")
    _seal(followed, "t2", lane="b")
    report = retain(followed, "0s")
    assert [unit.dropped for unit in report.units if unit.lane in "ab"] == [True, True]
    equal(followed)
    assert planned(table_of(followed, "turns")) == []
    assert _operations(table_of(followed, "turns"))[-1] == "overwrite"
    _seal(followed, "t3", lane="b")
    equal(followed)
    assert len(planned(table_of(followed, "turns"))) == 1


def test_scalars_that_are_gone_are_derived(store: Store) -> None:
    """A derived file can be deleted; and one of another size than the table knows is registered again."""
    _seal(store, "t1")
    publish_tables(store)
    [unit] = current_units(store.path, "a")
    path = derived_folder(store.path, unit) / SCALARS
    data = path.read_bytes()
    path.unlink()
    assert _counts(publish_tables(store)) == [(1, 0, 0)] * 3
    assert path.read_bytes() == data
    pq.write_table(pq.read_table(path), path)  # as another release of DuckDB might write it
    assert path.stat().st_size != len(data)
    assert _counts(publish_tables(store)) == [(1, 0, 0), (1, 0, 0), (1, 1, 1)]
    [task] = table_of(store, "scalars").scan().plan_files()
    assert task.file.file_size_in_bytes == path.stat().st_size
    equal(store)


# Object storage -----------------------------------------------------------------------------------


def _to_s3(store: Store, storage: ObjectStorage, more: str = "") -> None:
    text = f'[remote]\nuri = "{storage.uri}"\nendpoint = "{storage.endpoint}"\n{more}'
    (store.path / "store.toml").write_text(text)


def _remote_rows(store: Store, paths: list[str]) -> pa.Table:
    settings = read_settings(store.path).remote
    tables = []
    for address in paths:
        system, path = remote_place(address, settings)
        tables.append(pq.read_table(path, filesystem=system))
    return pa.concat_tables(tables)


def test_units_that_move_are_named_where_they_are(store: Store, storage: ObjectStorage) -> None:
    """One commit names the objects, and the metadata goes there too, so that another host needs the catalog's
    database and no folder; scalars stay here."""
    (store.path / "store.toml").write_text(FOLLOW)
    _seal(store, "t1")
    _seal(store, "t2", lane="b")
    uuid = table_of(store, "turns").metadata.table_uuid
    _to_s3(store, storage, FOLLOW)
    upload_units(store)
    properties = {"s3.endpoint": storage.endpoint, "s3.region": "us-east-1"}
    base = remote_folder(storage.uri, store.store_id)
    for name in ("turns", "marks"):
        table = table_of(store, name, properties)
        assert _operations(table) == ["append", "append", "overwrite"]
        assert table.metadata_location.startswith(f"{base}/iceberg/{name}/metadata/0")
        assert all(path.startswith(f"{base}/sealed/") for path in planned(table))
        wanted = bits(name, sealed_rows(store, name))
        assert bits(name, _remote_rows(store, planned(table))) == wanted
        assert table.scan(selected_fields=("seq", "extra")).to_arrow().num_rows == len(wanted)
    assert table_of(store, "turns", properties).metadata.table_uuid == uuid
    equal(store, "scalars")
    _seal(store, "t3")
    turns = planned(table_of(store, "turns", properties))
    assert bits("turns", _remote_rows(store, turns)) == bits("turns", sealed_rows(store, "turns"))
    current = table_of(store, "turns", properties).current_snapshot()
    assert current is not None
    named = [current.manifest_list, *(m.manifest_path for m in current.manifests(table.io))]
    assert all(path.startswith(base) for path in named)


def test_polars_reads_the_objects(store: Store, storage: ObjectStorage) -> None:
    """By the addresses that the table plans."""
    import polars

    _to_s3(store, storage)
    _seal(store, "t1")
    publish_tables(store)
    properties = {"s3.endpoint": storage.endpoint, "s3.region": "us-east-1"}
    paths = planned(table_of(store, "turns", properties))
    options = {"aws_endpoint_url": storage.endpoint, "aws_region": "us-east-1", "aws_allow_http": "true"}
    rows = polars.read_parquet(paths, storage_options=options, glob=False).to_arrow()
    assert bits("turns", rows) == bits("turns", sealed_rows(store, "turns"))


def test_an_attached_store_has_tables_of_its_own(
    store: Store, storage: ObjectStorage, tmp_path: Path
) -> None:
    """They name the same objects, and nothing is written where it only reads."""
    _to_s3(store, storage)
    _seal(store, "t1")
    upload_units(store)
    keys = storage.objects()
    attach(tmp_path / "other", remote_folder(storage.uri, store.store_id), storage.endpoint)
    other = rb.open(tmp_path / "other")
    publish_tables(other)
    assert storage.objects() == keys
    properties = {"s3.endpoint": storage.endpoint, "s3.region": "us-east-1"}
    table = table_of(other, "turns", properties)
    assert table.metadata_location.startswith(f"{other.path}/iceberg/turns/")
    assert bits("turns", _remote_rows(store, planned(table))) == bits("turns", sealed_rows(store, "turns"))
    equal(other, "scalars")


# Killed, and at once ------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pyiceberg.catalog.sql import SqlCatalog
from rollbook import store as rb
from rollbook.store.tables import publish
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.sealer import Sealer

def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

at, what, folder = sys.argv[1:]
calls = []
def commit_table(self, table, requirements, updates, real=SqlCatalog.commit_table):
    calls.append(table.name())
    if len(calls) == 2 and at == "written":
        die()
    done = real(self, table, requirements, updates)
    if len(calls) == 2 and at == "committed":
        die()
    return done
SqlCatalog.commit_table = commit_table
if at == "before":
    publish._commit = die
store = rb.open(folder)
if what == "erase":
    erase_trajectory(store, "t1", "asked")
else:
    Sealer(store).run_once()
"""


@pytest.mark.more_but("before-0-merge", "written-1-erase")
@pytest.mark.parametrize("what", ["merge", "erase"])
@pytest.mark.parametrize(("at", "done"), [("before", 0), ("written", 1), ("committed", 2)])
def test_a_kill_is_mended_by_the_next_call(
    followed: Store, fork_python: Callable[..., subprocess.Popen[str]], at: str, done: int, what: str
) -> None:
    """Between the rewriting of files and the commit, within the commit of one of the tables, and behind it:
    no current snapshot names a file that is gone, and the next pass makes all of them equal."""
    for i in range(3):
        _seal(followed, f"t{i}")
    if what == "merge":
        append(followed, "a", odd_events("t3"))
    process = fork_python(KILLED, at, what, followed.path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -9, said
    for name in NAMES:
        assert all(Path(path).is_file() for path in planned(table_of(followed, name)))
    units = {f"{unit.lane}/{unit.name}" for unit in current_units(followed.path, "a")}
    assert any(unit.endswith(".2") for unit in units)
    report = publish_tables(followed)
    assert [table.removed for table in report.tables] == [0] * done + [3 if what == "merge" else 1] * (
        3 - done
    )
    equal(followed)
    if what == "erase":
        erase_trajectory(followed, "t1", "asked")
    assert Sealer(followed).run_once().unpublished is None
    equal(followed)


def test_two_that_publish_at_once_take_turns(store: Store) -> None:
    """Each file is in its table once."""
    for i in range(4):
        _seal(store, f"t{i}", lane=f"l{i}")
    reports: list[PublishReport] = []
    threads = [
        threading.Thread(target=lambda: reports.append(publish_tables(rb.open(store.path)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    added = [sum(table.added for table in report.tables) for report in reports]
    assert sorted(added) == [0, 0, 12]
    equal(store)


def test_who_waits_too_long_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is being done, and by which process."""
    monkeypatch.setattr(publish, "PATIENCE_S", 0.0)
    with (
        store.claim(CLAIM, "try again"),
        pytest.raises(LaneLockedError, match=r"publishing tables in .* is being done by process"),
    ):
        publish_tables(store)


def test_another_programs_commit_is_found_and_undone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who commits between our look and our commit makes us look again; what it added goes."""
    _seal(store, "t1")
    publish_tables(store)
    _seal(store, "t2", lane="b")
    commit, once = publish._commit, [True]

    def overtaken(table: Table, added: Any, removed: Any, about: Any) -> None:
        if once:
            once.clear()
            other = table_of(store, "turns")
            other.add_files(planned(other), check_duplicate_files=False)
        commit(table, added, removed, about)

    monkeypatch.setattr(publish, "_commit", overtaken)
    publish_tables(store)
    assert once == []
    equal(store)
