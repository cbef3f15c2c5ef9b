"""Erases a trajectory's text from every file of the store; see `docs/keeping.md`.

The order makes an interrupted erasure safe to repeat. First unsealed events are sealed. Then each unit that
holds text of the trajectory is rewritten as a new generation, whose manifest names the erasure. Then
everything that such a unit replaces is removed (WAL copies, older generations, derived files). Last, the
event that records the erasure is appended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.catalog.catalog import note_units
from rollbook.store.errors import LaneLockedError
from rollbook.store.events import (
    BodyStored,
    Event,
    LaunchEnded,
    TrajectoryErased,
    TrajectoryOpened,
    TurnCompleted,
    TurnRequested,
)
from rollbook.store.events.erased import CHANGED, erase_row, named_bodies, text_kinds
from rollbook.store.ids import now_us
from rollbook.store.log.store import Store
from rollbook.store.log.writer import LaneWriter
from rollbook.store.sealed.parquet import TABLE_SCHEMA, same_bits, unit_table
from rollbook.store.sealed.seal import seal_closed, write_unit
from rollbook.store.sealed.unit import Erasure, Unit, all_units, current_units
from rollbook.store.tables.following import follow_or_warn
from rollbook.store.upkeep.claim import (
    UPKEEP_LANE,
    claim_upkeep,
    remove_replaced,
    remove_wal,
    tell_others,
)
from rollbook.store.upkeep.find import LoggedTrajectory, find_trajectory, units_with, unsealed_lanes
from rollbook.store.upkeep.upload import upload_lane
from rollbook.store.wal.files import lane_folder, read_watermark, segment_path
from rollbook.store.wal.frame import ALIGN, first_seq_of


@dataclass(frozen=True, slots=True)
class EraseReport:
    """What an erasure did.

    Attributes:
        events: events of the trajectory that hold none of its text now.
        bodies: large values that were erased with them, since no other trajectory names them.
        shared_bodies: large values that stay, since requests of other trajectories name them too.
        units: lane/name of the units that were rewritten; none where all of it was erased before.
        finished: whether the trajectory is; if not, what is recorded later is not erased.
        replays: trajectories that were sampled again from it, or judge it, and still hold its text.
        outputs: files outside the store in which its agents' output was kept; they are not touched.
        elsewhere: lanes of other hosts that hold it: their sealers erase it there in their next passes.
    """

    trajectory_id: str
    name: str
    run: str
    tokens_kept: bool
    events: int
    bodies: int
    shared_bodies: int
    units: tuple[str, ...]
    finished: bool
    replays: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Places of a unit's rows to erase: the trajectory's own and bodies; which bodies others share; and the
    paths of files with output that the rows name."""

    own: list[int]
    bodies: list[int]
    shared_bodies: set[str]
    outputs: list[str]


def erase_trajectory(
    log: Store, trajectory: str, reason: str, *, run: str | None = None, keep_tokens: bool = False
) -> EraseReport:
    """Erase a trajectory, named by its id or by its name in a run. Readers that have files open keep them.

    Args:
        reason: why, for the event.
        keep_tokens: leave token ids and logprobs, so that it can still be trained on and replayed.

    Raises:
        UpkeepError: no such trajectory, or several of that name.
        LaneLockedError: its newest events are in a segment that is still written, or another process looks
            after the store; nothing was erased.
        CorruptionError: a file that holds it is damaged.
    """
    with claim_upkeep(log):
        target = find_trajectory(log, trajectory, run)
        with log.writer(UPKEEP_LANE) as upkeep:
            report = erase_own(log, target, keep_tokens=keep_tokens)
            _record(log, upkeep, report, reason)
    return report


