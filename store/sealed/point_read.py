"""Reads one trajectory's rows out of sealed units: by its location, only the row groups that hold it."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.errors import CorruptionError
from rollbook.store.events import BodyStored
from rollbook.store.sealed.derived import KIND_SCHEMA, KINDS, LOCATION_SCHEMA, LOCATIONS, locations
from rollbook.store.sealed.parquet import FAT_KINDS, TABLE_SCHEMA, checked_parquet, damaged, read_file
from rollbook.store.sealed.remote import place
from rollbook.store.sealed.unit import MARKS, MOST, TURNS, Unit, derived_folder
from rollbook.store.wal.arrow_bytes import read_file as read_arrow_file

KEPT_OPEN = 256
"""Sealed files that a process keeps open, and units whose locations it keeps mapped."""
KEPT_READ = 4
"""Parts of files that it keeps in memory: trajectories that follow each other share their row groups."""
TOGETHER_BYTES = 16 << 20
"""Size of the row groups, in a file, that are read at a time."""
KEPT_FOUND = 8
"""Units whose locations it keeps in memory, where they were not derived."""
_SMALL = [name for name in TABLE_SCHEMA.names if not pa.types.is_list(TABLE_SCHEMA.field(name).type)]
"""Columns that the rows of small kinds use: no tokens."""
_NO_ROWS = pa.Table.from_batches([], TABLE_SCHEMA)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first <= i < first + rows` of one of a unit's files."""

    file: str
    first: int
    rows: int


class _Locations:
    """A unit's table of where each trajectory lies."""

    def __init__(self, table: pa.Table, path: object) -> None:
        bounds = [pc.min_max(table.column(name)).as_py() for name in ("first_row", "rows")]
        within = all((b["min"] or 0) >= 0 and (b["max"] or 0) < MOST for b in bounds)
        if not within or not set(table.column("file").unique().to_pylist()) <= {TURNS, MARKS}:
            raise pa.ArrowInvalid(f"{path}: rows that no unit has")
        self._ids, self._files, self._first, self._rows = (c.combine_chunks() for c in table.columns)
        self.lowest: str = self._ids[0].as_py() if len(self._ids) else "~"
        self.highest: str = self._ids[-1].as_py() if len(self._ids) else ""

    @cached_property
    def _of_turns(self) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Id, first row and number of rows of each trajectory in the file of turns, by id."""
        at = pc.indices_nonzero(pc.equal(self._files, TURNS))
        ids = np.array(
            [trajectory_id.encode() for trajectory_id in self._ids.take(at).to_pylist()], np.bytes_
        )
        return ids, self._first.take(at).to_numpy(), self._rows.take(at).to_numpy()

    def spans(self, wanted: Iterable[str]) -> npt.NDArray[np.int64]:
        """First and last row in the file of turns of those trajectories that have any: int64 [M, 2]."""
        ids, first, rows = self._of_turns
        wanted_ids = np.array(sorted({trajectory_id.encode() for trajectory_id in wanted}), np.bytes_)
        if not len(ids) or not len(wanted_ids):
            return np.empty((0, 2), np.int64)
        at = np.minimum(np.searchsorted(ids, wanted_ids), len(ids) - 1)
        at = at[ids[at] == wanted_ids]
        return np.stack([first[at], first[at] + rows[at] - 1], axis=1)

    def find(self, trajectory_id: str) -> list[Run]:
        """Where the trajectory's rows are, in the unit's own files."""
        if not self.lowest <= trajectory_id <= self.highest:
            return []
        at = bisect_left(range(len(self._ids)), trajectory_id, key=lambda i: self._ids[i].as_py())
        runs: list[Run] = []
        while at < len(self._ids) and self._ids[at].as_py() == trajectory_id:
            runs.append(Run(self._files[at].as_py(), self._first[at].as_py(), self._rows[at].as_py()))
            at += 1
        return runs


@lru_cache(maxsize=KEPT_OPEN)
def _locations_path(store: Path, unit: Unit) -> str:
    return str(derived_folder(store, unit) / LOCATIONS)


@lru_cache(maxsize=KEPT_OPEN)
def _derived_locations(path: str, _inode: int) -> _Locations:
    with pa.memory_map(path) as source:
        return _Locations(read_arrow_file(source.read_buffer(), LOCATION_SCHEMA), path)


@lru_cache(maxsize=KEPT_FOUND)
def _found_locations(store: Path, unit: Unit) -> _Locations:
    """The locations of a unit without a valid derived file, computed from its own files."""
    ids = {name: read_file(store, unit, name, ["trajectory_id"])["trajectory_id"] for name in (TURNS, MARKS)}
    return _Locations(locations(ids), unit.name)


class _OpenFile:
    """A sealed file kept open, its footer read once, and the rows its groups end with."""

    def __init__(self, store: Path, unit: Unit, name: str) -> None:
        system, folder = place(store, unit)
        source = system.open_input_file(f"{folder}/{name}")
        self._file = checked_parquet(source, at_once=unit.remote is not None)
        footer = self._file.metadata
        self._ends = np.cumsum([footer.row_group(i).num_rows for i in range(footer.num_row_groups)])
        self._columns = None if name == TURNS else _SMALL

    def groups(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The row group of each row."""
        return np.searchsorted(self._ends, rows, side="right")

    def read_together(
        self, groups: Sequence[int], columns: Sequence[str]
    ) -> Iterator[tuple[list[int], list[int], pa.Table]]:
        """Columns of whole row groups, some at a time: which, how many rows each has, and their rows."""
        footer, some, size = self._file.metadata, list[int](), 0
        for group in groups:
            size += footer.row_group(group).total_byte_size
            some.append(group)
            if size >= TOGETHER_BYTES or group == groups[-1]:
                table = self._file.read_row_groups(some, columns=list(columns), use_threads=False)
                yield some, [footer.row_group(i).num_rows for i in some], table.select(columns)
                some, size = [], 0

    def of_kinds(self, kinds: Sequence[str], groups: Sequence[int] | None) -> pa.Table:
        """All rows of these kinds; `groups` are the row groups that hold one, if that is known."""
        wanted = pa.array(kinds)
        if groups is None:
            every = self._file.read(columns=["kind"], use_threads=False)["kind"]
            groups = np.unique(self.groups(pc.indices_nonzero(pc.is_in(every, wanted)).to_numpy())).tolist()
        table = self._file.read_row_groups(groups, columns=self._columns, use_threads=False)
        return _all_columns(table.filter(pc.is_in(table["kind"], wanted)))

    def read(self, run: Run) -> pa.Table:
        first, last = self.groups(np.array([run.first, run.first + run.rows - 1]))
        before = int(self._ends[first - 1]) if first else 0
        table = _row_groups(self, int(first), int(last))
        return _all_columns(table.slice(run.first - before, run.rows))

    def read_groups(self, first: int, last: int) -> pa.Table:
        """The row groups from one to another."""
        groups = range(first, last + 1)
        return self._file.read_row_groups(groups, columns=self._columns, use_threads=False)


