"""A store: a folder with lanes, a catalog and checkpoints, read and written by many processes.

Events of given kinds are read from WAL files and sealed units without decoding the others.

Single trajectories, wherever their events are: sealed units by location, the live tail by an index.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollbook.store.cut import Cut, check_held, parse_cut
from rollbook.store.errors import CorruptionError, CutError, FencedError
from rollbook.store.events import (
    BodyStored,
    Event,
    RunOpened,
    SampleDropped,
    StepPlanned,
    TrajectoryOpened,
    codec,
)
from rollbook.store.fold.standings import Drop, Plan, plans_of, standings
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.store.log.consumer import Consumer
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.recovery import recovered_lane
from rollbook.store.log.tail import EVERYTHING, Filter, Tail
from rollbook.store.log.writer import LaneWriter, Shipment
from rollbook.store.marker import raise_marker
from rollbook.store.permissions import make_folder
from rollbook.store.safe_paths import place_inside
from rollbook.store.sealed.derived import standings_of, unit_plans, unit_standings
from rollbook.store.sealed.names import Hashes, name_hashes, opened_in
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sealed.point_read import kinds_of_marks, rows_of_kinds, trajectory_rows, unit_body
from rollbook.store.sealed.unit import Unit, while_replaced
from rollbook.store.settings import AppendSettings, StoreSettings, read_settings
from rollbook.store.wal.files import closed_head, folders_of_lanes, is_replica, take_lock
from rollbook.store.wal.segment import LaneState

CHECKPOINTS = "checkpoints"
"""The store's folder with those of versions."""
POINT_READS = 256
"""Up to this many trajectories are looked up one by one; for more, the whole log is read."""

_DROP = ["seq", "event_id", "trajectory_id"]

logger = logging.getLogger(__name__)

Opened = Callable[[Path, str, LaneState], None]
"""Called with the folder and the lane that a writer took, and what it found there."""


