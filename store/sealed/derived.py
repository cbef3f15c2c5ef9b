"""Files derived from a sealed unit: scalars per turn and trajectory, rewards, outliers, locations.

They stand in `derived/<lane>/<unit>/` and only make questions faster: each can be deleted at any time, and
comes back the same. A file is written under another name and renamed, so one that is there is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from rollbook.store.ids import new_id
from rollbook.store.sealed import projections
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, derived_folder

SCALARS, TRAJECTORIES, REWARDS = "scalars.parquet", "trajectories.parquet", "rewards.parquet"
OUTLIERS, LOCATIONS = "outliers.parquet", "locations.arrow"
DERIVED = (SCALARS, TRAJECTORIES, REWARDS, OUTLIERS, LOCATIONS)
LOCATION_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string()),
        pa.field("file", pa.string()),
        pa.field("first_row", pa.int64()),
        pa.field("rows", pa.int64()),
    ]
)

_SMALL = ["seq", "event_id", "kind", "time", "run", "trajectory_id", "turn_id", "extra"]


def build_derived(store: Path, unit: Unit) -> list[str]:
    """Make the derived files that are missing; their names.

    Raises:
        CorruptionError: a sealed file cannot be read.
    """
    if unit.dropped_us is not None:
        return []
    folder = derived_folder(store, unit)
    missing = [name for name in DERIVED if not (folder / name).exists()]
    if not missing:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        temporary = folder / f".{name}.{new_id()}"
        _BUILDERS[name](store, unit, temporary)
        os.replace(temporary, folder / name)
    return missing


def _build_scalars(store: Path, unit: Unit, path: Path) -> None:
    turns = read_file(store, unit, TURNS)
    marks = read_file(store, unit, MARKS)
    query = projections.turn_parts("(SELECT * FROM turns UNION ALL SELECT * FROM marks)")
    _copy({"turns": turns, "marks": marks}, f"{query} ORDER BY trajectory_id, turn_id", path)


def _build_trajectories(store: Path, unit: Unit, path: Path) -> None:
    turns = read_file(store, unit, TURNS, ["lane", *_SMALL, "version_spans"])
    marks = read_file(store, unit, MARKS, ["lane", *_SMALL, "version_spans"])
    query = projections.trajectory_parts("(SELECT * FROM turns UNION ALL SELECT * FROM marks)")
    _copy({"turns": turns, "marks": marks}, f"{query} ORDER BY trajectory_id", path)


def _build_rewards(store: Path, unit: Unit, path: Path) -> None:
    marks = read_file(store, unit, MARKS, ["lane", *_SMALL, "reward"])
    _copy({"marks": marks}, f"{projections.rewards('marks')} ORDER BY trajectory_id, seq", path)


def _build_outliers(store: Path, unit: Unit, path: Path) -> None:
    columns = ["kind", "run", "trajectory_id", "turn_id", "policy", "policy_version"]
    turns = read_file(store, unit, TURNS, [*columns, "completion_ids", "logprobs", "version_spans"])
    query = projections.outliers("turns")
    _copy({"turns": turns}, f"{query} ORDER BY trajectory_id, turn_id, position", path)


def _copy(tables: dict[str, pa.Table], query: str, path: Path) -> None:
    with duckdb.connect(":memory:", config={"threads": 1}) as connection:
        for name, table in tables.items():
            connection.register(name, table)
        connection.execute(f"COPY ({query}) TO '{_quoted(path)}' (FORMAT parquet, COMPRESSION zstd)")


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _build_locations(store: Path, unit: Unit, path: Path) -> None:
    """Runs of rows with one trajectory: both files are sorted by it."""
    parts = []
    for name in (TURNS, MARKS):
        ids = read_file(store, unit, name, ["trajectory_id"])["trajectory_id"].combine_chunks()
        encoded = ids.dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy()
        starts = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1)) if len(codes) else codes
        rows = np.diff(np.append(starts, len(codes)))
        known = codes[starts] >= 0
        names = pa.DictionaryArray.from_arrays(pa.array(codes[starts][known]), encoded.dictionary)
        count = int(known.sum())
        columns = [names.cast(pa.string()), pa.array([name] * count, pa.string())]
        columns += [pa.array(starts[known].astype(np.int64)), pa.array(rows[known].astype(np.int64))]
        parts.append(pa.Table.from_arrays(columns, schema=LOCATION_SCHEMA))
    table = pa.concat_tables(parts).sort_by("trajectory_id").combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, LOCATION_SCHEMA) as writer:
        writer.write_table(table)


_BUILDERS: dict[str, Callable[[Path, Unit, Path], None]] = {
    SCALARS: _build_scalars,
    TRAJECTORIES: _build_trajectories,
    REWARDS: _build_rewards,
    OUTLIERS: _build_outliers,
    LOCATIONS: _build_locations,
}
