"""Opens a store: its log, and its catalog, which notes the lanes that are written."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from rollbook.store.log.store import Carrier, Store
from rollbook.store.marker import MARKER, create_marker, read_marker
from rollbook.store.safe_paths import look_inside
from rollbook.store.settings import read_settings
from rollbook.store.wal.segment import LaneState


def open_store(path: str | os.PathLike[str], *, create: bool = False) -> Store:
    """Open the store at `path`; with `create`, make an empty one where there is nothing.

    Raises:
        NotAStoreError: nothing is there (and `create` is false), or something that is not a store.
        FormatError: a newer Rollbook wrote it.
        OutsideError: the folder holds a link, a device or the like; none of it was opened.
        MediumError: the store is one of several hosts, and what the others wrote cannot be had.
    """
    folder = Path(path).absolute()
    if create and not (folder / MARKER).exists():
        create_marker(folder)
    store_id = read_marker(folder)
    look_inside(folder)
    return Store(folder, store_id, _note_opening, _carrier(folder, store_id))


_CARRIERS: dict[tuple[Path, int], Carrier] = {}


def _carrier(folder: Path, store_id: str) -> Carrier | None:
    """What carries the store between hosts, one for each folder in a process; None where there is one
    host."""
    settings = read_settings(folder).medium
    if settings.url is None:
        return None
    key = (folder, os.getpid())
    if key not in _CARRIERS:
        from rollbook.store.hosts.carrier import Carrier as HostCarrier

        carrier = _CARRIERS[key] = HostCarrier(folder, store_id, settings)
        atexit.register(carrier.close)
    _CARRIERS[key].catch_up()
    return _CARRIERS[key]


def _note_opening(store: Path, lane: str, state: LaneState) -> None:
    # SQLAlchemy takes a quarter of a second to import, which who only reads need not wait for.
    from rollbook.store.catalog.catalog import note_opening

    note_opening(store, lane, state)