class Carrier(Protocol):
    """What a store has that is carried between hosts."""

    def lane_for(self, lane: str) -> str:
        """The lane that this host writes where one host alone would write `lane`."""

    def ship(self, lane: str, on_fenced: Callable[[FencedError], None]) -> Shipment:
        """Begin to carry a lane to other hosts."""

    def claim(
        self, what: str, remedy: str, patience_s: float, *, shared: bool, at_once: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Hold a claim among hosts."""

    def take_over(self, lane: str) -> bool:
        """End another host's lane if its process has ended; whether it has ended."""

    def share(self, named: str) -> None:
        """Let other hosts have a folder of the store."""

    def fetch(self, named: str) -> None:
        """Have a folder here that another host lets others have, if one does."""

    def unshare(self, named: str) -> None:
        """Let other hosts not have a folder any more."""

    def tell_units(self) -> None:
        """Let other hosts know which units of this host's lanes are in object storage."""

    def forget_old(self, lane: str, segment: int) -> None:
        """Let what is in object storage go from what carries the lane, once it is old."""

    def forget_erased(self, lane: str, segment: int, sealed: int) -> bool:
        """Let what was erased go from what carries the lane; whether nothing of it is left there."""

    def agree(self, what: str, value: str) -> bool:
        """Whether all hosts have this value of something."""

    def catch_up(self) -> None:
        """Return once all is here that other hosts had shipped when this was called."""


def _ignore_opening(path: Path, lane: str, state: LaneState) -> None:
    """Do nothing."""


class Store:
    """An opened store. Opening takes no lock: any number of processes read while others write.

    Args:
        opened: called for each lane that is opened for writing.
        carrier: of a store of several hosts.
    """

    def __init__(
        self, path: Path, store_id: str, opened: Opened = _ignore_opening, carrier: Carrier | None = None
    ) -> None:
        self.path = path
        self._opened, self.carrier = opened, carrier
        self.store_id = store_id
        self._points = TrajectoryReader(path)

    def lanes(self) -> list[str]:
        """Names of the lanes that have been opened for writing, sorted."""
        # A lane that lost its watermark is listed by its segments, so that reading it fails. An unreadable
        # folder is an error instead of a missing lane.
        folder, lanes = self.path / "lanes", []
        for lane in folders_of_lanes(self.path):
            try:
                names = os.listdir(folder / lane)
            except NotADirectoryError:
                continue
            if any(name == "WATERMARK" or name.endswith(".wal") for name in names):
                lanes.append(lane)
        return sorted(lanes)

    def own_lanes(self) -> list[str]:
        """Names of the lanes that this host writes, sorted; all, where there is one host."""
        return [lane for lane in self.lanes() if not is_replica(self.path, lane)]

    def head(self) -> dict[str, int]:
        """The cut that holds everything durable at one instant, so that it is closed.

        Raises:
            CorruptionError: a lane's watermark is missing or unreadable.
        """
        return closed_head(self.path)

    def cut(self, text: str = "head", run: str | None = None) -> dict[str, int]:
        """The cut a text names: `head`, `step:N` (as planned, in `run` if given) or `lane=n,...`.

        Raises:
            CutError: not a cut, or more than the store holds, or no such step.
        """
        head = self.head()
        if text == "head":
            return head
        cut = self._step_cut(text, run) if text.startswith("step:") else parse_cut(text)
        self._check_held(cut, head)
        return cut

    def _check_held(self, cut: Cut, head: Cut | None = None) -> None:
        """Refuse a cut that holds more than the store."""
        check_held(cut, self.head() if cut and head is None else head or {})

    def _step_cut(self, text: str, run: str | None) -> dict[str, int]:
        number = text.removeprefix("step:")
        cuts = {}
        for event in self.events_of([StepPlanned.KIND]):
            record = event.record
            if not isinstance(record, StepPlanned) or run not in (None, event.run):
                continue
            if str(record.step) == number:
                cuts[event.run, record.policy] = record.cut  # a later attempt replaces an earlier one
        if len(cuts) != 1:
            several = ", ".join(f"{run} ({policy})" for run, policy in sorted(cuts))
            problem = f"planned in runs (policies) {several}; name the run" if cuts else "no run planned it"
            raise CutError(f"cut {text!r}: {problem}")
        return parse_cut(next(iter(cuts.values())))

    def batches(
        self, cut: Cut | None = None, start: Cut | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """(lane, record batch) of every event in the cut (default: head), lane by lane.

        Args:
            start: leave out what this cut holds.

        Raises:
            CutError: the cut holds more than the store.
            CorruptionError: acknowledged bytes are damaged.
        """
        for reader, batch in self._read(cut, start):
            yield reader.lane, batch

    def _read(self, cut: Cut | None, start: Cut | None) -> Iterator[tuple[LaneReader, pa.RecordBatch]]:
        known = self.lanes()
        for lane, count in sorted((self.head() if cut is None else cut).items()):
            if lane not in known:
                raise CutError(f"cut holds {count} events of lane {lane!r}, which the store does not have")
            reader = LaneReader(self.path, lane, (start or {}).get(lane, 0))
            for batch in reader.poll(count):
                yield reader, batch

    def events(self, cut: Cut | None = None, start: Cut | None = None) -> Iterator[Event]:
        """Every event in the cut (default: head) and not in `start`, lane by lane, each lane in order."""
        for reader, batch in self._read(cut, start):
            yield from codec.decode(batch, reader.lane, reader.body)

    def events_of(
        self, kinds: Collection[str], cut: Cut | None = None, start: Cut | None = None
    ) -> Iterator[Event]:
        """Events of these kinds in the cut (default: head) and not in `start`, lane by lane, each in order.

        Events of other kinds are not decoded, so that rare ones are found quickly in a long log.

        Raises:
            CutError: the cut holds more than the store.
            CorruptionError: a file that may hold one is damaged.
        """
        if cut is not None:
            self._check_held(cut)
        return events_of_kinds(self.path, kinds, start or {}, self.head() if cut is None else cut)

    def runs(self, cut: Cut | None = None) -> set[str]:
        """The runs that have a configuration or a trajectory in the cut (default: head).

        Raises:
            CutError: the cut holds more than the store.
            CorruptionError: a file that may hold one is damaged.
        """
        if cut is not None:
            self._check_held(cut)
        kinds = (RunOpened.KIND, TrajectoryOpened.KIND)
        return runs_of_kinds(self.path, kinds, self.head() if cut is None else cut)

    def trajectories(
        self, cut: Cut | None = None, ids: Collection[str] | None = None
    ) -> dict[str, Trajectory]:
        """Trajectories at the cut (default: head), by id; only those in `ids`, if given."""
        return fold(self.events(cut) if ids is None else self.events_about(ids, cut))

    def events_about(self, ids: Collection[str], cut: Cut | None = None) -> list[Event]:
        """The events of these trajectories at the cut (default: head), lane by lane, each lane in order.

        Raises:
            CutError: the cut holds more than the store.
            CorruptionError: a file that may hold one is damaged.
        """
        if len(ids) <= POINT_READS:
            self._check_held(cut or {})
            events = self._points.events(self.lanes(), ids)
            return [e for e in events if cut is None or e.seq < cut.get(e.lane, 0)]
        wanted = pa.array(sorted(ids), pa.string())
        events = []
        for reader, batch in self._read(cut, None):
            mask = pc.is_in(batch.column("trajectory_id"), wanted)
            events += codec.decode(batch.filter(mask), reader.lane, reader.body)
        return events

    def trajectory(self, trajectory_id: str, cut: Cut | None = None) -> Trajectory | None:
        """One trajectory at the cut (default: head), or None. Reads only what holds its events.

        Raises:
            CorruptionError: a file that may hold it is damaged.
        """
        return self.trajectories(cut, [trajectory_id]).get(trajectory_id)

    def opening(self, run: str, name: str) -> tuple[TrajectoryOpened, str] | None:
        """The opening of the run's trajectory of this client name, and its lane; None where there is none.

        Reads the small events of each unit, and unsealed events only once.

        Raises:
            CorruptionError: a file that may hold it is damaged.
        """
        lanes = self.lanes()
        for trajectory_id in self._points.named(lanes, run, name):
            for event in self._points.events(lanes, [trajectory_id]):
                record = event.record
                if isinstance(record, TrajectoryOpened) and (event.run, record.name) == (run, name):
                    return record, event.lane
        return None

    def sealed_names(self) -> tuple[Hashes, dict[str, int]]:
        """Sorted hashes of the names of all trajectories opened in sealed units (`sealed.names`), and the cut
        that those units hold.

        Raises:
            CorruptionError: a file is damaged.
        """

        def of_lane(units: Sequence[Unit]) -> tuple[list[Hashes], int]:
            hashes = [name_hashes(self.path, unit) for unit in units]
            return hashes, units[-1].next_seq if units else 0

        parts, ends = list[Hashes](), dict[str, int]()
        for lane in self.lanes():
            lane_hashes, ends[lane] = while_replaced(self.path, lane, of_lane)
            parts += lane_hashes
        return np.sort(np.concatenate([np.empty(0, np.uint64), *parts]), kind="stable"), ends

    def standings(self, run: str, cut: Cut) -> pa.Table:
        """How far the run's trajectories have come at a cut: see `fold.standings`.

        Raises:
            CorruptionError: a file is damaged.
        """

        def of_lane(count: int, units: Sequence[Unit]) -> tuple[list[pa.Table], int]:
            whole, end = _units_within(units, count)
            return [unit_standings(self.path, unit) for unit in whole], end

        tables, ends = list[pa.Table](), dict[str, int]()
        for lane, count in cut.items():
            of_one, ends[lane] = while_replaced(self.path, lane, partial(of_lane, count))
            tables += of_one
        return standings([*tables, standings_of(self.table(cut, ends))], run)

    def sealed_uses(
        self, run: str, lane: str, count: int, among: pa.ChunkedArray
    ) -> tuple[list[Plan | Drop], int]:
        """What the sealed units within a lane's first events say of uses of these trajectories by the run's
        steps: what was planned, and what was dropped, in order; and where those units end.

        Raises:
            CorruptionError: a file is damaged.
        """

        def of_units(units: Sequence[Unit]) -> tuple[list[Plan | Drop], int]:
            whole, end = _units_within(units, count)
            return [use for unit in whole for use in _uses(self.path, unit, run, among)], end

        return while_replaced(self.path, lane, of_units)

    def table(self, cut: Cut | None = None, start: Cut | None = None) -> pa.Table:
        """The cut, without what `start` holds, as one Arrow table with `TABLE_SCHEMA`, copying nothing."""
        parts = [
            pa.record_batch([pa.repeat(pa.scalar(lane), batch.num_rows), *batch.columns], schema=TABLE_SCHEMA)
            for lane, batch in self.batches(cut, start)
        ]
        return pa.Table.from_batches(parts, TABLE_SCHEMA)

    def writer(self, lane: str, settings: AppendSettings | None = None) -> LaneWriter:
        """Take a lane for writing; closes with the context manager.

        In a store of several hosts the lane has this host's name in it.

        Args:
            settings: grouping and segment sizes (default: the store's own).

        Raises:
            LaneLockedError: another process writes it.
            CorruptionError: its acknowledged events are damaged.
            FormatError: a newer Rollbook has written into the store since it was opened.
        """
        raise_marker(self.path)
        ship = None if self.carrier is None else self.carrier.ship
        lane = lane if self.carrier is None else self.carrier.lane_for(lane)
        writer = LaneWriter(self.path, self.store_id, lane, settings or self.settings().append, ship=ship)
        self._opened(self.path, lane, writer.recovered)
        return writer

    @contextlib.contextmanager
    def taken_over(self, lane: str) -> Iterator[None]:
        """Hold a lane whose process is gone, on this host or on another one: nothing is added to it
        meanwhile.

        Raises:
            LaneLockedError: its process runs.
            CorruptionError: acknowledged bytes are damaged or missing.
        """
        if self.carrier is not None and is_replica(self.path, lane):
            self.carrier.take_over(lane)
        with recovered_lane(self.path, lane):
            yield

    def folder(self, named: str) -> Path:
        """The folder that an event names, such as a checkpoint's; fetched, if it is on another host alone.

        Raises:
            OutsideError: the name leads out of the store.
            MediumError: another host may have it, and what it is fetched from does not answer.
        """
        path = place_inside(self.path, named)
        if self.carrier is not None and not path.exists():
            self.carrier.fetch(named)
        return path

    def may_have(self, named: str) -> bool:
        """Whether a folder that an event names is here, or may be on another host."""
        return self.carrier is not None or place_inside(self.path, named).is_dir()

    def located(self, path: Path) -> Path:
        """A checkpoint's folder by the path that another host has for it; any other path as it is.

        Raises:
            MediumError: another host may have it, and what it is fetched from does not answer.
        """
        if self.carrier is None or path.exists() or CHECKPOINTS not in path.parts:
            return path
        last = len(path.parts) - 1 - path.parts[::-1].index(CHECKPOINTS)
        return self.folder("/".join(path.parts[last:]))

    def share(self, named: str) -> None:
        """Let other hosts have a folder that an event will name.

        Raises:
            ConfigError, MediumError: they cannot have it.
        """
        if self.carrier is not None:
            self.carrier.share(named)

    def settings(self) -> StoreSettings:
        """The settings in `store.toml`, read anew.

        Raises:
            ConfigError: it has an unknown key or an ill-typed value.
        """
        return read_settings(self.path)

    def tail(self, start: Cut | None = None, wanted: Filter = EVERYTHING) -> Tail:
        """A reader that hands out events as they become durable, from `start` (default: the first).

        Raises:
            CutError: `start` holds more than the store.
        """
        return Tail(self.path, start or {}, wanted)

    def consumer(self, name: str, lane: str | None = None) -> Consumer:
        """A tail whose position is recorded in the log; see `log.consumer`."""
        return Consumer(self.path, name, self.writer, lane)

    @contextlib.contextmanager
    def claim(
        self,
        what: str,
        remedy: str,
        patience_s: float = 0.0,
        *,
        shared: bool = False,
        of_host: bool = False,
        at_once: bool = False,
    ) -> Iterator[None]:
        """Be the only process that does `what` with this store, such as training a policy of a run.

        Args:
            of_host: it concerns this host's files alone, and each host may do so.
            at_once: do not wait to see whether a process of another host that holds the claim still runs.
            patience_s: how long to wait for another process that holds the claim.
            shared: share the claim with others that share it; nobody can then hold it
                exclusively.

        Raises:
            LaneLockedError: another process holds it.
        """
        folder = self.path / "claims"
        make_folder(folder)
        file = folder / f"{quote(what, safe=' ')}.lock"
        fd = take_lock(
            file, f"{what} in {self.path} is being done by", remedy, patience_s=patience_s, shared=shared
        )
        try:
            if self.carrier is None or of_host:
                yield
            else:
                with self.carrier.claim(what, remedy, patience_s, shared=shared, at_once=at_once):
                    yield
        finally:
            os.close(fd)


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
    runs: set[str] = set()
    for _, batch, _ in _batches(store, kinds, {}, end):
        runs.update(batch.column("run").unique().to_pylist())
    return runs


def _batches(
    store: Path, kinds: Collection[str], start: Cut, end: Cut
) -> Iterator[tuple[str, pa.RecordBatch, codec.Body]]:
    """The rows of these kinds between two cuts: lane, rows, and the function that returns their bodies."""
    for lane, stop in sorted(end.items()):
        first = start.get(lane, 0)
        units, sealed = while_replaced(store, lane, partial(_sealed, store, kinds, first, stop))
        for unit, rows in units:
            batch = codec.conform(rows.drop_columns("lane").combine_chunks().to_batches()[0])
            yield lane, batch, partial(unit_body, store, unit)
        reader = LaneReader(store, lane, max(first, sealed))
        for batch in reader.poll(max(stop, first, sealed)):
            matching = batch.filter(pc.is_in(batch.column("kind"), pa.array(sorted(kinds))))
            if matching.num_rows:
                yield lane, matching, reader.body


def _sealed(
    store: Path, kinds: Collection[str], first: int, stop: int, units: Sequence[Unit]
) -> tuple[list[tuple[Unit, pa.Table]], int]:
    """Units with such rows between two places, and where the sealed events end, or this cut does."""
    tables = []
    for unit in units:
        if unit.next_seq > first and unit.first_seq < stop:
            rows = rows_of_kinds(store, unit, kinds)
            seq = rows["seq"]
            rows = rows.filter(pc.and_(pc.greater_equal(seq, first), pc.less(seq, stop)))
            if rows.num_rows:
                tables.append((unit, rows))
    return tables, min(units[-1].next_seq, stop) if units else 0


def _units_within(units: Sequence[Unit], count: int) -> tuple[list[Unit], int]:
    """The units that hold none but a lane's first `count` events, and the event at which they end."""
    whole = [unit for unit in units if unit.next_seq <= count]
    return whole, whole[-1].next_seq if whole else 0


def _uses(store: Path, unit: Unit, run: str, among: pa.ChunkedArray) -> list[Plan | Drop]:
    """What a unit says of uses of these trajectories, in order."""
    kinds = kinds_of_marks(store, unit)
    if kinds is not None and kinds.keys().isdisjoint({StepPlanned.KIND, SampleDropped.KIND}):
        return []
    dropped = rows_of_kinds(store, unit, {SampleDropped.KIND})
    mine = pc.and_(pc.equal(dropped["run"], run), pc.is_in(dropped["trajectory_id"], among))
    drops = [Drop(**row) for row in dropped.filter(mine).select(_DROP).to_pylist()]
    table = unit_plans(store, unit)
    if table is None:
        plans = _plans(store, unit, run)
    else:
        plans = plans_of(table.filter(pc.equal(table["run"], run)).drop_columns("run"), among)
    return sorted([*plans, *drops], key=lambda use: use.seq)


def _plans(store: Path, unit: Unit, run: str) -> list[Plan]:
    """Of events that are decoded, with all that their manifests say."""
    plans = []
    first, end = {unit.lane: unit.first_seq}, {unit.lane: unit.next_seq}
    for event in events_of_kinds(store, {StepPlanned.KIND}, first, end):
        plan = event.record
        if event.run == run and isinstance(plan, StepPlanned):
            named = [sample["trajectory_id"] for sample in plan.samples]
            version = (plan.policy, plan.policy_version, plan.step, plan.attempt)
            plans.append(Plan(event.seq, event.event_id, *version, named))
    return plans


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
