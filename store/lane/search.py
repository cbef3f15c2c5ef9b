"""Finds events of a lane by their id: what the writer needs to store none of them twice."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from rollbook.store.lane.files import lane_folder, segment_path
from rollbook.store.lane.reader import LaneReader, segment_batches
from rollbook.store.lane.recovery import LaneState
from rollbook.store.lane.window import REMEMBERED, EventWindow
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.unit import MARKS, TURNS, current_units


def event_window(store: Path, lane: str, state: LaneState) -> EventWindow:
    """The window over a recovered lane, filled with its newest event ids."""
    window = EventWindow(lambda event_id: find_event(store, lane, event_id))
    newest = _newest_ids(store, lane, state)
    window.preload(newest[-REMEMBERED:], complete=len(newest) == state.next_seq)
    return window


def _newest_ids(store: Path, lane: str, state: LaneState) -> list[tuple[str, int]]:
    """(id, sequence number) of at least `REMEMBERED` events if there are as many, in order."""
    found: list[tuple[str, int]] = []
    for info in reversed(state.segments):
        if len(found) >= REMEMBERED:
            return found
        ids: list[tuple[str, int]] = []
        for batch in segment_batches(segment_path(lane_folder(store, lane), info.number), info.bytes):
            ids += zip(batch.column("event_id").to_pylist(), batch.column("seq").to_pylist(), strict=True)
        found = ids + found
    for unit in reversed(current_units(store, lane)):
        if len(found) >= REMEMBERED or unit.dropped_us is not None:
            return found
        ids = []
        for name in (TURNS, MARKS):
            table = read_file(store, unit, name, ["event_id", "seq"])
            ids += zip(table["event_id"].to_pylist(), table["seq"].to_pylist(), strict=True)
        found = sorted(ids, key=lambda pair: pair[1]) + found
    return found


def find_event(store: Path, lane: str, event_id: str) -> int | None:
    """The sequence number of an event in the whole lane, or None. Reads every id of it."""
    units = [u for u in current_units(store, lane) if u.dropped_us is None]
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
