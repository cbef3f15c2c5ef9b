"""Files derived from a sealed unit: scalars per turn and trajectory, rewards, outliers, what the ledger sums
up, what decides which trajectories may be trained, and the locations of trajectories, names and kinds.

They are in `derived/<lane>/<unit>/` and only make queries faster: each can be deleted at any
time, and is rebuilt identically. A file is written under another name and renamed, so a file
that exists is complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.ids import new_id
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.sealed import projections
from rollbook.store.sealed.field_ids import SCALARS_IDS
from rollbook.store.sealed.names import NAMES, names_of
from rollbook.store.sealed.parquet import read_file, row_group_ends
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, derived_folder
from rollbook.store.spill import private_database
from rollbook.store.wal.arrow_bytes import read_file as read_arrow_file

SCALARS, TRAJECTORIES, REWARDS = "scalars.3.parquet", "trajectories.4.parquet", "rewards.parquet"
OUTLIERS = "outliers.parquet"
PATHS, APART = "paths.parquet", "apart.parquet"
AMOUNTS, PLANS = "amounts.parquet", "plans.parquet"
LOCATIONS, KINDS, STANDINGS = "locations.arrow", "kinds.arrow", "standings.arrow"
"""A file whose columns change gets another name: what an older release derived goes, and is derived anew."""
QUERIED = (SCALARS, TRAJECTORIES, REWARDS, OUTLIERS)
"""Those that SQL reads; where one is missing it asks the log."""
SUMMED = (PATHS, APART, AMOUNTS, PLANS)
"""Those that save the ledger work: where one is missing it looks at more."""
DERIVED = (*QUERIED, *SUMMED, STANDINGS, LOCATIONS, NAMES, KINDS)
LOCATION_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string()),
        pa.field("file", pa.string()),
        pa.field("first_row", pa.int64()),
        pa.field("rows", pa.int64()),
    ]
)
KIND_SCHEMA = pa.schema([pa.field("kind", pa.string()), pa.field("row_group", pa.int64())])
STANDING_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in ("run", "trajectory_id", "group", "split", "status")),
        *(pa.field(name, pa.int64()) for name in ("opened", "finished")),
        pa.field("productive", pa.bool_()),
        pa.field("policies", pa.list_(pa.string())),
        pa.field("oldest", pa.list_(pa.int64())),
        *(pa.field(name, pa.list_(pa.string())) for name in ("sampled", "delivered")),
        pa.field("whole", pa.bool_()),
    ]
)
"""By trajectory; times in microseconds."""
PLAN_COLUMNS = ["seq", "event_id", "run", "policy", "policy_version", "step", "attempt", "samples"]

_BOTH = "(SELECT * FROM turns UNION ALL SELECT * FROM marks)"
_PARTS, _PATHS = "parts", "paths"
"""Tables of the unit's turns and paths, of which several files are made."""


def build_derived(store: Path, unit: Unit) -> list[str]:
    """Build the missing derived files; their names.

    Raises:
        CorruptionError: a sealed file cannot be read.
    """
    if unit.dropped_us is not None:
        return []
    folder = derived_folder(store, unit)
    missing = [name for name in DERIVED if not (folder / name).exists()]
    if not missing:
        return []
    make_folder(folder)
    for name in set(os.listdir(folder)) - set(DERIVED):
        if not name.startswith("."):  # of an older release
            (folder / name).unlink()
    tables = {TURNS: read_file(store, unit, TURNS), MARKS: read_file(store, unit, MARKS)}
    with _database(tables) as database:
        # Not as DuckDB's tables: it knows of these that a column has no null, and its files would say so.
        database.register(_PARTS, database.sql(projections.turn_parts(_BOTH)).to_arrow_table())
        database.register(_PATHS, database.sql(projections.paths(_BOTH, _PARTS)).to_arrow_table())
        for name in missing:
            temporary = make_empty(folder / f".{name}.{new_id()}")
            if name == LOCATIONS:
                ids = {name: table["trajectory_id"] for name, table in tables.items()}
                _write(locations(ids), temporary)
            elif name == NAMES:
                _write(names_of(tables[MARKS]), temporary)
            elif name == STANDINGS:
                _write(_standings(database, f"({projections.trajectory_parts(_BOTH)})", _PARTS), temporary)
            elif name == KINDS:
                _write(_kinds(tables[MARKS]["kind"], row_group_ends(store, unit, MARKS)), temporary)
            else:
                _copy(database, _queries()[name], temporary, SCALARS_IDS if name == SCALARS else {})
            os.replace(temporary, folder / name)
    return missing


@contextlib.contextmanager
def _database(tables: Mapping[str, pa.Table]) -> Iterator[duckdb.DuckDBPyConnection]:
    """One database for all files: opening it takes longer than deriving a small unit's file."""
    with private_database() as connection:
        connection.register("turns", tables[TURNS])
        connection.register("marks", tables[MARKS])
        yield connection


