"""Reads the facts that retention decides by: scalars of every event, and a few kinds as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.events import CursorMoved
from rollbook.store.events.event import kinds_where
from rollbook.store.fold.history import KINDS, History, PolicyKey, fold_histories
from rollbook.store.log.store import Store
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, current_units, derived_folder
from rollbook.store.upkeep.find import unsealed
from rollbook.store.upkeep.retention_policy import Facts, LanePart
from rollbook.store.wal.files import lane_folder, read_watermark, segment_numbers, segment_path

_SCALARS = ["kind", "run", "trajectory_id", "policy", "policy_version", "time"]


def training_histories(log: Store) -> dict[PolicyKey, History]:
    """The training histories of the store, by (run, policy).

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    return fold_histories(log.events_of(KINDS))


def scan(log: Store) -> Facts:
    """Read every unit that is not dropped, and the unsealed events; units lane by lane, each in order.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    facts = Facts()
    rest: dict[str, list[pa.RecordBatch]] = {lane: [] for lane in log.lanes()}
    for lane, batch in unsealed(log):
        rest[lane].append(batch)
    for lane, batches in rest.items():
        units = current_units(log.path, lane)
        for unit in units:
            if unit.dropped_us is None:
                tables = [read_file(log.path, unit, name, _SCALARS) for name in (TURNS, MARKS)]
                size = unit_bytes(log, unit)
                facts.places.append(_place(facts, lane, unit, unit.next_seq, size, tables))
        if batches:
            table = pa.Table.from_batches(batches)
            size, end = _unsealed_bytes(log, lane, units), int(table["seq"][-1].as_py()) + 1
            facts.places.append(_place(facts, lane, None, end, size, [table.select(_SCALARS)]))
    # Afterwards: what a plan names that was written meanwhile is in these places, or in none that may go.
    facts.training = training_histories(log)
    for event in log.events_of({CursorMoved.KIND}):
        if isinstance(event.record, CursorMoved):
            facts.move(event.record.consumer, event.record.cut, event.lane, event.seq)
    return facts


def unit_bytes(log: Store, unit: Unit) -> int:
    """Bytes that the unit takes: its files, what is left of its segments as WAL, and what is derived."""
    folder = lane_folder(log.path, unit.lane)
    paths = [segment_path(folder, s.number) for s in unit.segments]
    derived = derived_folder(log.path, unit)
    paths += derived.iterdir() if derived.is_dir() else ()
    return unit.bytes + sum(path.stat().st_size for path in paths if path.exists())


def _unsealed_bytes(log: Store, lane: str, units: list[Unit]) -> int:
    folder = lane_folder(log.path, lane)
    sealed = units[-1].last if units else 0
    last = read_watermark(folder).segment
    numbers = [n for n in segment_numbers(folder) if sealed < n <= last]
    return sum(segment_path(folder, n).stat().st_size for n in numbers)


def _parts_of(what: str) -> list[str]:
    return kinds_where(lambda said: said.of == what)


def _is_in(column: Any, kinds: Iterable[str]) -> Any:
    return pc.is_in(column, pa.array(list(kinds)))


def _place(
    facts: Facts, lane: str, unit: Unit | None, next_seq: int, size: int, tables: list[pa.Table]
) -> LanePart:
    table = pa.concat_tables(tables)
    kind = table["kind"]
    ids = table["trajectory_id"].filter(_is_in(kind, _parts_of("trajectory"))).unique().drop_null()
    lasting = kind.filter(_is_in(kind, kinds_where(lambda said: said.lasting)))
    ends = table["trajectory_id"].filter(pc.equal(kind, "trajectory.finished")).unique()
    facts.finished |= set(ends.to_pylist())
    _publish(facts, table.filter(pc.equal(kind, "policy.published")))
    turns = table.filter(pc.equal(kind, "turn.completed"))
    training = _pairs(table.filter(_is_in(kind, _parts_of("policy"))))
    training |= {(run, None) for run, _ in _pairs(table.filter(_is_in(kind, _parts_of("run"))))}
    return LanePart(
        lane=lane,
        unit=unit,
        next_seq=next_seq,
        bytes=size,
        newest_us=pc.max(table["time"].cast(pa.int64())).as_py() or 0,
        trajectories=frozenset(ids.to_pylist()),
        versions=_newest(turns.filter(pc.is_valid(turns["policy_version"]))),
        unversioned=turns["policy_version"].null_count > 0,
        training=frozenset(training),
        upkeep=frozenset(lasting.unique().to_pylist()),
    )


def _newest(table: pa.Table) -> Mapping[PolicyKey, int]:
    """The highest policy version of each (run, policy) in the rows."""
    grouped = table.group_by(["run", "policy"]).aggregate([("policy_version", "max")])
    return {(row["run"], row["policy"]): row["policy_version_max"] for row in grouped.to_pylist()}


def _publish(facts: Facts, table: pa.Table) -> None:
    for key, version in _newest(table).items():
        facts.published[key] = max(version, facts.published.get(key, version))


def _pairs(table: pa.Table) -> set[tuple[str, str | None]]:
    grouped = table.group_by(["run", "policy"]).aggregate([])
    return {(row["run"], row["policy"]) for row in grouped.to_pylist()}
