"""Writes and reads a unit's index of the trajectories it opens, by the hash of the client's name.

Hashes may collide, by chance or by a client's choice of names. Callers must check the name in
the trajectory's opening.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rollbook.store.events import TrajectoryOpened
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, Unit, derived_folder
from rollbook.store.wal.arrow_bytes import read_file as read_arrow_file

NAMES = "names.arrow"
NAME_SCHEMA = pa.schema([pa.field("hash", pa.uint64()), pa.field("trajectory_id", pa.string())])
KEPT_OPEN = 256
"""Units whose names a process keeps mapped."""
KEPT_FOUND = 8
"""Units whose names it keeps in memory, where they were not derived."""

Hashes = npt.NDArray[np.uint64]


def name_hash(run: str, name: str) -> int:
    """The 64-bit hash by which a client's name in a run is found."""
    return xxhash.xxh3_64_intdigest(f"{len(run)} {run} {name}".encode())


def names_of(marks: pa.Table) -> pa.Table:
    """The openings among a unit's small events, in the columns of `NAME_SCHEMA`, by hash.

    Args:
        marks: with columns `kind`, `run`, `trajectory_id`, `extra`.
    """
    opened = marks.filter(pc.equal(marks["kind"], TrajectoryOpened.KIND))
    rows = zip(opened["run"].to_pylist(), opened["extra"].to_pylist(), strict=True)
    hashes = pa.array([name_hash(run, orjson.loads(extra)["name"]) for run, extra in rows], pa.uint64())
    ids = opened["trajectory_id"].combine_chunks()
    return pa.Table.from_arrays([hashes, ids], schema=NAME_SCHEMA).sort_by("hash").combine_chunks()


class _Names:
    """A unit's names."""

    def __init__(self, table: pa.Table) -> None:
        self.hashes: Hashes = table["hash"].to_numpy()
        self.ids = table["trajectory_id"]

    def find(self, wanted: int) -> list[str]:
        first, end = (np.searchsorted(self.hashes, np.uint64(wanted), side) for side in ("left", "right"))
        return [self.ids[place].as_py() for place in range(int(first), int(end))]


@lru_cache(maxsize=KEPT_OPEN)
def _derived(path: str, _inode: int) -> _Names:
    with pa.memory_map(path) as source:
        table = read_arrow_file(source.read_buffer(), NAME_SCHEMA)
    if table.column("hash").null_count or table.column("trajectory_id").null_count:
        raise pa.ArrowInvalid(f"{path}: a name without a hash")
    return _Names(table)


@lru_cache(maxsize=KEPT_FOUND)
def _scanned_names(store: Path, unit: Unit) -> _Names:
    """The names of a unit that has no derived index, read from its own files."""
    return _Names(names_of(read_file(store, unit, MARKS, ["kind", "run", "trajectory_id", "extra"])))


def _names(store: Path, unit: Unit) -> _Names:
    path = str(derived_folder(store, unit) / NAMES)
    try:
        return _derived(path, os.stat(path).st_ino)
    except (FileNotFoundError, pa.ArrowException):
        return _scanned_names(store, unit)


def opened_in(store: Path, unit: Unit, run: str, name: str) -> list[str]:
    """Ids of the trajectories that the unit opens and that may have this client's name.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    return [] if unit.dropped_us is not None else _names(store, unit).find(name_hash(run, name))


def name_hashes(store: Path, unit: Unit) -> Hashes:
    """Hashes of the names that the unit opens trajectories by, sorted: uint64 [N].

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    return np.empty(0, np.uint64) if unit.dropped_us is not None else _names(store, unit).hashes
