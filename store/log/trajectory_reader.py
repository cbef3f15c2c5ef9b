"""Single trajectories, wherever their events are: sealed units by location, the live tail by an index."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from rollbook.store.errors import CorruptionError
from rollbook.store.events import BodyStored, Event, TrajectoryOpened, codec
from rollbook.store.log.reader import LaneReader
from rollbook.store.sealed.names import opened_in
from rollbook.store.sealed.point_read import trajectory_rows, unit_body
from rollbook.store.sealed.unit import Unit, while_replaced


class _LiveLane:
    """The unsealed events of a lane, indexed by trajectory."""

    def __init__(self, store: Path, lane: str, start: int) -> None:
        self.start = start
        self._reader = LaneReader(store, lane, start)
        self._batches: list[pa.RecordBatch] = []
        self._rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._bodies: dict[str, tuple[int, int]] = {}
        self.opened: dict[tuple[str, str], str] = {}
        """(run, client's name) -> trajectory."""

    def refresh(self) -> None:
        """Read the events that became durable since."""
        for batch in self._reader.poll():
            number = len(self._batches)
            self._batches.append(batch)
            for row, trajectory_id in enumerate(batch.column("trajectory_id").to_pylist()):
                if trajectory_id is not None:
                    self._rows[trajectory_id].append((number, row))
            for row, kind in enumerate(batch.column("kind").to_pylist()):
                if kind == BodyStored.KIND:
                    self._bodies[self._extra(number, row)["digest"]] = (number, row)
                elif kind == TrajectoryOpened.KIND:
                    name = (batch.column("run")[row].as_py(), self._extra(number, row)["name"])
                    self.opened[name] = batch.column("trajectory_id")[row].as_py()

    def events(self, ids: Collection[str]) -> list[Event]:
        """The events of these trajectories among them."""
        by_batch: dict[int, list[int]] = defaultdict(list)
        for trajectory_id in ids:
            for number, row in self._rows.get(trajectory_id, ()):
                by_batch[number].append(row)
        events: list[Event] = []
        for number, rows in by_batch.items():
            chosen = self._batches[number].take(pa.array(np.array(rows)))
            events += codec.decode(chosen, self._reader.lane, self._body)
        return events

    def _extra(self, number: int, row: int) -> dict[str, Any]:
        extra: dict[str, Any] = orjson.loads(self._batches[number].column("extra")[row].as_py())
        return extra

    def _body(self, digest: str) -> Any:
        if digest not in self._bodies:
            raise CorruptionError(f"lane {self._reader.lane!r}: body {digest} is missing")
        return self._extra(*self._bodies[digest])["body"]


class TrajectoryReader:
    """Reads the events of single trajectories; keep it, since it remembers what it has indexed."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._live: dict[str, _LiveLane] = {}
        self._lock = threading.Lock()

    def events(self, lanes: Sequence[str], ids: Collection[str]) -> list[Event]:
        """All durable events of these trajectories, lane by lane, each lane in order. Threads may share it.

        Raises:
            CorruptionError: a file that may hold one of them is damaged.
        """
        with self._lock:
            return self._events(lanes, ids)

    def named(self, lanes: Sequence[str], run: str, name: str) -> list[str]:
        """Ids of trajectories that may be the run's one of this client name. Threads may share it.

        Raises:
            CorruptionError: a file that may hold its opening is damaged.
        """

        def of_lane(lane: str, units: Sequence[Unit]) -> list[str]:
            live = self._live_lane(lane, units[-1].next_seq if units else 0)
            matches = live.opened.get((run, name))
            if matches is not None:
                return [matches]
            return [
                trajectory_id
                for unit in reversed(units)
                for trajectory_id in opened_in(self._store, unit, run, name)
            ]

        with self._lock:
            matches = [while_replaced(self._store, lane, partial(of_lane, lane)) for lane in lanes]
            return [trajectory_id for of_one in matches for trajectory_id in of_one]

    def _events(self, lanes: Sequence[str], ids: Collection[str]) -> list[Event]:
        events: list[Event] = []
        for lane in lanes:
            # The sealer may remove a unit's files, or move them to object storage, while they are looked for.
            of_lane = while_replaced(self._store, lane, partial(self._of_lane, lane, ids))
            events += sorted(of_lane, key=lambda event: event.seq)
        return events

    def _of_lane(self, lane: str, ids: Collection[str], units: Sequence[Unit]) -> list[Event]:
        live = self._live_lane(lane, units[-1].next_seq if units else 0)
        events: list[Event] = []
        for unit in units:  # units are the outer loop, so that what is read of a unit serves all trajectories
            for trajectory_id in ids:
                events += self._sealed(unit, trajectory_id)
        return events + live.events(ids)

    def _live_lane(self, lane: str, start: int) -> _LiveLane:
        live = self._live.get(lane)
        if live is None or live.start != start:  # what was live is in a unit by now
            live = self._live[lane] = _LiveLane(self._store, lane, start)
        live.refresh()
        return live

    def _sealed(self, unit: Unit, trajectory_id: str) -> list[Event]:
        rows = trajectory_rows(self._store, unit, trajectory_id)
        if not rows.num_rows:
            return []
        batch = codec.conform(rows.drop_columns("lane").combine_chunks().to_batches()[0])
        return list(codec.decode(batch, unit.lane, lambda digest: unit_body(self._store, unit, digest)))