def _all_columns(table: pa.Table) -> pa.Table:
    """The rows in the columns of `TABLE_SCHEMA`; those that were not read are null."""
    have = set(table.schema.names)
    columns = [
        table.column(f.name) if f.name in have else pa.nulls(table.num_rows, f.type) for f in TABLE_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=TABLE_SCHEMA)


@lru_cache(maxsize=KEPT_READ)
def _row_groups(file: _OpenFile, first: int, last: int) -> pa.Table:
    return file.read_groups(first, last)


@lru_cache(maxsize=KEPT_OPEN)
def _open_file(store: Path, unit: Unit, name: str) -> _OpenFile:
    return _OpenFile(store, unit, name)


def _known_locations(store: Path, unit: Unit) -> _Locations | None:
    """Where the unit's trajectories lie; None where that was not derived."""
    path = _locations_path(store, unit)
    try:
        return _derived_locations(path, os.stat(path).st_ino)
    except (FileNotFoundError, pa.ArrowException):
        return None


def trajectory_bounds(store: Path, unit: Unit) -> tuple[str, str] | None:
    """The lowest and highest trajectory id in a unit; None where its locations were not derived."""
    known = _known_locations(store, unit)
    return None if known is None else (known.lowest, known.highest)


def trajectory_rows(store: Path, unit: Unit, trajectory_id: str) -> pa.Table:
    """The unit's rows of a trajectory, in the order of the lane, in the columns of `TABLE_SCHEMA`.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    if unit.dropped_us is not None:
        return _NO_ROWS
    known = _known_locations(store, unit)
    if known is not None:
        rows = _rows_at(store, unit, known.find(trajectory_id))
        if pc.all(pc.equal(rows["trajectory_id"], trajectory_id)).as_py() is not False:
            return rows
        # The derived file is of something else.
    return _rows_at(store, unit, _found_locations(store, unit).find(trajectory_id))


def row_groups_of(store: Path, unit: Unit, trajectories: Iterable[str], *, derived: bool = True) -> list[int]:
    """The row groups of the unit's turns that hold rows of these trajectories.

    Args:
        derived: use the derived file, if there is one; otherwise the unit's own.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    known = _known_locations(store, unit) if derived else None
    known = known or _found_locations(store, unit)
    groups: set[int] = set()
    for first, last in _open_file(store, unit, TURNS).groups(known.spans(trajectories)):
        groups.update(range(int(first), int(last) + 1))
    return sorted(groups)


