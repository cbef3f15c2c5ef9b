"""Makes an excerpt: a store of its own that holds only some events, each at its own lane and number.

So a cut means the same in the excerpt as in the store that it was made from. Each lane is one
sealed unit, whose manifest says how many events were left out; nothing else distinguishes it
from any other store, and every reader and view can read it. The source is read through its
indexes: trajectories by their locations, single events by their kinds; only unsealed events are
scanned row by row.

An excerpt may be made without text: then rows carry only what training reads.

That removes what erasing a trajectory with its tokens kept removes (`events.erased`), and more:
the names of trajectories, groups and API keys, and how a run was started. Token ids stay, and
are text to whoever has the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.cut import Cut
from rollbook.store.events import BodyStored, Event, RunOpened, StepPlanned, TrajectoryOpened
from rollbook.store.events.about import GONE, MARK
from rollbook.store.events.erased import CHANGED, erase_row, named_bodies, text_kinds
from rollbook.store.events.event import kinds_where
from rollbook.store.ids import now_us
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.store import Store
from rollbook.store.marker import create_marker
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sealed.point_read import rows_of_kinds, trajectory_rows
from rollbook.store.sealed.seal import write_unit
from rollbook.store.sealed.unit import Erasure, SealedSegment, Unit, current_units, while_replaced
from rollbook.store.settings import SealSettings
from rollbook.store.upkeep.attach import end_with_units
from rollbook.store.wal.frame import EMPTY_CHAIN

Rows = Mapping[str, pa.Table]
"""Lane -> rows of it in `TABLE_SCHEMA`; lanes without any may be missing."""

_OF_TRAINING = kinds_where(lambda properties: properties.of in ("policy", "run"))


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What an excerpt holds.

    Attributes:
        head: lane -> events up to which it says something of the lane; those left out count.
        events, trajectories: that are in it, bodies among the events.
    """

    head: dict[str, int]
    events: int
    trajectories: int


def is_excerpt(log: Store) -> bool:
    """Whether events were left out of a store when it was made."""
    return any(unit.left_out for lane in log.lanes() for unit in current_units(log.path, lane))


def rows_about(log: Store, ids: Collection[str], cut: Cut) -> dict[str, pa.Table]:
    """All that the cut holds of these trajectories, with the bodies that their turns name.

    Events of a training about a trajectory, such as a dropped sample, do not belong to it.

    Raises:
        CorruptionError, RemoteError: a file that may hold some of it cannot be read.
    """
    wanted = pa.array(sorted(ids), pa.string())

    def of_unit(unit: Unit) -> pa.Table:
        parts = [trajectory_rows(log.path, unit, trajectory_id) for trajectory_id in sorted(ids)]
        rows = _own(pa.concat_tables([TABLE_SCHEMA.empty_table(), *parts]))
        if not (named := _named(rows)):
            return rows
        return pa.concat_tables([rows, _of_digests(rows_of_kinds(log.path, unit, [BodyStored.KIND]), named)])

    def of_batch(rows: pa.Table) -> pa.Table:
        return _own(rows.filter(pc.is_in(rows["trajectory_id"], wanted)))

    tables = {}
    for lane, end in sorted(cut.items()):
        sealed, rows = _lane_rows(log.path, lane, end, of_unit, of_batch)
        if named := _named(rows.filter(pc.greater_equal(rows["seq"], sealed))):
            bodies = _unsealed(log.path, lane, sealed, end, partial(_of_digests, named=named))
            rows = pa.concat_tables([rows, *bodies])
        if rows.num_rows:
            tables[lane] = rows
    return tables


def rows_at(log: Store, events: Iterable[Event], cut: Cut) -> dict[str, pa.Table]:
    """Single events as they are stored; they are of small kinds, and name no bodies.

    Raises:
        CorruptionError, RemoteError: a file that may hold one cannot be read.
    """
    places: dict[str, list[Event]] = {}
    for event in events:
        places.setdefault(event.lane, []).append(event)
    tables = {}
    for lane, wanted in sorted(places.items()):
        kinds, seqs = {event.kind for event in wanted}, pa.array([event.seq for event in wanted], pa.int64())

        def of_batch(rows: pa.Table, seqs: pa.Array = seqs) -> pa.Table:
            return rows.filter(pc.is_in(rows["seq"], seqs))

        def of_unit(unit: Unit, kinds: set[str] = kinds, keep: Any = of_batch) -> pa.Table:
            rows: pa.Table = keep(rows_of_kinds(log.path, unit, kinds))
            return rows

        _, tables[lane] = _lane_rows(log.path, lane, cut.get(lane, 0), of_unit, of_batch)
    return tables


def write_excerpt(folder: Path, head: Cut, rows: Sequence[Rows], *, redaction: Redaction | None) -> Excerpt:
    """Make a store in a new folder that holds these rows.

    One lane is in memory at a time, besides `rows`.

    Args:
        head: lane -> where it ends: at least at the cuts that are to be read in the excerpt.
        rows: of these lanes; they have no event in common.
        redaction: takes the text out of the rows; None: it stays.

    Raises:
        NotAStoreError: something is in the folder.
        CorruptionError: what was written does not read back the same.
    """
    create_marker(folder)
    events, ids = 0, set[str]()
    for lane, end in sorted(head.items()):
        parts = [tables[lane] for tables in rows if lane in tables]
        table = pa.concat_tables([TABLE_SCHEMA.empty_table(), *parts]).sort_by("seq")
        erased: tuple[Erasure, ...] = ()
        if redaction is not None:
            table, erased = redaction.of(table)
            table = _without_unnamed(table)
        segment = SealedSegment(1, 0, end, 0, EMPTY_CHAIN.hex())
        left_out = end - table.num_rows
        unit = Unit(lane, 1, EMPTY_CHAIN.hex(), (segment,), (), now_us(), erased=erased, left_out=left_out)
        write_unit(folder, unit, table, SealSettings())
        end_with_units(folder, lane)
        events += table.num_rows
        ids.update(_own(table)["trajectory_id"].drop_null().to_pylist())
    return Excerpt(dict(head), events, len(ids))


