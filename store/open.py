"""Opens a store: its log, and its catalog, which notes the lanes that are written."""

from __future__ import annotations

import os
from pathlib import Path

from rollbook.store.log.store import Store
from rollbook.store.marker import MARKER, create_marker, read_marker
from rollbook.store.safe_paths import look_inside
from rollbook.store.wal.segment import LaneState


def open_store(path: str | os.PathLike[str], *, create: bool = False) -> Store:
    """Open the store at `path`; with `create`, make an empty one where there is nothing.

    Raises:
        NotAStoreError: nothing is there (and `create` is false), or something that is not a store.
        FormatError: a newer Rollbook wrote it.
        OutsideError: the folder holds a link, a device or the like; none of it was opened.
    """
    folder = Path(path).absolute()
    if create and not (folder / MARKER).exists():
        create_marker(folder)
    store = Store(folder, read_marker(folder), _note_opening)
    look_inside(folder)
    return store


def _note_opening(store: Path, lane: str, state: LaneState) -> None:
    # SQLAlchemy takes a quarter of a second to import, which who only reads need not wait for.
    from rollbook.store.catalog.catalog import note_opening

    note_opening(store, lane, state)
