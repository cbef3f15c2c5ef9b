"""Recreates a store from object storage alone: on another machine, or after a disk was lost.

Only manifests are fetched. Each lane ends with its last uploaded unit: events after it were in WAL files,
which are never uploaded. The new store is read-only towards object storage: it removes and uploads nothing
until `[remote] uri` is set in its `store.toml`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import orjson
from pyarrow import fs

from rollbook.store.errors import CorruptionError, NotAStoreError
from rollbook.store.marker import MARKER, made_whole, new_place
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.sealed.remote import explained, read_remote_unit, remote_place
from rollbook.store.sealed.unit import (
    MANIFEST,
    UNIT_NAME,
    Unit,
    current_units,
    unit_folder,
    unsealed_start,
    write_manifest,
)
from rollbook.store.settings import OwnRemoteSettings
from rollbook.store.wal.files import Watermark, lane_folder, write_watermark

AT_ONCE = 16
"""Manifests fetched at the same time."""


@dataclass(frozen=True, slots=True)
class AttachReport:
    """What was found in object storage.

    Attributes:
        lanes: lane -> its events; those that retention dropped count.
        units: sealed units, dropped ones and replaced ones included.
        bytes: of their files, which stay where they are.
        unfinished: addresses of folders without a manifest: uploads that were cut short. Nobody reads them.
    """

    lanes: dict[str, int]
    units: int
    bytes: int
    unfinished: tuple[str, ...]


def attach(folder: Path, uri: str, endpoint: str | None = None) -> AttachReport:
    """Make a store in a new folder that reads the one at `uri`, such as s3://bucket/prefix/STORE-ID.

    Args:
        endpoint: URL of an S3-compatible service that is not AWS.

    Raises:
        NotAStoreError: the folder is not empty, or no store is at `uri`.
        ConfigError, RemoteError: the address cannot be used; object storage does not answer or refuses.
        CorruptionError: a manifest is damaged, or one between two others is missing.
        FormatError: a newer Rollbook wrote it.
    """
    folder = new_place(folder)
    uri, settings = uri.rstrip("/"), OwnRemoteSettings(endpoint=endpoint)
    with explained(uri, settings):
        system, base = remote_place(uri, settings)
        marker = _marker(system, base, uri)
        units, unfinished = _find_units(system, base, uri)
    with made_whole(folder, marker) as building:
        lanes = _write_units(building, units, endpoint)
    size = sum(unit.bytes for unit in units if unit.dropped_us is None)
    return AttachReport(lanes, len(units), size, unfinished)


def _marker(system: fs.FileSystem, base: str, uri: str) -> bytes:
    try:
        with system.open_input_stream(f"{base}/{MARKER}") as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        raise NotAStoreError(
            f"{uri} holds no {MARKER}: name the address with the store's id at its end, as "
            "`rollbook store upload` prints it"
        ) from None


def _find_units(system: fs.FileSystem, base: str, uri: str) -> tuple[list[Unit], tuple[str, ...]]:
    """Every unit with a manifest there, `remote` set to where it was found; and the folders without
    a manifest."""
    selector = fs.FileSelector(f"{base}/sealed", recursive=True, allow_not_found=True)
    files = [info.path.removeprefix(f"{base}/") for info in system.get_file_info(selector) if info.is_file]
    folders = {folder for file in files if UNIT_NAME.fullmatch((folder := Path(file).parent).name)}
    whole = sorted(folder for folder in folders if f"{folder}/{MANIFEST}" in set(files))

    def read(unit: Path) -> Unit:
        return read_remote_unit(system, f"{base}/{unit}", f"{uri}/{unit}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        units = list(pool.map(read, whole))
    return units, tuple(f"{uri}/{folder}" for folder in sorted(folders - set(whole)))


def _write_units(folder: Path, units: list[Unit], endpoint: str | None) -> dict[str, int]:
    """Write what the store has beside its marker; lane -> its events."""
    if endpoint is not None:
        make_empty(folder / "store.toml").write_text(
            f"[remote]\nendpoint = {orjson.dumps(endpoint).decode()}\n"
        )
    for unit in units:
        make_folder(unit_folder(folder, unit))
        write_manifest(unit_folder(folder, unit), unit)
    ends: dict[str, int] = {}
    for lane in sorted({unit.lane for unit in units}):
        try:
            ends[lane] = end_with_units(folder, lane)
        except CorruptionError as error:
            raise CorruptionError(
                f"lane {lane!r} is not whole in object storage: a unit is missing before "
                f"{current_units(folder, lane)[-1].remote}: run `rollbook store upload` where the store is, "
                "if it still is"
            ) from error
    return ends


def end_with_units(store: Path, lane: str) -> int:
    """Make the lane's folder in a new store, where it ends with its last unit; its number of events.

    Raises:
        CorruptionError: the lane's units do not follow each other from the first segment on.
    """
    end = unsealed_start(store, lane)
    make_folder(lane_folder(store, lane))
    write_watermark(lane_folder(store, lane), Watermark(end.number - 1, end.before, end.next_seq))
    return end.next_seq
