"""Finds events of a lane by their id, so that the writer stores no event twice."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow.compute as pc

from rollbook.store.log.reader import LaneReader
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, TURNS, Unit, while_replaced
from rollbook.store.wal.check import LaneState
from rollbook.store.wal.files import lane_folder, segment_path
from rollbook.store.wal.frame import BadFrameError
from rollbook.store.wal.segment import segment_batches
from rollbook.store.wal.window import REMEMBERED, EventWindow


def event_window(store: Path, lane: str, state: LaneState) -> EventWindow:
    """The window over a recovered lane, filled with its newest event ids."""
    window = EventWindow(lambda event_id: find_event(store, lane, event_id))
    newest = _unsealed_ids(store, lane, state)
    while_replaced(store, lane, lambda units: _add_sealed_ids(store, units, newest))
    ids = [(event_id, seq) for seq, event_id in sorted(newest.items())]
    window.preload(ids, complete=len(ids) == state.next_seq)
    return window


def _unsealed_ids(store: Path, lane: str, state: LaneState) -> dict[int, str]:
    """Sequence number -> id of the newest events of the recovered segments, at least `REMEMBERED` of them."""
    found: dict[int, str] = {}
    for info in reversed(state.segments):
        if len(found) >= REMEMBERED:
            return found
        # Sealed and removed since they were recovered? Then a unit has them.
        with contextlib.suppress(FileNotFoundError):
            found |= _segment_ids(store, lane, info.number, info.bytes)
    return found


def _add_sealed_ids(store: Path, units: list[Unit], found: dict[int, str]) -> None:
    """Add events of the newest units until `REMEMBERED` are found."""
    for unit in reversed(units):
        if len(found) >= REMEMBERED or unit.dropped_us is not None:
            return
        if unit.remote is not None:
            # Writers do not wait for object storage while the WAL files are kept.
            with contextlib.suppress(FileNotFoundError, BadFrameError):
                for segment in unit.segments:
                    found |= _segment_ids(store, unit.lane, segment.number, segment.bytes)
                continue
        for name in (TURNS, MARKS):
            table = read_file(store, unit, name, ["seq", "event_id"])
            found |= zip(table["seq"].to_pylist(), table["event_id"].to_pylist(), strict=True)


def _segment_ids(store: Path, lane: str, number: int, stop: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for batch in segment_batches(segment_path(lane_folder(store, lane), number), stop):
        seqs, ids = (batch.column(name).to_pylist() for name in ("seq", "event_id"))
        found |= zip(seqs, ids, strict=True)
    return found


def find_event(store: Path, lane: str, event_id: str) -> int | None:
    """The sequence number of an event in the whole lane, or None. Reads every id of it."""
    return while_replaced(store, lane, lambda units: _find(store, lane, event_id, units))


def _find(store: Path, lane: str, event_id: str, units: list[Unit]) -> int | None:
    units = [unit for unit in units if unit.dropped_us is None]
    for unit in reversed(units):
        for name in (TURNS, MARKS):
            table = read_file(store, unit, name, ["event_id", "seq"])
            match = table.filter(pc.equal(table["event_id"], event_id))
            if match.num_rows:
                return int(match["seq"][0].as_py())
    reader = LaneReader(store, lane, units[-1].next_seq if units else 0)
    for batch in reader.poll():
        at = pc.index(batch.column("event_id"), event_id).as_py()
        if at >= 0:
            return int(batch.column("seq")[at].as_py())
    return None
