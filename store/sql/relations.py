"""The relations that the views read: sealed files and the live tail of every lane, at one cut.

| relation of schema `internal` | rows |
|---|---|
| `turn_events` | the log's `turn.requested` and `turn.completed` events: the fat ones |
| `mark_events` | all other events |
| `turn_scalars`, `trajectory_scalars` | one per turn, per trajectory: all that is small about it |
| `rewards` | one per reward |
| `paths` | one per version that sampled turns of a single-path trajectory, whole in a unit |
| `apart_parts` | what a unit or the live tail says of a turn, of all but those in `paths`, perhaps of more |
| `amounts` | one or more per run and version: how much it sampled |
| `plans` | one per planned step: what it named |
| `tokens`, `outliers` | one per sampled token; only those below a logprob |

Data in a unit's derived files is read from there; unsealed events, units that a cut holds in
part, and units without a derived file go through the same queries that made those files.

A view is created when a query first names it.

DuckDB plans a view when it is created. Planning all of them takes a fifth of a second in an
empty store, and in a long one reads footers of files that the query at hand does not need.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

from rollbook.store.cut import Cut
from rollbook.store.events.event import kinds_where
from rollbook.store.sealed.derived import (
    AMOUNTS,
    APART,
    OUTLIERS,
    PATHS,
    PLANS,
    QUERIED,
    REWARDS,
    SCALARS,
    TRAJECTORIES,
)
from rollbook.store.sealed.parquet import FAT_KINDS
from rollbook.store.sealed.point_read import kinds_of_marks, trajectory_bounds
from rollbook.store.sealed.projections import (
    amounts,
    outliers,
    plans,
    rewards,
    tokens,
    trajectory_parts,
    trajectory_scalars,
    turn_parts,
    turn_scalars,
)
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, derived_folder, unit_folder
from rollbook.store.sql.columns import literal

INTERNAL = "internal"
"""Schema of the relations; in a schema of their own they are not listed among the views."""
LIVE = "live"
"""Name there of the Arrow table with what is in no sealed unit; it has the log's columns, lane first."""

KEY = "key"
"""The column that was added last to the derived rewards."""

MOST_BRANCHES = 4
"""More queries in a relation would take longer to plan than they save: each reads a file's footer."""
LEAST_FILES = 2
"""Minimum files of a relation's query. DuckDB inspects every row group of a query over a single file whenever
it plans any query, even one that does not read the file."""

_MERGED = "* REPLACE (false AS whole)"
"""Computed rows are marked as not whole, so that they are always merged: otherwise the query would be planned
and run twice, once for whole rows and once for the others."""

_PATH_COLUMNS = {
    **dict.fromkeys(("run", "trajectory_id", "split", "leaf_turn_id", "policy"), "VARCHAR"),
    **dict.fromkeys(("policy_version", "turns", "tokens"), "BIGINT"),
}
NO_PATHS = f"SELECT {', '.join(f'NULL::{t} AS {n}' for n, t in _PATH_COLUMNS.items())} WHERE false"
"""`paths` where no unit has that file."""

AMONG = "trajectory_id IN (SELECT unnest($ids::VARCHAR[])) AND trajectory_id BETWEEN $first AND $last"
"""A condition: of some trajectories, with the parameters that `among` gives. The bounds say nothing new, but
DuckDB passes over the row groups outside of them, where a list alone has it read every one."""

