"""Moves sealed units to object storage at `[remote] uri`; unsealed events stay local.

A unit's files are stored, read back and compared by size and sha256; then its manifest is
stored, then the local manifest names the address, and only then are the local files removed,
unless a reader has leased them. Wherever this is interrupted, the next call continues: a file
that is complete there is not sent again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyarrow import fs

from rollbook.store.errors import ConfigError, CorruptionError, RemoteError, StoreError
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
    read_remote_unit,
    remote_folder,
    remote_place,
    remove_remote_files,
)
from rollbook.store.sealed.unit import (
    MANIFEST,
    SealedFile,
    Unit,
    all_units,
    current_units,
    lane_units_folder,
    manifest_bytes,
    read_manifest,
    unit_folder,
    with_remote,
    write_manifest,
)
from rollbook.store.settings import RemoteSettings
from rollbook.store.tables.following import follow_or_warn
from rollbook.store.upkeep.claim import claim_upkeep
from rollbook.store.upkeep.compact import GONE, remove_superseded

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
            _refuse_another(system, f"{path}/{name}", log, lane, name)
    # The local folder of a replaced unit is kept until its remote files are removed.
    here = {folder.name for folder in lane_units_folder(log.path, lane).iterdir()}
    here |= {name.removeprefix(".").removesuffix(GONE) for name in here}
    if strange := sorted(whole - here):
        raise _two_copies(f"{base}/{strange[0]}")


def _refuse_another(system: fs.FileSystem, path: str, log: Store, lane: str, name: str) -> None:
    """Check that a remote unit of the same name has the same content, so that this store uploaded it."""
    theirs = read_remote_unit(system, path, f"s3://{path}")
    ours = read_manifest(lane_units_folder(log.path, lane) / name)
    if (theirs.segments, theirs.files) != (ours.segments, ours.files):
        raise _two_copies(f"s3://{path}/{MANIFEST}")


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
