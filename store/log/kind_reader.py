"""Reads the events of given kinds from WAL files and sealed units; other events are not decoded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.cut import Cut
from rollbook.store.events import Event, codec
from rollbook.store.log.reader import LaneReader
from rollbook.store.sealed.point_read import rows_of_kinds, unit_body
from rollbook.store.sealed.unit import Unit, while_replaced


def events_of_kinds(store: Path, kinds: Collection[str], start: Cut, end: Cut) -> Iterator[Event]:
    """Events of these kinds between two cuts, lane by lane, each lane in order.

    Raises:
        CorruptionError: a file that may hold one is damaged.
    """
    for lane, batch, body in _batches(store, kinds, start, end):
        yield from codec.decode(batch, lane, body)


def runs_of_kinds(store: Path, kinds: Collection[str], end: Cut) -> set[str]:
    """The runs of the events of these kinds in a cut; no event is decoded.

    Raises:
        CorruptionError: a file that may hold one is damaged.
    """
    found: set[str] = set()
    for _, batch, _ in _batches(store, kinds, {}, end):
        found.update(batch.column("run").unique().to_pylist())
    return found


def _batches(
    store: Path, kinds: Collection[str], start: Cut, end: Cut
) -> Iterator[tuple[str, pa.RecordBatch, codec.Body]]:
    """The rows of these kinds between two cuts: lane, rows, and what gives their bodies."""
    for lane, stop in sorted(end.items()):
        first = start.get(lane, 0)
        units, sealed = while_replaced(store, lane, partial(_sealed, store, kinds, first, stop))
        for unit, rows in units:
            batch = codec.conform(rows.drop_columns("lane").combine_chunks().to_batches()[0])
            yield lane, batch, partial(unit_body, store, unit)
        reader = LaneReader(store, lane, max(first, sealed))
        for batch in reader.poll(max(stop, first, sealed)):
            found = batch.filter(pc.is_in(batch.column("kind"), pa.array(sorted(kinds))))
            if found.num_rows:
                yield lane, found, reader.body


def _sealed(
    store: Path, kinds: Collection[str], first: int, stop: int, units: Sequence[Unit]
) -> tuple[list[tuple[Unit, pa.Table]], int]:
    """Units with such rows between two places, and the place where sealed events end, or this cut does."""
    found = []
    for unit in units:
        if unit.next_seq > first and unit.first_seq < stop:
            rows = rows_of_kinds(store, unit, kinds)
            seq = rows["seq"]
            rows = rows.filter(pc.and_(pc.greater_equal(seq, first), pc.less(seq, stop)))
            if rows.num_rows:
                found.append((unit, rows))
    return found, min(units[-1].next_seq, stop) if units else 0
