"""What engines read of the tables is what our own reader says, bit for bit; where one is wrong, how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.fakes.processes.ray_nodes import ray_nodes
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
from rollbook.store import Event, Store
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.events import TurnFailed
from rollbook.store.sealed import derived, parquet
from rollbook.store.sealed.field_ids import COLUMN_IDS, SCALARS_IDS, SCALARS_SCHEMA
from rollbook.store.tables.definitions import TABLES
from rollbook.store.tables.publish import publish_tables
from rollbook.store.upkeep.sealer import Sealer


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of two lanes, one of which has nothing but small events, and its tables; only read it."""
    store = rb.open(tmp_path_factory.mktemp("published") / "store", create=True)
    append(store, "a", odd_events("t1", "t2", "t3"))
    append(store, "b", odd_events("t4")[:1])
    assert Sealer(store).run_once().damage == {}
    publish_tables(store)
    return store


@pytest.mark.parametrize("engine", READERS)
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_reads_the_same_bits(published: Store, name: str, engine: str) -> None:
    """From the files that the table plans: NaN by its bits, null lists and empty ones apart."""
    wanted = bits(name, sealed_rows(published, name))
    assert len(wanted) == {"turns": 12, "marks": 16, "scalars": 12}[name]
    assert bits(name, READERS[engine](planned(table_of(published, name)))) == wanted


def test_the_rows_have_what_readers_confuse(published: Store) -> None:
    """NaN of two kinds, -0.0, a list that is empty and one that is not there."""
    rows = bits("turns", sealed_rows(published, "turns"))
    of_floats = [
        tuple(np.array(row["logprobs"], np.int32).view(np.uint32)) for row in rows if row["logprobs"]
    ]
    assert set(of_floats) == {(0x7FC00001, 0xFFC12345, 0x80000000)}
    assert {repr(row["logprobs"]) for row in rows} >= {"None", "[]"}
    assert {repr(row["version_spans"]) for row in rows} >= {"None", "[]"}