_FAT = ", ".join(f"'{kind}'" for kind in FAT_KINDS)
_MARKS = kinds_where(lambda properties: not properties.fat)
_TRAINING = frozenset(kinds_where(lambda properties: properties.of in ("policy", "run")))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cut's contents: whole sealed units, one unit per lane that the cut may hold in part, and
    the live tail.

    `live` is false if nothing is unsealed: then queries leave the live tail out, which halves
    planning time.
    """

    store: Path
    whole: tuple[Unit, ...]
    parts: tuple[tuple[Unit, int], ...]
    live: bool = True

    def sealed_to(self) -> dict[str, int]:
        """Lane -> sequence number from which its events are not in these units."""
        ends = {unit.lane: unit.next_seq for unit in self.whole}
        return ends | {unit.lane: end for unit, end in self.parts}

    def folders(self) -> list[str]:
        """Where the relations' files are: here, and the lanes' folders in object storage."""
        units = (*self.whole, *(unit for unit, _ in self.parts))
        away = {unit.remote.rsplit("/", 1)[0] for unit in units if unit.remote is not None}
        return [str(self.store / "sealed"), str(self.store / "derived"), *away]

    def is_remote(self) -> bool:
        """Whether some of their files are in object storage."""
        units = (*self.whole, *(unit for unit, _ in self.parts))
        return any(unit.remote is not None and unit.dropped_us is None for unit in units)


def snapshot(store: Path, cut: Cut, units: Mapping[str, Sequence[Unit]]) -> Snapshot:
    """Of these units of each lane, those that hold the cut's events. Pure."""
    whole: list[Unit] = []
    parts: list[tuple[Unit, int]] = []
    for lane, end in sorted(cut.items()):
        for unit in units.get(lane, ()):
            if unit.next_seq <= end:
                whole.append(unit)
            elif unit.first_seq < end and unit.dropped_us is None:
                parts.append((unit, end))
    return Snapshot(store, tuple(whole), tuple(parts))


def file_path(store: Path, unit: Unit, name: str) -> str:
    """Where DuckDB finds a unit's file: a path or an s3:// address."""
    return f"{unit.remote or unit_folder(store, unit)}/{name}"


def among(ids: Iterable[str]) -> dict[str, Any]:
    """The parameters of `AMONG` for these trajectories."""
    listed = sorted(set(ids))
    return {"ids": listed, "first": listed[0] if listed else "", "last": listed[-1] if listed else ""}


def definitions(contents: Snapshot) -> list[tuple[str, str]]:
    """(name, query) of every relation, each after those it reads. Pure but for looking which files exist."""
    present = [unit for unit in contents.whole if unit.dropped_us is None]
    derived = [unit for unit in present if _has(contents, unit, *QUERIED)]
    rest = [unit for unit in present if unit not in derived]
    fat, small = f"kind IN ({_FAT})", f"kind NOT IN ({_FAT})"
    several = [unit for unit in present if unit.several]
    computed = contents.live or contents.parts or rest or not derived

    def ready(name: str) -> str | None:
        files = [str(derived_folder(contents.store, unit) / name) for unit in derived]
        return _read(files) if files else None

    def known(name: str, query: str, columns: str = "*") -> str:
        queries = [f"SELECT {columns} FROM ({query})"] if computed else []
        queries += [f"SELECT * FROM {files}"] if (files := ready(name)) else []
        return " UNION ALL BY NAME ".join(queries)

    def all_have(*names: str) -> bool:
        return all(_has(contents, unit, *names) for unit in derived)

    def summed(name: str, make: Callable[[str], str], rest: str, every: str) -> str:
        return known(name, make(rest)) if all_have(name) else make(every)

    # What an older release derived lacks some: then what they are made of is asked, of all units.
    parts, apart = turn_parts("internal.rest"), APART if all_have(APART, PATHS) else SCALARS

    return [
        ("internal.turn_events", _events(contents, present, TURNS, fat)),
        ("internal.mark_events", _events(contents, present, MARKS, small)),
        ("internal.rest_turns", _events(contents, rest, TURNS, fat)),
        ("internal.rest_marks", _events(contents, rest, MARKS, small)),
        ("internal.rest", "SELECT * FROM internal.rest_turns UNION ALL SELECT * FROM internal.rest_marks"),
        ("internal.turn_parts", known(SCALARS, parts, _MERGED)),
        ("internal.turn_scalars", turn_scalars("internal.turn_parts", ready(SCALARS))),
        ("internal.trajectory_parts", known(TRAJECTORIES, trajectory_parts("internal.rest"), _MERGED)),
        (
            "internal.trajectory_scalars",
            trajectory_scalars("internal.trajectory_parts", ready(TRAJECTORIES)),
        ),
        ("internal.rewards", _all_rewards(contents, derived, computed=bool(computed))),
        ("internal.paths", _paths(contents, present)),
        ("internal.apart_parts", known(apart, parts, _MERGED)),
        ("internal.amounts", summed(AMOUNTS, amounts, f"({parts})", "internal.turn_parts")),
        ("internal.plans", summed(PLANS, plans, "internal.rest_marks", "internal.mark_events")),
        ("internal.several_turns", _events(contents, several, TURNS, fat)),
        ("internal.tokens", tokens("internal.turn_events", "internal.several_turns")),
        ("internal.outliers", known(OUTLIERS, outliers("internal.rest_turns"))),
    ]


