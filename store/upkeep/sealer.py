"""The sealer: maintains a lane's files after segments are closed, one pass at a time.

In each lane it removes what an interrupted pass left; seals closed segments, and the last one
too if its writer is gone; merges small units; builds derived files; notes the units in the
catalog; removes units that were replaced, and WAL files beyond `keep_wal_bytes`; and moves units
to object storage where `[remote] uri` is set. Then Iceberg tables follow the units, if they are
to (`store.tables`). If a pass is interrupted anywhere, the next one continues: a unit appears as
a whole, and nothing is removed before its replacement is durable.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa

from rollbook.store.catalog.catalog import note_units
from rollbook.store.errors import CorruptionError, LaneLockedError, RemoteError, StoreError
from rollbook.store.log.recovery import recovered_lane
from rollbook.store.log.store import Store
from rollbook.store.sealed.seal import remove_leftovers, remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import (
    Unit,
    current_units,
    unit_folder,
    unsealed_start,
)
from rollbook.store.settings import SealSettings
from rollbook.store.tables.following import follow
from rollbook.store.upkeep.claim import CLAIM
from rollbook.store.upkeep.compact import compact, remove_superseded
from rollbook.store.upkeep.elsewhere import Orders
from rollbook.store.upkeep.upload import upload_lane
from rollbook.store.wal.files import lane_folder, quarantine, quarantined, read_watermark, segment_path

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LaneSealed:
    """What a pass does to a lane, counted as it goes.

    Attributes:
        sealed: units made of segments.
        merged: units made of units.
        removed: units that another one had replaced.
        wal_files: WAL files removed.
        log_bytes: bytes of the segments that were sealed.
        written_bytes: bytes of Parquet, of sealed and merged units.
        damage: why the lane could not be worked on, or not to the end.
    """

    lane: str
    sealed: list[str] = field(default_factory=list)
    merged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    wal_files: int = 0
    log_bytes: int = 0
    written_bytes: int = 0
    damage: str | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing was done."""
        return not (self.sealed or self.merged or self.removed or self.wal_files)