def _queries() -> dict[str, str]:
    """Derived file -> its query over the unit's two files, `turns` and `marks`, and what is made of them."""
    return {
        SCALARS: f"SELECT * FROM {_PARTS} ORDER BY trajectory_id, turn_id",
        TRAJECTORIES: f"{projections.trajectory_parts(_BOTH)} ORDER BY trajectory_id",
        REWARDS: f"{projections.rewards('marks')} ORDER BY trajectory_id, seq",
        OUTLIERS: f"{projections.outliers('turns')} ORDER BY trajectory_id, turn_id, position",
        PATHS: f"SELECT * FROM {_PATHS} ORDER BY trajectory_id, policy, policy_version",
        APART: f"{projections.apart(_PARTS, _PATHS)} ORDER BY trajectory_id, turn_id",
        AMOUNTS: f"{projections.amounts(_PARTS)} ORDER BY ALL",
        PLANS: f"{projections.plans('marks')} ORDER BY seq",
    }


def _copy(database: duckdb.DuckDBPyConnection, query: str, path: Path, ids: Mapping[str, int]) -> None:
    options = "FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false"
    if ids:
        options += f", FIELD_IDS {{{', '.join(f'{name}: {number}' for name, number in ids.items())}}}"
    database.execute(f"COPY ({query}) TO '{_quoted(path)}' ({options})")


def _quoted(path: Path) -> str:
    """A path as it stands in SQL between quotes."""
    return str(path).replace("'", "''")


def _standings(database: duckdb.DuckDBPyConnection, trajectories: str, parts: str) -> pa.Table:
    query = f"{projections.standings(trajectories, parts)} ORDER BY trajectory_id"
    return database.sql(query).to_arrow_table().cast(STANDING_SCHEMA).combine_chunks()


def standings_of(events: pa.Table) -> pa.Table:
    """How far the trajectories of some events have come, in the columns of `STANDING_SCHEMA`."""
    with _database({TURNS: events, MARKS: events.slice(0, 0)}) as database:
        parts = (projections.trajectory_parts("turns"), projections.turn_parts("turns"))
        return _standings(database, *(f"({query})" for query in parts))


def unit_standings(store: Path, unit: Unit) -> pa.Table:
    """The unit's standings, in the columns of `STANDING_SCHEMA`: as they were derived, or made anew.

    Raises:
        CorruptionError: a sealed file cannot be read.
    """
    if unit.dropped_us is not None:
        return STANDING_SCHEMA.empty_table()
    folder = derived_folder(store, unit)
    missing = contextlib.suppress(FileNotFoundError, pa.ArrowException)
    with missing, pa.memory_map(str(folder / STANDINGS)) as source:
        return read_arrow_file(source.read_buffer(), STANDING_SCHEMA)
    with contextlib.suppress(duckdb.Error), private_database() as database:
        # An older release derived these; to read them costs less than the events.
        files = (folder / TRAJECTORIES, folder / SCALARS)
        return _standings(database, *(f"read_parquet('{_quoted(file)}')" for file in files))
    return standings_of(pa.concat_tables(read_file(store, unit, name) for name in (TURNS, MARKS)))


def unit_plans(store: Path, unit: Unit) -> pa.Table | None:
    """What the unit's planned steps named, in the columns `PLAN_COLUMNS`; None where that was not derived."""
    with contextlib.suppress(OSError, pa.ArrowException):
        path = derived_folder(store, unit) / PLANS
        with pq.ParquetFile(path) as file:
            return file.read(columns=PLAN_COLUMNS, use_threads=False)
    return None


def locations(ids: Mapping[str, pa.ChunkedArray]) -> pa.Table:
    """Where each trajectory lies in a unit's files, in the columns of `LOCATION_SCHEMA`, by trajectory.

    Args:
        ids: file -> the trajectory of each of its rows. Both files are sorted by it.
    """
    parts = []
    for name, column in ids.items():
        encoded = column.combine_chunks().dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy()
        starts = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1)) if len(codes) else codes
        rows = np.diff(np.append(starts, len(codes)))
        known = codes[starts] >= 0
        names = pa.DictionaryArray.from_arrays(pa.array(codes[starts][known]), encoded.dictionary)
        count = int(known.sum())
        columns = [names.cast(pa.string()), pa.array([name] * count, pa.string())]
        columns += [pa.array(starts[known].astype(np.int64)), pa.array(rows[known].astype(np.int64))]
        parts.append(pa.Table.from_arrays(columns, schema=LOCATION_SCHEMA))
    return pa.concat_tables(parts).sort_by("trajectory_id").combine_chunks()


def _kinds(kinds: pa.ChunkedArray, ends: Sequence[int]) -> pa.Table:
    """Each kind with each row group that holds one of it, in the columns of `KIND_SCHEMA`."""
    groups = np.searchsorted(np.asarray(ends, np.int64), np.arange(len(kinds)), side="right")
    both = pa.Table.from_arrays([kinds, pa.array(groups, pa.int64())], schema=KIND_SCHEMA)
    pairs = both.group_by(KIND_SCHEMA.names).aggregate([])
    return pairs.sort_by([(name, "ascending") for name in KIND_SCHEMA.names]).combine_chunks()


def _write(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
