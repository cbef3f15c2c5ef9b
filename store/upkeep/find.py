"""Finds a trajectory in the sealed units and among unsealed events, reading only the columns it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollbook.store.errors import UpkeepError
from rollbook.store.events.erased import text_kinds
from rollbook.store.log.store import Store
from rollbook.store.sealed.parquet import checked_parquet, damaged
from rollbook.store.sealed.remote import place
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, current_units, unsealed_start


@dataclass(frozen=True, slots=True)
class LoggedTrajectory:
    """A trajectory that is in the log: its id, the client's name, its run, and whether it is finished."""

    trajectory_id: str
    name: str
    run: str
    finished: bool


def rows_where(
    store: Path, unit: Unit, name: str, columns: Sequence[str], condition: pc.Expression
) -> pa.Table:
    """Columns of the rows of a unit's file that fulfil a condition; none if the unit has no such file.

    Raises:
        CorruptionError: the file is missing or damaged.
    """
    if unit.file(name) is None:
        return pa.table({column: [] for column in columns})
    system, folder = place(store, unit)
    try:
        with system.open_input_file(f"{folder}/{name}") as source:
            checked_parquet(source)
            return pq.read_table(
                source, columns=list(columns), filters=condition, page_checksum_verification=True
            )
    except (pa.ArrowException, OSError) as error:
        raise damaged(store, unit, name, error) from error


def live_units(log: Store) -> list[Unit]:
    """The current units that are not dropped, lane by lane."""
    return [u for lane in log.lanes() for u in current_units(log.path, lane) if u.dropped_us is None]


def unsealed(log: Store) -> Iterator[tuple[str, pa.RecordBatch]]:
    """(lane, batch) of the unsealed events."""
    return log.batches(start={lane: unsealed_start(log.path, lane).next_seq for lane in log.lanes()})


def find_trajectory(log: Store, wanted: str, run: str | None = None) -> LoggedTrajectory:
    """The one trajectory of that id, or of that client's name.

    Raises:
        UpkeepError: there is none, or several runs have one.
    """
    kinds = ["trajectory.opened", "trajectory.finished"]
    columns = ["kind", "run", "trajectory_id", "extra"]
    condition = pc.field("kind").isin(kinds)
    tables = [rows_where(log.path, unit, MARKS, columns, condition) for unit in live_units(log)]
    tables += [
        pa.Table.from_batches([batch.filter(pc.is_in(batch["kind"], pa.array(kinds)))]).select(columns)
        for _, batch in unsealed(log)
    ]
    finished = {row["trajectory_id"] for t in tables for row in t.to_pylist() if row["kind"] == kinds[1]}
    matches = {}
    for row in (row for t in tables for row in t.to_pylist() if row["kind"] == kinds[0]):
        id_, name = row["trajectory_id"], orjson.loads(row["extra"])["name"]
        if wanted in (id_, name) and run in (None, row["run"]):
            matches[id_] = LoggedTrajectory(id_, name, row["run"], id_ in finished)
    if len(matches) == 1:
        return next(iter(matches.values()))
    where = "" if run is None else f" in run {run!r}"
    if not matches:
        raise UpkeepError(
            f"no trajectory {wanted!r}{where}: list them with select run, trajectory from trajectories"
        )
    runs = ", ".join(sorted(f.run for f in matches.values()))
    raise UpkeepError(f"several trajectories are named {wanted!r}, in runs {runs}: name one with --run")


def units_with(log: Store, trajectory_id: str) -> list[Unit]:
    """The units that count and hold an event of the trajectory."""
    condition = pc.field("trajectory_id") == trajectory_id
    return [
        unit
        for unit in live_units(log)
        if any(rows_where(log.path, unit, name, ["seq"], condition).num_rows for name in (TURNS, MARKS))
    ]


def unsealed_lanes(log: Store, trajectory_id: str) -> dict[str, int]:
    """Lane -> sequence number of the newest unsealed event with text of the trajectory."""
    newest: dict[str, int] = {}
    for lane, batch in unsealed(log):
        mine = pc.and_(
            pc.equal(batch["trajectory_id"], trajectory_id), pc.is_in(batch["kind"], pa.array(text_kinds()))
        )
        seqs = batch["seq"].filter(pc.fill_null(mine, False))
        if len(seqs):
            newest[lane] = seqs[-1].as_py()
    return newest
