"""Which trajectory is meant: by the client's name, by its id, or by the end of that, which `tail` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import duckdb
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.cli.show.terminal_text import visible
from rollbook.store.cut import Cut
from rollbook.store.errors import RollbookError
from rollbook.store.events import TrajectoryOpened
from rollbook.store.log.store import Store
from rollbook.store.sealed.unit import MARKS, Unit, while_replaced
from rollbook.store.upkeep.find import rows_where

NEAR_NAMES = 5
LEAST_SIMILARITY = 0.7
"""Of two names, by Jaro and Winkler: 1 for equal ones."""
SHORTEST_END = 6
"""Characters of an id's end that may name it."""
_COLUMNS = ("run", "trajectory_id", "extra")


class NotFoundError(RollbookError, LookupError):
    """What is to be shown is not in the store, or it is not clear what is meant."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A trajectory that a cut holds."""

    trajectory_id: str
    name: str
    run: str


def find_trajectory(log: Store, cut: Cut, wanted: str, run: str | None = None) -> Opening:
    """The one trajectory that is meant.

    Raises:
        NotFoundError: there is none, or several; the message names near ones, or the runs.
        CorruptionError: a file that may hold it is damaged.
    """
    everywhere = [opening for lane in sorted(cut) for opening in _openings(log, lane, cut[lane])]
    held = [opening for opening in everywhere if run in (None, opening.run)]
    found = [opening for opening in held if wanted in (opening.trajectory_id, opening.name)]
    if not found and len(wanted) >= SHORTEST_END:
        found = [opening for opening in held if opening.trajectory_id.endswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFoundError(_several(wanted, found))
    elsewhere = sorted({o.run for o in everywhere if wanted in (o.trajectory_id, o.name)})
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
        asked = {"wanted": wanted, "least": LEAST_SIMILARITY, "most": NEAR_NAMES}
        return [name for (name,) in connection.execute(query, asked).fetchall()]


def _several(wanted: str, found: Sequence[Opening]) -> str:
    runs = sorted({opening.run for opening in found})
    if len(runs) == len(found):
        named = ", ".join(map(visible, runs))
        return f"several trajectories are named {visible(wanted)!r}, in runs {named}: name one with --run"
    ids = ", ".join(visible(opening.trajectory_id) for opening in found[:NEAR_NAMES])
    return f"{len(found)} trajectories are meant by {visible(wanted)!r}, such as {ids}: give a whole id"


def _openings(log: Store, lane: str, count: int) -> Sequence[Opening]:
    return while_replaced(log.path, lane, partial(_of_lane, log, lane, count))


def _of_lane(log: Store, lane: str, count: int, units: Sequence[Unit]) -> Sequence[Opening]:
    """What the lane's first `count` events opened."""
    condition = (pc.field("kind") == TrajectoryOpened.KIND) & (pc.field("seq") < count)
    tables = [
        rows_where(log.path, unit, MARKS, _COLUMNS, condition)
        for unit in units
        if unit.dropped_us is None and unit.first_seq < count
    ]
    start = units[-1].next_seq if units else 0
    if start < count:
        for _, batch in log.batches({lane: count}, {lane: start}):
            opened = batch.filter(pc.equal(batch["kind"], TrajectoryOpened.KIND))
            tables.append(pa.Table.from_batches([opened]).select(_COLUMNS))
    return [opening for table in tables for opening in _read(table)]


def _read(table: pa.Table) -> Iterator[Opening]:
    columns = (table[name].to_pylist() for name in _COLUMNS)
    for run, trajectory_id, extra in zip(*columns, strict=True):
        yield Opening(trajectory_id, orjson.loads(extra)["name"], run)
