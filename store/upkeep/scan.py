"""Reads what decides which units may go: scalars of every event, and a few kinds whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.events import StepAbandoned
from rollbook.store.events.event import kinds_where
from rollbook.store.log.store import Store
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, current_units, derived_folder
from rollbook.store.upkeep.find import rows_where, unsealed
from rollbook.store.upkeep.retention_policy import Facts, Place
from rollbook.store.upkeep.training_needs import Checkpoint, Plan, PolicyKey
from rollbook.store.wal.files import lane_folder, read_watermark, segment_numbers, segment_path

_SCALARS = ["kind", "run", "trajectory_id", "policy", "policy_version", "time"]
_READ = (
    "cursor.moved",
    "step.planned",
    "step.committed",
    "step.failed",
    "step.abandoned",
    "step.retired",
    "checkpoint.written",
)
"""Kinds that are read whole."""
_READ_COLUMNS = ["seq", "kind", "run", "policy", "policy_version", "step", "extra"]


def survey(log: Store, *, places: bool = True) -> Facts:
    """Read every unit that is not dropped, and what is not sealed; places lane by lane, each in order.

    Args:
        places: if not, only what is told of training and cursors is read, which is little.

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
                _add_unit(log, facts, unit, places)
        if not batches:
            continue
        table = pa.Table.from_batches(batches)
        _fold(facts, lane, table.filter(_is_in(table["kind"], _READ)).select(_READ_COLUMNS))
        if places:
            size = _unsealed_bytes(log, lane, units)
            end = int(table["seq"][-1].as_py()) + 1
            facts.places.append(_place(facts, lane, None, end, size, [table.select(_SCALARS)]))
    return facts


def _add_unit(log: Store, facts: Facts, unit: Unit, places: bool) -> None:
    condition = pc.field("kind").isin(list(_READ))
    _fold(facts, unit.lane, rows_where(log.path, unit, MARKS, _READ_COLUMNS, condition))
    if places:
        tables = [read_file(log.path, unit, name, _SCALARS) for name in (TURNS, MARKS)]
        size = unit_bytes(log, unit)
        facts.places.append(_place(facts, unit.lane, unit, unit.next_seq, size, tables))


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
) -> Place:
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
    return Place(
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


def _fold(facts: Facts, lane: str, table: pa.Table) -> None:
    """Take the events of the kinds `_READ`, in the order of the lane."""
    for row in sorted(table.to_pylist(), key=lambda row: row["seq"]):
        extra = orjson.loads(row["extra"])
        if row["kind"] == "cursor.moved":
            facts.move(extra["consumer"], extra["cut"], lane, row["seq"])
            continue
        training, step = facts.training[row["run"], row["policy"]], row["step"]
        match row["kind"]:
            case "step.planned":
                ids = frozenset(ref["trajectory_id"] for ref in extra["samples"])
                training.plans[step, extra["attempt"]] = Plan(row["policy_version"], extra["phase"], ids)
            case "step.committed":
                training.committed[step] = extra["attempt"]
            case "step.failed":
                training.failed.add((step, extra["attempt"]))
            case "step.abandoned":
                made = (row["policy_version"], extra["back_to"], extra["goes_on_as"])
                training.abandoned[step] = StepAbandoned(step, extra["attempt"], row["policy"], *made)
            case "step.retired":
                training.retired.add(step)
            case "checkpoint.written":
                has = extra["optimizer_digest"] is not None
                training.checkpoints.append(Checkpoint(row["policy_version"], extra["phase"], has))
