"""Finds a trajectory by the client's name, by its id, or by the end of its id, which `tail` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import duckdb
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollbook.store.cut import Cut
from rollbook.store.errors import RollbookError
from rollbook.store.events import TrajectoryOpened
from rollbook.store.log.store import Store
from rollbook.store.sealed.derived import TRAJECTORIES
from rollbook.store.sealed.unit import MARKS, Unit, derived_folder, while_replaced
from rollbook.store.upkeep.find import rows_where
from rollbook.transcript.text import visible

NEAR_NAMES = 5
LEAST_SIMILARITY = 0.7
"""Of two names, by Jaro and Winkler: 1 for equal ones."""
SHORTEST_END = 6
"""Characters of an id's end that may name it."""
_COLUMNS = ["trajectory_id", "name", "run"]
_DERIVED = ["trajectory_id", "trajectory", "run"]


class NotFoundError(RollbookError, LookupError):
    """The name is not in the store, or several trajectories have it."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The opening of a trajectory in a cut."""

    trajectory_id: str
    name: str
    run: str


def openings_of(log: Store, cut: Cut, wanted: str | None) -> list[Opening]:
    """The trajectories of every run with this name or id; all of them if `wanted` is None.

    Raises:
        CorruptionError: a file that may hold one is damaged.
    """
    openings: list[Opening] = []
    for lane, count in sorted(cut.items()):
        tables = while_replaced(log.path, lane, partial(_of_lane, log, lane, count))
        for table in tables:
            if wanted is not None:
                table = table.filter((pc.field("name") == wanted) | (pc.field("trajectory_id") == wanted))
            openings += [Opening(**row) for row in table.to_pylist()]
    return openings


def find_trajectory(log: Store, cut: Cut, wanted: str, run: str | None = None) -> Opening:
    """The one trajectory with this name, id, or end of an id.

    Raises:
        NotFoundError: there is none, or several; the message names near ones, or the runs.
        CorruptionError: a file that may hold it is damaged.
    """
    everywhere = openings_of(log, cut, wanted)
    matches = [opening for opening in everywhere if run in (None, opening.run)]
    if not matches:
        held = [opening for opening in openings_of(log, cut, None) if run in (None, opening.run)]
        if len(wanted) >= SHORTEST_END:
            matches = [opening for opening in held if opening.trajectory_id.endswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise NotFoundError(_several(wanted, matches))
    elsewhere = sorted({opening.run for opening in everywhere})
    where = "" if run is None else f" in run {visible(run)!r}"
    if elsewhere:
        raise NotFoundError(
            f"no trajectory {visible(wanted)!r}{where}; there is one in {', '.join(map(visible, elsewhere))}"
        )
    near = near_names(wanted, [opening.name for opening in held])
    hint = f"; near names: {', '.join(map(visible, near))}" if near else ""
    raise NotFoundError(
        f"no trajectory {visible(wanted)!r}{where} among {len(held):,}{hint}; "
        "list them: rollbook sql 'select run, trajectory from trajectories'"
    )


def near_names(wanted: str, names: Sequence[str]) -> list[str]:
    """Names like this one, or that hold it, the nearest first."""
    query = """
      SELECT name FROM (SELECT DISTINCT name, contains(lower(name), lower($wanted)) AS held,
                               jaro_winkler_similarity(lower(name), lower($wanted)) AS near FROM known)
      WHERE held OR near >= $least ORDER BY held DESC, near DESC, name LIMIT $most"""
    with duckdb.connect(":memory:") as connection:
        connection.register("known", pa.table({"name": pa.array(names, pa.string())}))
        params = {"wanted": wanted, "least": LEAST_SIMILARITY, "most": NEAR_NAMES}
        return [name for (name,) in connection.execute(query, params).fetchall()]


def _several(wanted: str, matches: Sequence[Opening]) -> str:
    runs = sorted({opening.run for opening in matches})
    if len(runs) == len(matches):
        named = ", ".join(map(visible, runs))
        return f"several trajectories are named {visible(wanted)!r}, in runs {named}: name one with --run"
    ids = ", ".join(visible(opening.trajectory_id) for opening in matches[:NEAR_NAMES])
    return f"{len(matches)} trajectories are meant by {visible(wanted)!r}, such as {ids}: give a whole id"


def _of_lane(log: Store, lane: str, count: int, units: Sequence[Unit]) -> list[pa.Table]:
    """The trajectories opened by the lane's first `count` events, in the columns `_COLUMNS`."""
    tables = []
    for unit in units:
        if unit.dropped_us is None and unit.first_seq < count:
            derived = _derived(log, unit) if unit.next_seq <= count else None
            tables.append(_recorded(log, unit, count) if derived is None else derived)
    start = units[-1].next_seq if units else 0
    if start < count:
        for _, batch in log.batches({lane: count}, {lane: start}):
            tables.append(_opened(pa.Table.from_batches([batch])))
    return tables


def _derived(log: Store, unit: Unit) -> pa.Table | None:
    """The trajectories opened in a whole unit, from its derived scalars; None if it has none."""
    try:
        table = pq.read_table(derived_folder(log.path, unit) / TRAJECTORIES, columns=_DERIVED)
    except (OSError, pa.ArrowException):
        return None
    return table.filter(pc.field("trajectory").is_valid()).rename_columns(_COLUMNS)


def _recorded(log: Store, unit: Unit, count: int) -> pa.Table:
    condition = (pc.field("kind") == TrajectoryOpened.KIND) & (pc.field("seq") < count)
    columns = ("kind", "run", "trajectory_id", "extra")
    return _opened(rows_where(log.path, unit, MARKS, columns, condition))


def _opened(rows: pa.Table) -> pa.Table:
    opened = rows.filter(pc.field("kind") == TrajectoryOpened.KIND)
    names = [orjson.loads(extra)["name"] for extra in opened["extra"].to_pylist()]
    columns = opened["trajectory_id"], pa.array(names, pa.string()), opened["run"]
    return pa.table(list(columns), names=_COLUMNS)
