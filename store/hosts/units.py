"""Sealed units of other hosts' lanes: their manifests are copied, their files stay in object storage."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from pyarrow import fs

from rollbook.store.hosts.replica import Replica
from rollbook.store.permissions import make_folder
from rollbook.store.sealed.remote import explained, read_remote_unit, remote_folder, remote_place
from rollbook.store.sealed.unit import (
    MANIFEST,
    UNIT_NAME,
    Unit,
    choose,
    current_units,
    read_manifest,
    unit_folder,
    unsealed_start,
    write_manifest,
)
from rollbook.store.settings import read_settings
from rollbook.store.wal.files import lane_folder, read_watermark, segment_numbers, segment_path

_DROPPED = "!"
"""Behind the name of a unit whose files retention has removed."""


def units_elsewhere(store: Path, lane: str) -> list[str]:
    """Which of a lane's current units are in object storage; a unit that was dropped has a mark."""
    if not (store / "sealed" / lane).exists():
        return []
    known = [unit for unit in current_units(store, lane) if unit.remote is not None]
    return [unit.name + (_DROPPED if unit.dropped_us is not None else "") for unit in known]


def refresh_units(store: Path, store_id: str, replica: Replica) -> None:
    """Have the manifests of a replica's units as its owner last said they are, and remove what they replace.

    Where the owner has not said it, they are looked for in object storage.

    Raises:
        RemoteError: object storage does not answer.
    """
    if replica.units == []:
        return  # nothing new: what is here stays
    settings, lane = read_settings(store), replica.lane
    if settings.remote.uri is None:
        return  # asked for again once it is known where they are
    base = f"{remote_folder(settings.remote.uri, store_id)}/sealed/{lane}"
    with explained(base, settings.remote):
        system, path = remote_place(base, settings.remote)
        wanted = _listed(system, path) if replica.units is None else replica.units
        try:
            _copy_manifests(store, lane, base, system, path, wanted)
        except FileNotFoundError:  # it was replaced since its owner told of it
            _copy_manifests(store, lane, base, system, path, _listed(system, path))
    told, replica.units = replica.units, []
    # What an older chunk does not name may be newer: only what another unit replaces goes.
    here = _manifests(store, lane)
    for name in here.keys() - {unit.name for unit in choose(here.values())}:
        shutil.rmtree(store / "sealed" / lane / name, ignore_errors=True)
    if here:
        replica.skip_to(unsealed_start(store, lane))
        if not _remove_sealed_segments(store, lane, settings.seal.keep_wal_bytes):
            replica.units = told  # once more when readers are
        for unit in current_units(store, lane):
            if (unit.erased or unit.dropped_us is not None) and not _remove_segments(store, unit):
                replica.units = told  # the newest segment is still read: once more when there is another


def _copy_manifests(
    store: Path, lane: str, base: str, system: fs.FileSystem, path: str, wanted: list[str]
) -> None:
    """Have the manifests of these units here.

    Raises:
        FileNotFoundError: one is not there.
    """
    known = _manifests(store, lane)
    for entry in wanted:
        name = entry.removesuffix(_DROPPED)
        if name in known and (known[name].dropped_us is not None) == entry.endswith(_DROPPED):
            continue
        unit = read_remote_unit(system, f"{path}/{name}", f"{base}/{name}")
        make_folder(unit_folder(store, unit))
        write_manifest(unit_folder(store, unit), unit)


def _listed(system: fs.FileSystem, path: str) -> list[str]:
    """The units in object storage that have a manifest; whether they were dropped the manifest says."""
    selector = fs.FileSelector(path, recursive=True, allow_not_found=True)
    files = [Path(info.path) for info in system.get_file_info(selector) if info.is_file]
    return sorted({file.parent.name for file in files if file.name == MANIFEST})


def _manifests(store: Path, lane: str) -> dict[str, Unit]:
    folder = store / "sealed" / lane
    if not folder.exists():
        return {}
    names = [entry.name for entry in folder.iterdir() if UNIT_NAME.fullmatch(entry.name)]
    return {name: read_manifest(folder / name) for name in names}


def _remove_segments(store: Path, unit: Unit) -> bool:
    """Remove segments of a replica that hold what was erased, or dropped; whether none is left."""
    folder = lane_folder(store, unit.lane)
    newest = read_watermark(folder).segment
    held = [number for number in segment_numbers(folder) if unit.first <= number <= unit.last]
    for number in held:
        if number < newest:
            segment_path(folder, number).unlink(missing_ok=True)
    return newest not in held


def _remove_sealed_segments(store: Path, lane: str, keep: int) -> bool:
    """Remove the oldest segments of a replica that are in units, but for so many bytes, and any that came in
    part before its units were known; whether readers are past all that are in units."""
    folder = lane_folder(store, lane)
    sealed, mark = unsealed_start(store, lane).number, read_watermark(folder)
    sizes = {s.number: s.bytes for unit in current_units(store, lane) for s in unit.segments}
    kept = 0
    for number in reversed(segment_numbers(folder)):
        path = segment_path(folder, number)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            kept += size
            if number < min(sealed, mark.segment) and (kept > keep or size != sizes.get(number, size)):
                path.unlink()
    return mark.segment >= sealed - 1