def read_row_groups(
    store: Path, unit: Unit, groups: Sequence[int], columns: Sequence[str]
) -> Iterator[tuple[list[int], list[int], pa.Table]]:
    """Columns of row groups of the unit's turns, about `TOGETHER_BYTES` at a time, which takes less than
    each by itself: which row groups, how many rows each of them has, and all their rows.

    Raises:
        pa.ArrowException, OSError: the file is missing or damaged.
    """
    return _open_file(store, unit, TURNS).read_together(groups, columns)


def _rows_at(store: Path, unit: Unit, runs: list[Run]) -> pa.Table:
    if not runs:  # as in most units
        return _NO_ROWS
    parts = []
    for run in runs:
        try:
            parts.append(_open_file(store, unit, run.file).read(run))
        except (pa.ArrowException, OSError) as error:
            raise damaged(store, unit, run.file, error) from error
    return _in_lane_order(pa.concat_tables(parts))


def kinds_of_marks(store: Path, unit: Unit) -> Mapping[str, list[int]] | None:
    """Kind of the unit's small events -> the row groups that hold one; None where that was not derived."""
    path = str(derived_folder(store, unit) / KINDS)
    try:
        return _derived_kinds(path, os.stat(path).st_ino)
    except (FileNotFoundError, pa.ArrowException):
        return None


def _kind_groups(store: Path, unit: Unit, kinds: Collection[str]) -> list[int] | None:
    known = kinds_of_marks(store, unit)
    return None if known is None else sorted({group for kind in kinds for group in known.get(kind, ())})


@lru_cache(maxsize=KEPT_OPEN)
def _derived_kinds(path: str, _inode: int) -> dict[str, list[int]]:
    with pa.memory_map(path) as source:
        table = read_arrow_file(source.read_buffer(), KIND_SCHEMA)
    groups: dict[str, list[int]] = {}
    for kind, group in zip(table["kind"].to_pylist(), table["row_group"].to_pylist(), strict=True):
        groups.setdefault(kind, []).append(group)
    return groups


def _in_lane_order(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.argsort(table.column("seq").to_numpy()))) if table.num_rows else table


def rows_of_kinds(store: Path, unit: Unit, kinds: Collection[str]) -> pa.Table:
    """The unit's rows of these kinds, in the order of the lane, in the columns of `TABLE_SCHEMA`.

    Only the row groups that hold one are read: rows of no trajectory are stored together.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    if unit.dropped_us is not None:
        return _NO_ROWS
    fat = set(kinds) & set(FAT_KINDS)
    parts = [_NO_ROWS]
    for name, wanted in ((TURNS, fat), (MARKS, set(kinds) - fat)):
        groups = _kind_groups(store, unit, wanted) if name == MARKS else None
        if wanted and unit.file(name) is not None and groups != []:
            try:
                parts.append(_open_file(store, unit, name).of_kinds(sorted(wanted), groups))
            except (pa.ArrowException, OSError) as error:
                raise damaged(store, unit, name, error) from error
    return _in_lane_order(pa.concat_tables(parts))


def unit_body(store: Path, unit: Unit, digest: str) -> Any:
    """A body that a request in the unit refers to.

    Raises:
        CorruptionError: the unit does not hold it.
    """
    extras, places = _bodies(store, unit)
    if digest not in places:
        raise CorruptionError(f"an event refers to body {digest}, which its sealed unit does not hold")
    return orjson.loads(extras[places[digest]].as_py())["body"]


@lru_cache(maxsize=1)  # a trajectory's bodies are asked for one after the other; they may be large
def _bodies(store: Path, unit: Unit) -> tuple[pa.ChunkedArray, dict[str, int]]:
    """(the unit's bodies as stored, digest -> place)"""
    marks = read_file(store, unit, MARKS, ["kind", "extra"])
    extras = marks.filter(pc.equal(marks["kind"], BodyStored.KIND))["extra"]
    return extras, {_digest(extra): place for place, extra in enumerate(extras.to_pylist())}


def _digest(extra: str) -> str:
    """The digest that a stored body has; it is written first, so that the body need not be parsed."""
    head = '{"digest":"'
    if extra.startswith(head):
        return extra[len(head) :].partition('"')[0]
    return str(orjson.loads(extra)["digest"])