def test_polars_scans_the_table(published: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scan_iceberg` with its own reader."""
    import polars

    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    for name in NAMES:
        scan = polars.scan_iceberg(table_of(published, name), reader_override="native")
        assert bits(name, scan.collect().to_arrow()) == bits(name, sealed_rows(published, name)), name


def test_pyiceberg_makes_null_lists_of_structs_empty(published: Store) -> None:
    """Its own scan is equal but for that (iceberg-python 3833). Where this fails, a release has mended it:
    docs/tables.md then need not warn."""
    for name in NAMES:
        theirs = bits(name, table_of(published, name).scan().to_arrow())
        ours = bits(name, sealed_rows(published, name))
        if name != "scalars":
            assert theirs != ours, "mended: take the warning out of docs/tables.md"
            assert any(row["version_spans"] is None for row in ours)
            ours = [row | {"version_spans": row["version_spans"] or []} for row in ours]
        assert theirs == ours, name


def test_columns_are_numbered_in_files_as_in_tables(published: Store) -> None:
    """As Iceberg itself numbers a new table's, those within columns too; and each has its own type."""
    for definition in TABLES:
        table = table_of(published, definition.name)
        ids = SCALARS_IDS if definition.name == "scalars" else COLUMN_IDS
        assert {table.schema().find_column_name(number): number for number in ids.values()} == ids
        for path in planned(table):
            assert _numbers(pq.ParquetFile(path).schema_arrow) == ids
    assert sorted(COLUMN_IDS.values()) == list(range(1, 27))


def _numbers(schema: pa.Schema) -> dict[str, int]:
    found: dict[str, int] = {}

    def look(field: pa.Field, path: str) -> None:
        found[path] = int(field.metadata[b"PARQUET:field_id"])
        if pa.types.is_list(field.type):
            look(field.type.value_field, f"{path}.element")
        if pa.types.is_struct(field.type):
            for i in range(field.type.num_fields):
                look(field.type[i], f"{path}.{field.type[i].name}")

    for field in schema:
        look(field, field.name)
    return found


def test_the_scalars_are_those_that_are_derived(published: Store) -> None:
    """Their columns are said once for the files, and once for tables."""
    [path] = [path for path in planned(table_of(published, "scalars")) if "/a/" in path]
    assert pq.read_schema(path).remove_metadata().equals(SCALARS_SCHEMA)


def test_files_without_numbers_are_read_by_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that an earlier release sealed stand in one table with those of this one."""
    append(store, "a", odd_events("old"))
    with monkeypatch.context() as earlier:
        earlier.setattr(parquet, "numbered", lambda schema, ids: schema)
        earlier.setattr(derived, "SCALARS_IDS", {})
        [lane] = Sealer(store).run_once().lanes
    append(store, "a", odd_events("new"))
    Sealer(store).run_once()
    publish_tables(store)
    assert lane.sealed
    first, second = (planned(table_of(store, "turns"))[i] for i in (0, 1))
    assert b"PARQUET:field_id" not in (pq.read_schema(first).field("seq").metadata or {})
    assert b"PARQUET:field_id" in pq.read_schema(second).field("seq").metadata
    equal(store)
    scan = table_of(store, "turns").scan(selected_fields=("lane", "seq", "kind", "completion_ids"))
    assert scan.to_arrow().num_rows == 8


def test_a_bound_that_is_not_known_is_not_said(published: Store) -> None:
    """Texts and floats have none, so that erasure finds no text there and NaN needs no order."""
    [task] = [t for t in table_of(published, "marks").scan().plan_files() if "/a/" in t.file.file_path]
    bounded = {table_of(published, "marks").schema().find_column_name(i) for i in task.file.lower_bounds}
    assert bounded == {"lane", "seq", "kind", "time", "run", "trajectory_id", "turn_id"}
    assert task.file.record_count == 15


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    """Ray, on a cluster of this process's own."""
    ray = pytest.importorskip("ray")
    with ray_nodes():
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
def test_ray_reads_the_same_bits(published: Store, ray_here: Any, name: str) -> None:
    """Ray Data, over the planned files."""
    data = ray_here.data.read_parquet(planned(table_of(published, name)))
    rows = pa.concat_tables(ray_here.get(data.to_arrow_refs()))
    assert bits(name, rows) == bits(name, sealed_rows(published, name))


@pytest.mark.more
def test_rays_own_reader_of_tables_has_pyicebergs_fault(published: Store, ray_here: Any) -> None:
    """`read_iceberg` stands on pyiceberg's scan. Where this fails, docs/tables.md need not warn."""
    url = catalog_url(published.path).render_as_string()
    options = {"name": "rollbook", "type": "sql", "uri": url}
    data = ray_here.data.read_iceberg(table_identifier="rollbook.turns", catalog_kwargs=options)
    theirs = bits("turns", pa.concat_tables(ray_here.get(data.to_arrow_refs())))
    ours = bits("turns", sealed_rows(published, "turns"))
    assert theirs != ours
    assert theirs == [row | {"version_spans": row["version_spans"] or []} for row in ours]


def test_rows_behind_a_bound_too_long_to_be_said_are_planned(store: Store) -> None:
    """Parquet keeps no bounds of texts as long; the other row groups' would leave the file out."""
    long, short = "x" * 5000, [Event(TurnFailed("t", f"u{i}", "e"), "a") for i in range(600)]
    append(store, "a", [*short, Event(TurnFailed("u", "last", "e"), long)])
    Sealer(store).run_once()
    publish_tables(store)
    scan = table_of(store, "marks").scan(row_filter=f"run = '{long}'", selected_fields=("turn_id",))
    assert scan.to_arrow()["turn_id"].to_pylist() == ["last"]
    [task] = scan.plan_files()
    numbers = {table_of(store, "marks").schema().find_column_name(i) for i in task.file.lower_bounds}
    assert "run" not in numbers
    assert "turn_id" in numbers
