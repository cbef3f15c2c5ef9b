"""The sealer: maintains a lane's files after segments are closed, one pass at a time.

In each lane it removes what an interrupted pass left; seals closed segments, and the last one
too if its writer is gone; merges small units; builds derived files; notes the units in the
catalog; removes units that were replaced, and WAL files beyond `keep_wal_bytes`; and moves units
to object storage where `[remote] uri` is set. Then Iceberg tables follow the units, if they are
to (`store.tables`). If a pass is interrupted anywhere, the next one continues: a unit appears as
a whole, and nothing is removed before its replacement is durable.

Moves sealed units to object storage at `[remote] uri`; unsealed events stay local.

A unit's files are stored, read back and compared by size and sha256; then its manifest is
stored, then the local manifest names the address, and only then are the local files removed,
unless a reader has leased them. Wherever this is interrupted, the next call continues: a file
that is complete there is not sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa
from pyarrow import fs

from rollbook.store.catalog.catalog import note_units
from rollbook.store.errors import ConfigError, CorruptionError, LaneLockedError, RemoteError, StoreError
from rollbook.store.log.recovery import recovered_lane
from rollbook.store.log.store import Store
from rollbook.store.marker import MARKER
from rollbook.store.permissions import make_empty
from rollbook.store.safe_paths import fsync_folder, read_small
from rollbook.store.sealed.leases import removing
from rollbook.store.sealed.parquet import sha256_of
from rollbook.store.sealed.remote import (
    UPLOADING,
    explained,
    put,
    remote_folder,
    remote_place,
    remove_remote_files,
)
from rollbook.store.sealed.seal import remove_leftovers, remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import (
    MANIFEST,
    SealedFile,
    Unit,
    all_units,
    current_units,
    lane_units_folder,
    manifest_bytes,
    parse_manifest,
    read_manifest,
    unit_folder,
    unsealed_start,
    with_remote,
    write_manifest,
)
from rollbook.store.settings import RemoteSettings, SealSettings
from rollbook.store.tables.following import follow, follow_or_warn
from rollbook.store.upkeep.claim import CLAIM, claim_upkeep
from rollbook.store.upkeep.compact import GONE, compact, remove_superseded
from rollbook.store.upkeep.elsewhere import Orders
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
        self._orders = Orders(store)
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


CHUNK = 8 << 20


@dataclass(slots=True)
class UploadReport:
    """What an upload did.

    Attributes:
        units: lane/name of the units that object storage holds now, and did not before.
        bytes: of their files.
        freed: bytes of local files removed, those of earlier uploads too.
        kept: lane/name of units whose local files a reader still needs; a later call removes them.
    """

    units: list[str] = field(default_factory=list)
    bytes: int = 0
    freed: int = 0
    kept: list[str] = field(default_factory=list)


def upload_units(log: Store, on_unit: Callable[[str, int], None] = lambda name, size: None) -> UploadReport:
    """Move every sealed unit of the store, lane by lane.

    Args:
        on_unit: called with lane/name and bytes of a unit that has been moved.

    Raises:
        ConfigError: `[remote] uri` is not set, or cannot be used.
        RemoteError: object storage does not answer or refuses; what was not moved is still here.
        CorruptionError: a local file does not match its manifest; it was not moved.
        LaneLockedError: another process changed sealed units for too long.
    """
    if log.settings().remote.uri is None:
        raise ConfigError(
            f'{log.path / "store.toml"} names no place to upload to: set uri = "s3://bucket/prefix" in '
            "[remote]"
        )
    report = UploadReport()
    with claim_upkeep(log):
        for lane in log.own_lanes():
            upload_lane(log, lane, report, on_unit=on_unit)
        follow_or_warn(log)
    return report


def upload_lane(
    log: Store,
    lane: str,
    report: UploadReport | None = None,
    stopped: Callable[[], bool] = lambda: False,
    on_unit: Callable[[str, int], None] = lambda name, size: None,
) -> UploadReport:
    """Move the lane's sealed units, in order; nothing where `[remote] uri` is not set.

    The caller is the only one that changes the store's sealed units.

    Args:
        stopped: asked before each unit.

    Raises:
        ConfigError, RemoteError, CorruptionError: as `upload_units`.
    """
    report = UploadReport() if report is None else report
    settings = log.settings().remote
    if settings.uri is None:
        return report
    before = len(report.units)
    units = current_units(log.path, lane)
    if any(unit.remote is None for unit in units):
        _refuse_others(log, lane, settings)
    for unit in units:
        if stopped():
            break
        name = f"{lane}/{unit.name}"
        if unit.remote is None:
            unit = _upload(log, unit, settings, remote_folder(settings.uri, log.store_id))
            report.units.append(name)
            report.bytes += unit.bytes if unit.dropped_us is None else 0
            on_unit(name, unit.bytes)
        # Also after a kill between the manifest and this.
        (unit_folder(log.path, unit) / UPLOADING).unlink(missing_ok=True)
        freed = _remove_local_files(log.path, unit)
        report.freed += freed or 0
        report.kept += [name] if freed is None else []
    if len(report.units) > before:
        remove_superseded(log.path, lane)
    return report


def _upload(log: Store, unit: Unit, settings: RemoteSettings, base: str) -> Unit:
    """Store one unit and note that in its local manifest; of a dropped unit only the manifest is stored."""
    folder = unit_folder(log.path, unit)
    address = f"{base}/sealed/{unit.lane}/{unit.name}"
    moved = with_remote(unit, address)
    # Written before the first byte, so that removing the unit also removes partial uploads.
    _note(folder, address)
    system, path = remote_place(address, settings)
    with explained(address, settings):
        _put_marker(log, system, remote_place(base, settings)[1])
    if unit.dropped_us is None:
        for file in unit.files:
            _check_local(folder / file.name, file)
            with explained(f"{address}/{file.name}", settings):
                _send(system, folder / file.name, f"{path}/{file.name}", file)
    else:
        remove_remote_files(log.path, unit)  # leftovers of an upload before the drop
    with explained(address, settings):
        put(system, f"{path}/{MANIFEST}", manifest_bytes(moved))
    write_manifest(folder, moved)
    return moved


def _note(folder: Path, address: str) -> None:
    with make_empty(folder / UPLOADING).open("w") as file:
        file.write(address)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(folder)


def _put_marker(log: Store, system: fs.FileSystem, base: str) -> None:
    """Store the marker of the remote folder, unless it is there."""
    ours = read_small(log.path / MARKER)
    try:
        with system.open_input_stream(f"{base}/{MARKER}") as stream:
            if stream.read() == ours:
                return
    except FileNotFoundError:
        pass
    put(system, f"{base}/{MARKER}", ours)


def _refuse_others(log: Store, lane: str, settings: RemoteSettings) -> None:
    """Check that no other copy of the store uploads this lane: remote units are this store's or unfinished.

    Raises:
        StoreError: somebody does.
    """
    base = f"{remote_folder(settings.uri or '', log.store_id)}/sealed/{lane}"
    with explained(base, settings):
        system, path = remote_place(base, settings)
        infos = system.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        whole = {Path(info.path).parent.name for info in infos if info.base_name == MANIFEST}
        for name in whole & {unit.name for unit in all_units(log.path, lane) if unit.remote is None}:
            _refuse_another(system, f"{path}/{name}/{MANIFEST}", log, lane, name)
    # The local folder of a replaced unit is kept until its remote files are removed.
    here = {folder.name for folder in lane_units_folder(log.path, lane).iterdir()}
    here |= {name.removeprefix(".").removesuffix(GONE) for name in here}
    if strange := sorted(whole - here):
        raise _two_copies(f"{base}/{strange[0]}")


def _refuse_another(system: fs.FileSystem, path: str, log: Store, lane: str, name: str) -> None:
    """Check that a remote unit of the same name has the same content, so that this store uploaded it."""
    with system.open_input_stream(path) as stream:
        theirs = parse_manifest(stream.read(), path)
    ours = read_manifest(lane_units_folder(log.path, lane) / name)
    if (theirs.segments, theirs.files) != (ours.segments, ours.files):
        raise _two_copies(f"s3://{path}")


def _two_copies(address: str) -> StoreError:
    return StoreError(
        f"{address} is not of this copy of the store: two copies upload to the same place. Let one of them "
        "write, and give the other one another [remote] uri in its store.toml"
    )


def _check_local(path: Path, file: SealedFile) -> None:
    try:
        digest = sha256_of(path)
    except FileNotFoundError:
        raise CorruptionError(f"{path}: a sealed file is missing: restore it from a copy") from None
    if digest != file.sha256:
        raise CorruptionError(f"{path}: its sha256 is not its manifest's: restore it from a copy")


def _send(system: fs.FileSystem, source: Path, target: str, file: SealedFile) -> None:
    """Store a file unless it is there, and read it back.

    Raises:
        RemoteError: what was read back is something else.
    """
    if _holds(system, target, file):
        return
    with source.open("rb") as stream, system.open_output_stream(target) as sink:
        while chunk := stream.read(CHUNK):
            sink.write(chunk)
    if not _holds(system, target, file):
        raise RemoteError(f"s3://{target}: what was stored there does not read back the same; try again")


def _holds(system: fs.FileSystem, path: str, file: SealedFile) -> bool:
    """Whether the object has the file's size and sha256; every byte of it is read."""
    info = system.get_file_info(path)
    if info.type != fs.FileType.File or info.size != file.bytes:
        return False
    digest = hashlib.sha256()
    with system.open_input_stream(path) as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == file.sha256


def _remove_local_files(store: Path, unit: Unit) -> int | None:
    """Remove the files here of a unit that object storage holds; bytes, or None while a reader needs them."""
    folder = unit_folder(store, unit)
    paths = [path for file in unit.files if (path := folder / file.name).exists()]
    if not paths:
        return 0
    freed = sum(path.stat().st_size for path in paths)
    with removing(store) as held:
        # A lease taken after this has read a manifest with the remote address.
        if (unit.lane, unit.name) in held:
            return None
        for path in paths:
            path.unlink()
    fsync_folder(folder)
    return freed