def erase_own(log: Store, target: LoggedTrajectory, *, keep_tokens: bool) -> EraseReport:
    """Erase a trajectory from the lanes of this host, which are all where there is one.

    The caller alone changes sealed units.

    Raises:
        LaneLockedError: its newest events are in a segment that is still written; nothing was erased.
        CorruptionError: a file that holds it is damaged.
    """
    unsealed = unsealed_lanes(log, target.trajectory_id)
    _seal_all_of(log, target, unsealed)
    own, there = set(log.own_lanes()), units_with(log, target.trajectory_id)
    units = [unit for unit in there if unit.lane in own]
    # All units are read before the first is rewritten, so that damage is found before anything changes.
    rows = [_rows_of(unit_table(log.path, unit), target.trajectory_id, keep_tokens) for unit in units]
    rewritten = [_rewrite(log, unit, target.trajectory_id, keep_tokens) for unit in units]
    # Before the files go that others know of:
    if log.carrier is not None:
        for lane in {unit.lane for unit in rewritten if unit is not None}:
            upload_lane(log, lane)
        tell_others(log)
    follow_or_warn(log)
    _remove_what_was_replaced(log)
    others = {unit.lane for unit in there} | unsealed.keys()
    return EraseReport(
        target.trajectory_id,
        target.name,
        target.run,
        keep_tokens,
        sum(len(r.own) for r in rows),
        sum(len(r.bodies) for r in rows),
        len(set().union(*(r.shared_bodies for r in rows))),
        tuple(f"{unit.lane}/{unit.name}" for unit in rewritten if unit is not None),
        target.finished,
        _replays_of(log, target.trajectory_id),
        tuple(path for r in rows for path in r.outputs),
        tuple(sorted(others - own)),
    )


# Before: everything of it into units ----------------------------------------------------------------


def _seal_all_of(log: Store, target: LoggedTrajectory, unsealed: Mapping[str, int]) -> None:
    """Seal the unsealed events of this host's lanes that hold the trajectory.

    Args:
        unsealed: lane -> its last unsealed event of it.

    Raises:
        LaneLockedError: some of it is in a segment that another process still writes.
    """
    own = set(log.own_lanes())
    newest = {lane: seq for lane, seq in unsealed.items() if lane in own}
    with contextlib.ExitStack() as stack:
        for lane, seq in newest.items():
            if seq >= _open_segment_start(log.path, lane):
                _take(log, lane, target, stack)
        # Taking a lane begins a new segment, which closes the previous one.
    for lane in newest:
        for _ in seal_closed(log.path, lane, log.settings().seal):
            pass
        note_units(log.path, lane, current_units(log.path, lane))


def _take(log: Store, lane: str, target: LoggedTrajectory, stack: contextlib.ExitStack) -> None:
    try:
        stack.enter_context(log.writer(lane))
    except LaneLockedError as error:
        seconds = log.settings().append.segment_age_s
        raise LaneLockedError(
            f"trajectory {target.name!r} of run {target.run!r} has events in the segment of lane {lane!r} "
            f"that is still written; it closes within {seconds:g} s of its first event: try again then. "
            f"Nothing was erased. ({error})"
        ) from None


def _open_segment_start(store: Path, lane: str) -> int:
    """First sequence number of the lane's newest segment."""
    folder = lane_folder(store, lane)
    mark = read_watermark(folder)
    with segment_path(folder, mark.segment).open("rb") as file:
        first = first_seq_of(file.read(ALIGN))
    return mark.next_seq if first is None else first


# Rewriting ------------------------------------------------------------------------------------------


def _rows_of(table: pa.Table, trajectory_id: str, keep_tokens: bool) -> _Rows:
    """The rows with text of the trajectory, and those of bodies that only it names.

    Bodies that a completion names (routed experts) are erased together with the tokens.
    """
    mine = pc.fill_null(pc.equal(table["trajectory_id"], trajectory_id), False)
    naming = [TurnRequested.KIND] if keep_tokens else [TurnRequested.KIND, TurnCompleted.KIND]
    naming_rows = pc.is_in(table["kind"], pa.array(naming))
    named, named_by_others = (
        {
            d
            for extra in table["extra"].filter(pc.and_(naming_rows, rows)).to_pylist()
            for d in named_bodies(extra)
        }
        for rows in (mine, pc.invert(mine))
    )
    own = _places(pc.and_(mine, pc.is_in(table["kind"], pa.array(text_kinds()))))
    stored = _places(pc.equal(table["kind"], BodyStored.KIND)) if named else []
    only_mine = named - named_by_others
    bodies = [i for i in stored if orjson.loads(table["extra"][i].as_py())["digest"] in only_mine]
    ended = table["extra"].filter(pc.and_(mine, pc.equal(table["kind"], LaunchEnded.KIND))).to_pylist()
    return _Rows(own, bodies, named & named_by_others, [p for extra in ended for p in _outputs(extra)])