def _has(contents: Snapshot, unit: Unit, *names: str) -> bool:
    """Whether these files were derived of a unit."""
    return all((derived_folder(contents.store, unit) / name).exists() for name in names)


def _all_rewards(contents: Snapshot, derived: Sequence[Unit], *, computed: bool) -> str:
    """The rows of `rewards`; `key` is null in rows that an older release derived without that column."""
    queries = [f"SELECT * FROM ({rewards('internal.rest_marks')})"] if computed else []
    files = [derived_folder(contents.store, unit) / REWARDS for unit in derived]
    for tells in (True, False):
        if paths := [str(file) for file in files if _tells(file, KEY) is tells]:
            queries.append(f"SELECT *{'' if tells else ', CAST(NULL AS VARCHAR) AS key'} FROM {_read(paths)}")
    return " UNION ALL BY NAME ".join(queries)


def _paths(contents: Snapshot, units: Sequence[Unit]) -> str:
    """The rows of `paths` of those units that have the file: it saves work, and no answer depends on it."""
    files = [derived_folder(contents.store, unit) / PATHS for unit in units]
    if paths := [str(file) for file in files if file.exists()]:
        return f"SELECT * FROM {_read(paths)}"
    return NO_PATHS


def _tells(file: Path, column: str) -> bool:
    """Whether a derived file has a column; what an older release derived may lack it."""
    return _has_column(str(file), file.stat().st_mtime_ns, column)


@lru_cache(maxsize=65536)
def _has_column(file: str, modified_ns: int, column: str) -> bool:
    return column in pq.read_schema(file).names


def _events(contents: Snapshot, units: Iterable[Unit], name: str, live: str) -> str:
    """The events of these units' files of one name, of units held in part, and of the live tail."""
    present = [unit for unit in units if unit.file(name)]
    queries = _turn_branches(contents, present) if name == TURNS else _mark_branches(contents, present)
    queries += [
        f"SELECT * FROM {_read([file_path(contents.store, unit, name)])} WHERE seq < {end}"
        for unit, end in contents.parts
        if unit.file(name)
    ]
    if contents.live or not queries:
        queries.insert(0, f"SELECT * FROM {INTERNAL}.{LIVE} WHERE {live}")
    return " UNION ALL ".join(queries)


def _whole(contents: Snapshot, units: Sequence[Unit], name: str) -> list[str]:
    files = [file_path(contents.store, unit, name) for unit in units]
    return [f"SELECT * FROM {_read(files)}"] if files else []


