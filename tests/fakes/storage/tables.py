"""A store's Iceberg tables as another program reads them, and the same rows by our own reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store import Event, Store
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.events import (
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnDelivered,
    TurnFailed,
    VersionSpan,
)
from rollbook.store.sealed.field_ids import SCALARS_SCHEMA
from rollbook.store.sealed.parquet import FAT_KINDS, TABLE_SCHEMA
from rollbook.store.sealed.unit import current_units, derived_folder, unsealed_start

NAMES = ("turns", "marks", "scalars")
ODD = np.array([0x7FC00001, 0xFFC12345, 0x80000000], np.uint32).view(np.float32)
"""Two NaN with payloads, and -0.0."""


def odd_events(*names: str) -> list[Event]:
    """A trajectory by each name, with all that readers confuse: NaN of several bits, -0.0, null lists beside
    empty ones, spans, texts of all kinds."""
    ids, none = np.array([5, 0, 7], np.int32), np.array([], np.int32)
    records: list[Any] = []
    for name in names:
        spans = (VersionSpan("actor", 3, 0, 2), VersionSpan("actor", 4, 2, 3))
        records += [
            TrajectoryOpened(name, name, "g", "task\u0000 é✓", "train"),
            turn_requested(name, f"{name}.0", root_reason="first_turn"),
            turn_completed(
                name, f"{name}.0", prompt_ids=ids, completion_ids=ids, logprobs=ODD, version_spans=spans
            ),
            TurnDelivered(name, f"{name}.0", "sent"),
            turn_completed(name, f"{name}.1", prompt_ids=none, completion_ids=none, logprobs=ODD[:0]),
            turn_completed(name, f"{name}.2", prompt_ids=ids, completion_ids=ids, logprobs=None),
            TurnFailed(name, f"{name}.3", "no such model"),
            RewardAssigned(name, None, -0.0, "agent"),
            TrajectoryFinished(name),
        ]
    return [Event(record, "demo") for record in records]


def append(store: Store, lane: str, events: list[Event]) -> None:
    """Append as one writer does, which then goes."""
    with store.writer(lane) as writer:
        writer.append(events).result(30)


def table_of(store: Store, name: str, properties: Mapping[str, str] | None = None) -> Table:
    """A table as anybody opens it who knows the catalog."""
    url = catalog_url(store.path).render_as_string(hide_password=False)
    return SqlCatalog("rollbook", uri=url, **(properties or {})).load_table(f"rollbook.{name}")


def planned(table: Table) -> list[str]:
    """Addresses of the files of the current snapshot."""
    return sorted(task.file.file_path for task in table.scan().plan_files())


def sealed_rows(store: Store, name: str) -> pa.Table:
    """What the table of that name is to hold of this host's lanes, by our own reader."""
    if name == "scalars":
        units = [unit for lane in store.own_lanes() for unit in current_units(store.path, lane)]
        folders = [derived_folder(store.path, unit) for unit in units if unit.dropped_us is None]
        tables = [pq.read_table(folder / "scalars.3.parquet") for folder in folders]
        return pa.concat_tables([SCALARS_SCHEMA.empty_table(), *tables])
    rows = store.table({lane: unsealed_start(store.path, lane).next_seq for lane in store.own_lanes()})
    fat = pc.is_in(rows["kind"], pa.array(FAT_KINDS))
    return rows.filter(fat if name == "turns" else pc.invert(fat))


def bits(name: str, rows: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table in an order of their own, each float as its bits."""
    schema = SCALARS_SCHEMA if name == "scalars" else TABLE_SCHEMA
    keys = ("turn_id", "seq", "completed_seq") if name == "scalars" else ("lane", "seq")
    rows = rows.select(schema.names).cast(schema)
    columns = {field.name: _plain(rows[field.name], field.type) for field in schema}
    found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return sorted(found, key=lambda row: [str(row[key]) for key in keys])


def _plain(column: pa.ChunkedArray, type_: pa.DataType) -> list[Any]:
    values = column.to_pylist()
    if type_ == pa.list_(pa.float32()):
        return [
            None if v is None else _bits_of(row.values, np.int32)
            for v, row in zip(values, column, strict=True)
        ]
    if pa.types.is_floating(type_):
        width = np.int32 if pa.types.is_float32(type_) else np.int64
        whole = _bits_of(column.combine_chunks(), width)
        return [None if v is None else b for v, b in zip(values, whole, strict=True)]
    return values


def _bits_of(floats: pa.Array, width: type[Any]) -> list[int]:
    """Read from the buffer: on the way through Python's floats the bits of a NaN may change."""
    size = np.dtype(width).itemsize
    buffer = floats.buffers()[1]
    whole = np.frombuffer(buffer, width)[floats.offset : floats.offset + len(floats)] if buffer else []
    assert len(whole) == len(floats), size
    return [int(bits) for bits in whole]


def _duckdb(paths: list[str]) -> pa.Table:
    import duckdb

    return duckdb.read_parquet(paths).to_arrow_table()


def _polars(paths: list[str]) -> pa.Table:
    import polars

    return polars.read_parquet(paths).to_arrow()


def _pyarrow(paths: list[str]) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in paths])


READERS: Mapping[str, Callable[[list[str]], pa.Table]] = {
    "duckdb": _duckdb,
    "polars": _polars,
    "pyarrow": _pyarrow,
}
"""Engine -> how it reads the planned files."""


def equal(store: Store, *names: str) -> None:
    """Check that the tables hold exactly what is sealed, by the files that they plan."""
    for name in names or NAMES:
        paths = planned(table_of(store, name))
        assert all(Path(path).is_file() for path in paths)
        assert len(paths) == len(set(paths))
        wanted = bits(name, sealed_rows(store, name))
        assert (bits(name, _pyarrow(paths)) if paths else []) == wanted, name