def _outputs(extra: str) -> list[str]:
    """Paths of the files in which a launch's output was kept; none of one that is erased already."""
    return [stream["path"] for stream in orjson.loads(extra)["output"].values() if "path" in stream]


def _places(mask: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(mask.to_numpy())]


def _rewrite(log: Store, unit: Unit, trajectory_id: str, keep_tokens: bool) -> Unit | None:
    """The unit's next generation, without the text; None where it holds none."""
    table = unit_table(log.path, unit)
    rows = _rows_of(table, trajectory_id, keep_tokens)
    places = pa.array([*rows.own, *rows.bodies], pa.int64())
    before = table.take(places)
    after = _erased(before, keep_tokens)
    if same_bits(before, after) is None:
        return None
    order = np.arange(table.num_rows)
    order[places.to_numpy()] = table.num_rows + np.arange(len(places))
    table = pa.concat_tables([table, after]).take(pa.array(order))
    same_place = [u for u in all_units(log.path, unit.lane) if (u.first, u.last) == (unit.first, unit.last)]
    others = tuple(e for e in unit.erased if e.trajectory_id != trajectory_id)
    successor = replace(
        unit,
        generation=1 + max(u.generation for u in same_place),
        sealed_us=now_us(),
        erased=(*others, Erasure(trajectory_id, now_us(), keep_tokens)),
        remote=None,
    )
    return write_unit(log.path, successor, table, log.settings().seal)


def _erased(table: pa.Table, keep_tokens: bool) -> pa.Table:
    """The rows after erasure."""
    kinds = table["kind"].to_pylist()
    columns = {name: table[name].to_pylist() for name in CHANGED}
    rows = [
        erase_row(kind, {name: columns[name][i] for name in CHANGED}, keep_tokens=keep_tokens)
        for i, kind in enumerate(kinds)
    ]
    for name in ("extra",) if keep_tokens else CHANGED:
        field = TABLE_SCHEMA.field(name)
        values = pa.array([row[name] for row in rows], field.type)
        table = table.set_column(TABLE_SCHEMA.get_field_index(name), field, values)
    return table


# After ----------------------------------------------------------------------------------------------


def _remove_what_was_replaced(log: Store) -> None:
    """Remove everything that units with erasures replaced, including leftovers of interrupted erasures."""
    for lane in log.own_lanes():
        units = [u for u in current_units(log.path, lane) if u.erased]
        if not units:
            continue
        for unit in units:
            remove_wal(log.path, unit)
            remove_replaced(log.path, lane, unit)
        note_units(log.path, lane, current_units(log.path, lane))


def _replays_of(log: Store, trajectory_id: str) -> tuple[str, ...]:
    """The replays and judges of a trajectory, and recursively theirs, that were not erased: they
    repeat its text."""
    origins: dict[str, str] = {}
    erased: set[str] = set()
    for event in log.events_of({TrajectoryOpened.KIND, TrajectoryErased.KIND}):
        record = event.record
        if isinstance(record, TrajectoryErased):
            erased.add(record.trajectory_id)
        elif isinstance(record, TrajectoryOpened) and record.origin is not None:
            origins[record.trajectory_id] = record.origin["trajectory_id"]
    repeats = {trajectory_id}
    for replay in sorted(origins):  # ids sort by when they were made, so what each repeats comes before it
        if origins[replay] in repeats:
            repeats.add(replay)
    return tuple(sorted(repeats - erased - {trajectory_id}))


def _record(log: Store, upkeep: LaneWriter, report: EraseReport, reason: str) -> None:
    """Append the event, unless an earlier one records the same and nothing was left to do."""
    erasures = log.events_of({TrajectoryErased.KIND})
    known = [e.record for e in erasures if isinstance(e.record, TrajectoryErased)]
    same = [
        r for r in known if r.trajectory_id == report.trajectory_id and r.tokens_kept <= report.tokens_kept
    ]
    if report.units or not same:
        record = TrajectoryErased(report.trajectory_id, report.tokens_kept, reason, report.events)
        upkeep.append([Event(record, report.run)]).result()