def _mark_branches(contents: Snapshot, units: Sequence[Unit]) -> list[str]:
    """Queries over the units' small events, each saying which kinds its rows are not of.

    The units of agents' lanes hold nothing of a training: a question about steps never looks at their files.
    """
    kinds = {unit: kinds_of_marks(contents.store, unit) for unit in units}
    agents = [unit for unit, known in kinds.items() if known is not None and not _TRAINING & known.keys()]
    queries = []
    for group in (agents, [unit for unit in units if unit not in agents]):
        held: set[str] = set(_MARKS)
        if all(kinds[unit] is not None for unit in group):
            held = {kind for unit in group for kind in kinds[unit] or ()}
        absent = " AND ".join(f"kind <> {literal(kind)}" for kind in _MARKS if kind not in held)
        queries += [f"{query} WHERE {absent or 'true'}" for query in _whole(contents, group, MARKS)]
    return queries


def _turn_branches(contents: Snapshot, units: Sequence[Unit]) -> list[str]:
    """Queries over the units' turns, each saying between which trajectory ids its rows lie.

    The bounds hold for every row, so they change no answer. But if a query names a trajectory, DuckDB skips,
    while planning, the files whose bounds exclude it. Without the bounds it would check the row groups one by
    one, at about 40 µs each.
    """
    together = max(LEAST_FILES, -(-len(units) // MOST_BRANCHES))
    queries: list[str] = []
    for i in range(0, len(units), together):
        group = units[i : i + together]
        [query] = _whole(contents, group, TURNS)
        bounds = [trajectory_bounds(contents.store, unit) for unit in group]
        known = [bound for bound in bounds if bound is not None]
        if len(known) == len(group):
            low, high = min(low for low, _ in known), max(high for _, high in known)
            query += f" WHERE trajectory_id BETWEEN {literal(low)} AND {literal(high)}"
        queries.append(query)
    return queries


def _read(files: Sequence[str]) -> str:
    listed = ", ".join(map(literal, files))
    return f"read_parquet([{listed}], hive_partitioning = false)"


_WORD = re.compile(rf"(?:{INTERNAL}\.)?[a-z_]\w*", re.IGNORECASE)
_READ = re.compile(rf"\b(from|join)\s+((?:{INTERNAL}\.)?\w+)", re.IGNORECASE)
"""What a query of ours reads: it is named right behind one of these words, and nothing else there is."""
_CATALOG = re.compile(r"\b(?:show|pragma|duckdb_\w+|information_schema|sqlite_\w+|pg_\w+)\b", re.IGNORECASE)
"""What lists views."""


class LazyViews:
    """Views of one database, which its connections share, in several threads.

    Args:
        queries: (name, query) of each.
    """

    def __init__(self, queries: Sequence[tuple[str, str]]) -> None:
        self._queries = dict(queries)
        self._missing = set(self._queries)
        self._lock = threading.Lock()

    def make_for(self, connection: duckdb.DuckDBPyConnection, query: str) -> None:
        """Create the views that the query may name.

        Raises:
            duckdb.Error: a file that one of them reads cannot be read.
        """
        if self._missing:
            named = {word.lower() for word in _WORD.findall(query)} & self._queries.keys()
            self._make(connection, self._queries if _CATALOG.search(query) else named)

    def make_all(self, connection: duckdb.DuckDBPyConnection) -> bool:
        """Create all of them; whether any was missing.

        Raises:
            duckdb.Error: as `make_for`.
        """
        missing = bool(self._missing)
        self._make(connection, self._queries)
        return missing

    def _make(self, connection: duckdb.DuckDBPyConnection, names: Collection[str]) -> None:
        with self._lock:
            for name in [name for name in self._queries if name in names and name in self._missing]:
                connection.execute(f"CREATE VIEW {name} AS {self.in_place(self._queries[name])}")
                self._missing.discard(name)

    def in_place(self, query: str) -> str:
        """A query of ours, with the query of each view that it reads in that view's place: to create those
        would plan each of them, and once more for every view above it."""
        return _READ.sub(self._query_of, query)

    def _query_of(self, read: re.Match[str]) -> str:
        word, name = read.groups()
        return f"{word} ({self.in_place(self._queries[name])})" if name in self._queries else read[0]