@dataclass(frozen=True, slots=True)
class SealReport:
    """What a pass did, lane by lane, and the seconds it took.

    Attributes:
        unpublished: why tables that are to follow the units do not (`store.tables`); None: they do, or are
            not to.
    """

    lanes: tuple[LaneSealed, ...]
    seconds: float
    unpublished: str | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing was done."""
        return all(lane.idle for lane in self.lanes)

    @property
    def damage(self) -> dict[str, str]:
        """Lane -> why it could not be worked on."""
        return {lane.lane: lane.damage for lane in self.lanes if lane.damage is not None}


class Sealer:
    """Makes passes over a store.

    Args:
        stop: when set, a pass ends after the unit it is writing.
        on_step: called with (lane, what is being done), for a progress line.
    """

    def __init__(
        self,
        store: Store,
        stop: threading.Event | None = None,
        on_step: Callable[[str, str], None] = lambda lane, step: None,
    ) -> None:
        self._store = store
        self._stop = stop or threading.Event()
        self._on_step = on_step
        self._derived: set[tuple[str, str]] = set()
        self._noted: dict[str, list[Unit]] = {}
        self._orders = None if store.carrier is None else Orders(store, store.carrier)
        self._published: dict[str, list[Unit]] | None = None
        self._unpublished: str | None = None

    def run_once(self, patience_s: float = 0.0) -> SealReport:
        """One pass over every lane. Damage in one lane stops no other.

        Args:
            patience_s: how long to wait for another process that changes sealed units.

        Raises:
            LaneLockedError: another process does.
            ConfigError: `store.toml` cannot be used.
        """
        begun = time.monotonic()
        settings = self._store.settings().seal
        lanes: list[LaneSealed] = []
        with self._store.claim(CLAIM, "try again when it is done", patience_s, of_host=True):
            for lane in self._store.own_lanes():
                if self._stop.is_set():
                    break
                lanes.append(self._lane(lane, settings))
            if not self._stop.is_set():
                self._for_others()
            self._publish()
        return SealReport(tuple(lanes), time.monotonic() - begun, self._unpublished)

    def _for_others(self) -> None:
        """Carry out what other hosts ordered, and let chunks go that sealed units replace."""
        if self._orders is None:
            return
        try:
            self._orders.carry_out()
            self._orders.trim()
        except StoreError as error:
            logger.warning("what other hosts ordered is tried again: %s", error)

    def _lane(self, lane: str, settings: SealSettings) -> LaneSealed:
        tally = LaneSealed(lane)
        folder = lane_folder(self._store.path, lane)
        try:
            tally.damage = quarantined(folder)
            if tally.damage is None:
                self._work(tally, settings)
        except CorruptionError as error:
            # Not tried again at each pass: `rollbook store verify`, or a writer, takes the note away.
            quarantine(folder, str(error))
            tally.damage = str(error)
        except (StoreError, OSError, pa.ArrowException, duckdb.Error) as error:
            tally.damage = f"{lane}: {error}"
        return tally

    def _work(self, tally: LaneSealed, settings: SealSettings) -> None:
        store, lane = self._store.path, tally.lane
        remove_leftovers(store, lane)
        self._seal(tally, seal_closed(store, lane, settings))
        with adopted(store, lane) as ours:
            if ours:
                self._seal(tally, seal_closed(store, lane, settings, all_of_it=True))
        if not self._stop.is_set():
            self._merge(tally, settings)
        units = current_units(store, lane)
        self._derive(lane, units)
        self._tell_catalog(lane, units)
        if tally.merged:
            self._publish()  # before their files go
        tally.removed += remove_superseded(store, lane)
        check_files(store, units)
        tally.wal_files = len(remove_sealed_wal(store, lane, units, settings.keep_wal_bytes))
        # Last, so that nothing here waits for object storage.
        upload_lane(self._store, lane, stopped=self._stop.is_set)
        self._tell_catalog(lane, current_units(store, lane))

    def _seal(self, tally: LaneSealed, units: Iterator[Unit]) -> None:
        self._on_step(tally.lane, "sealing")
        while not self._stop.is_set() and (unit := next(units, None)) is not None:
            tally.sealed.append(unit.name)
            tally.log_bytes += sum(segment.bytes for segment in unit.segments)
            tally.written_bytes += unit.bytes

    def _merge(self, tally: LaneSealed, settings: SealSettings) -> None:
        self._on_step(tally.lane, "merging units")
        try:
            for unit, _ in compact(self._store.path, tally.lane, settings):
                tally.merged.append(unit.name)
                tally.written_bytes += unit.bytes
                if self._stop.is_set():
                    return
        except RemoteError as error:  # units in object storage are merged when it answers again
            tally.damage = str(error)

    def _derive(self, lane: str, units: list[Unit]) -> None:
        """Build the missing derived files; a unit that fails is tried only once."""
        from rollbook.store.sealed.derived import build_derived

        for unit in units:
            if (lane, unit.name) in self._derived or self._stop.is_set():
                continue
            self._derived.add((lane, unit.name))
            self._on_step(lane, f"deriving from {unit.name}")
            try:
                build_derived(self._store.path, unit)
            except CorruptionError:
                raise
            except (RemoteError, OSError, duckdb.IOException) as error:
                logger.warning("deriving from units of lane %s waits for its storage: %s", lane, error)
                self._derived.discard((lane, unit.name))
                return
            except Exception as error:  # derived files only speed queries up, so any error is only logged
                logger.warning("nothing is derived from unit %s of lane %s: %s", unit.name, lane, error)

    def _publish(self) -> None:
        """Have tables follow the units, where they are to; asked again at the next pass if that fails."""
        if not self._store.settings().iceberg.publish:
            return
        units = {lane: current_units(self._store.path, lane) for lane in self._store.own_lanes()}
        if units != self._published:
            self._on_step("tables", "publishing")
            self._unpublished = follow(self._store)
            self._published = units if self._unpublished is None else None

    def _tell_catalog(self, lane: str, units: list[Unit]) -> None:
        if self._noted.get(lane) == units:
            return
        self._on_step(lane, "telling the catalog")
        if note_units(self._store.path, lane, units):
            self._noted[lane] = units


@contextlib.contextmanager
def adopted(store: Path, lane: str) -> Iterator[bool]:
    """Hold a recovered lane whose writer is gone; False if it has a writer, or nothing to seal.

    Raises:
        CorruptionError: acknowledged events of the lane are damaged.
    """
    if read_watermark(lane_folder(store, lane)).next_seq == unsealed_start(store, lane).next_seq:
        yield False
        return
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(recovered_lane(store, lane))
        except LaneLockedError:
            yield False
            return
        yield True


def check_files(store: Path, units: list[Unit]) -> None:
    """Check that units whose WAL files may go have their files, by name and size.

    Raises:
        CorruptionError: one is missing, or has another size.
    """
    for unit in units:
        if unit.dropped_us is not None or unit.remote is not None:
            continue
        if not any(segment_path(lane_folder(store, unit.lane), s.number).exists() for s in unit.segments):
            continue
        for file in unit.files:
            path = unit_folder(store, unit) / file.name
            size = path.stat().st_size if path.exists() else None
            if size != file.bytes:
                raise CorruptionError(
                    f"{path}: has {size} bytes, not the {file.bytes} of its manifest; its WAL files are "
                    "kept: restore it from a copy"
                )