# Of one lane --------------------------------------------------------------------------------------


def _lane_rows(
    store: Path,
    lane: str,
    end: int,
    of_unit: Callable[[Unit], pa.Table],
    of_batch: Callable[[pa.Table], pa.Table],
) -> tuple[int, pa.Table]:
    """Where the lane's sealed events end, and the wanted rows before `end`."""

    def sealed(units: Sequence[Unit]) -> tuple[int, list[pa.Table]]:
        whole = [unit for unit in units if unit.dropped_us is None and unit.first_seq < end]
        return units[-1].next_seq if units else 0, [of_unit(unit) for unit in whole]

    start, parts = while_replaced(store, lane, sealed)
    parts += _unsealed(store, lane, start, end, of_batch)
    table = pa.concat_tables([TABLE_SCHEMA.empty_table(), *parts])
    return start, table.filter(pc.less(table["seq"], end))


def _unsealed(
    store: Path, lane: str, start: int, end: int, of_batch: Callable[[pa.Table], pa.Table]
) -> list[pa.Table]:
    """The wanted rows among those of the lane that are not sealed."""
    tables = []
    for batch in LaneReader(store, lane, start).poll(max(start, end)):
        lanes = pa.repeat(pa.scalar(lane), batch.num_rows)
        tables.append(of_batch(pa.Table.from_arrays([lanes, *batch.columns], schema=TABLE_SCHEMA)))
    return tables


def _own(rows: pa.Table) -> pa.Table:
    """Rows that belong to a trajectory, not to a training."""
    return rows.filter(pc.invert(pc.is_in(rows["kind"], pa.array(_OF_TRAINING))))


# Bodies -------------------------------------------------------------------------------------------


def _named(rows: pa.Table) -> set[str]:
    """Digests of the bodies that rows refer to."""
    return {digest for extra in rows["extra"].to_pylist() for digest in named_bodies(extra)}


def _of_digests(rows: pa.Table, named: Collection[str]) -> pa.Table:
    """The bodies of these digests."""
    bodies = rows.filter(pc.equal(rows["kind"], BodyStored.KIND))
    wanted = [orjson.loads(extra)["digest"] in named for extra in bodies["extra"].to_pylist()]
    return bodies.filter(pa.array(wanted, pa.bool_()))


def _without_unnamed(table: pa.Table) -> pa.Table:
    """The rows without bodies that no remaining row refers to."""
    named = _named(table)
    mask = [
        kind != BodyStored.KIND or orjson.loads(extra)["digest"] in named
        for kind, extra in zip(table["kind"].to_pylist(), table["extra"].to_pylist(), strict=True)
    ]
    return table.filter(pa.array(mask, pa.bool_()))


class Redaction:
    """Redacts the rows of one excerpt, lane by lane: a group has the same new name in all of them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], str] = {}

    def of(self, table: pa.Table) -> tuple[pa.Table, tuple[Erasure, ...]]:
        """Rows in `TABLE_SCHEMA` without their text, and the trajectories that had some."""
        kinds, with_text = table["kind"].to_pylist(), set(text_kinds())
        runs, ids = table["run"].to_pylist(), table["trajectory_id"].to_pylist()
        extras = table["extra"].to_pylist()
        redacted = [self._extra(*row) for row in zip(kinds, runs, ids, extras, strict=True)]
        field = TABLE_SCHEMA.field("extra")
        table = table.set_column(TABLE_SCHEMA.get_field_index("extra"), field, pa.array(redacted, field.type))
        erased = sorted(
            {trajectory_id for kind, trajectory_id in zip(kinds, ids, strict=True) if kind in with_text}
        )
        return table, tuple(Erasure(trajectory_id, now_us(), True) for trajectory_id in erased)

    def _extra(self, kind: str, run: str, trajectory_id: str | None, extra: str) -> str:
        row = dict.fromkeys(CHANGED) | {"extra": extra}
        values = orjson.loads(erase_row(kind, row, keep_tokens=True)["extra"])
        if values.get("by") is not None:
            values["by"] = None
        match kind:
            case TrajectoryOpened.KIND:
                values |= {"name": trajectory_id, "group": self._group(run, values["group"])}
            case StepPlanned.KIND:
                for sample in values.get("others") or []:
                    sample["group"] = self._group(sample["run"], sample["group"])
            case RunOpened.KIND:
                values |= {"command": GONE, "config": dict(MARK), "model": None, "environment": {}}
            case _:
                _forget_key(values)
        return orjson.dumps(values).decode()

    def _group(self, run: str, group: str | None) -> str | None:
        """The new name of a group: its number, by when it came."""
        return group and self._groups.setdefault((run, group), f"group-{len(self._groups) + 1}")


def _forget_key(values: dict[str, Any]) -> None:
    """Take the name of the API key out of how a request came in."""
    wire = values.get("wire")
    if wire:
        wire.pop("key", None)
