"""`rollbook store rebuild-catalog`: computes every row of the catalog anew from the store's files."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, delete, func, select
from sqlalchemy.orm import Session

from rollbook.store.catalog.catalog import (
    catalog_url,
    find_lane,
    note_store,
    read_identity,
    write_checkpoint,
    write_segment,
    write_units,
)
from rollbook.store.catalog.database import PATIENCE_S, TABLES, Database, StoreMeta, refuse_strange
from rollbook.store.cut import Cut
from rollbook.store.errors import CorruptionError
from rollbook.store.events import CheckpointRemoved, CheckpointWritten, Event
from rollbook.store.fold.checkpoints import held_and_removed
from rollbook.store.ids import now_us
from rollbook.store.log.store import Store
from rollbook.store.safe_paths import open_plain, read_small
from rollbook.store.sealed.unit import Unit, current_units
from rollbook.store.wal.files import lane_folder, read_watermark, segment_numbers, segment_path
from rollbook.store.wal.frame import ALIGN, first_seq_of


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild did.

    Attributes:
        catalog: the database's URL, without a password.
        moved: where the broken SQLite file that was there went, or None.
        events: how many the log held.
        rows: of each table.
    """

    catalog: str
    moved: Path | None
    events: int
    rows: dict[str, int]


def rebuild_catalog(store: Store, progress: Callable[[int], None] = lambda events: None) -> Rebuilt:
    """Rebuild the catalog while writers go on. Nothing that they record meanwhile is lost.

    Args:
        progress: called after each lane with the number of events in those looked through so far.

    Raises:
        CatalogError: the database cannot be reached, is another store's, or a newer release made it.
        CorruptionError: the log is damaged; the catalog is as it was.
    """
    url = catalog_url(store.path)
    moved = set_aside_if_broken(url)
    database = Database(url, remake=True)
    try:
        head = store.head()
        written = _checkpoints(store, head, {}, progress)
        with database.write() as session:
            note_store(session, database.name, *read_identity(store.path))
            # From here on no other process writes to the catalog. Rows written since the log was read are
            # read now.
            end = store.head()
            written += _checkpoints(store, end, head, progress)
            for table in reversed(TABLES):
                if table is not StoreMeta:
                    session.execute(delete(table))
            for lane in store.lanes():
                _write_lane(session, store.path, lane)
            for run, record in _held(written):
                write_checkpoint(session, run, record)
            counts = {
                t.__tablename__: session.scalar(select(func.count()).select_from(t)) or 0 for t in TABLES
            }
    finally:
        database.close()
    return Rebuilt(database.name, moved, sum(end.values()), counts)


def set_aside_if_broken(url: URL) -> Path | None:
    """Rename a SQLite file that cannot be read, with its journal; its new path, or None if all is well."""
    if url.get_backend_name() != "sqlite" or not url.database or not os.path.exists(url.database):
        return None
    path = Path(url.database)
    if _is_sound(path):
        return None
    aside = path.with_name(f"{path.name}.broken-{now_us()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def _is_sound(path: Path) -> bool:
    """Whether SQLite finds every page of the file in order."""
    connection = sqlite3.connect(path, timeout=PATIENCE_S)
    try:
        refuse_strange(connection)
        return connection.execute("pragma quick_check").fetchall() == [("ok",)]
    except sqlite3.OperationalError as error:
        # Busy, or not to be opened: no sign of damage, and the next opening reports it.
        return "disk I/O" not in str(error)
    except sqlite3.DatabaseError:
        return False
    finally:
        connection.close()


def _checkpoints(store: Store, end: Cut, start: Cut, progress: Callable[[int], None]) -> list[Event]:
    """The events between two cuts about checkpoints that were written or removed."""
    events: list[Event] = []
    read = sum(start.values())
    for lane, count in end.items():
        events += store.events_of({CheckpointWritten.KIND, CheckpointRemoved.KIND}, {lane: count}, start)
        read += count - start.get(lane, 0)
        progress(read)
    return events


def _held(events: list[Event]) -> Iterator[tuple[str, CheckpointWritten]]:
    """The checkpoints that were not removed, and the run of each."""
    runs: dict[str, list[Event]] = {}
    for event in events:
        runs.setdefault(event.run, []).append(event)
    for run, of_run in runs.items():
        yield from ((run, record) for record in held_and_removed(of_run)[0])


def _write_lane(session: Session, store: Path, lane: str) -> None:
    row = find_lane(session, lane)
    row.opened_us, row.process = _last_opening(lane_folder(store, lane))
    while True:
        with contextlib.suppress(FileNotFoundError):  # sealed and removed just now: it is in a unit then
            units, segments = _places(store, lane)
            break
    write_units(session, lane, units)
    for number, first_seq, events, size in segments:
        write_segment(session, lane, number, first_seq, events, size)


def _places(store: Path, lane: str) -> tuple[list[Unit], list[tuple[int, int, int | None, int | None]]]:
    """The lane's units, and its other segments: number, first event, events and bytes (None while open)."""
    folder = lane_folder(store, lane)
    units = current_units(store, lane)
    sealed = units[-1].last if units else 0
    mark = read_watermark(folder)
    # What is behind the watermark's segment is not durable yet: no append was acknowledged for it.
    numbers = [n for n in segment_numbers(folder) if sealed < n <= mark.segment]
    starts = {n: _first_seq(segment_path(folder, n)) for n in numbers}
    segments: list[tuple[int, int, int | None, int | None]] = []
    for number in numbers:
        if number == mark.segment:
            segments.append((number, starts[number], None, None))
        elif number + 1 in starts:
            size = segment_path(folder, number).stat().st_size
            segments.append((number, starts[number], starts[number + 1] - starts[number], size))
        else:
            raise CorruptionError(f"{segment_path(folder, number + 1)} is missing: restore it from a copy")
    return units, segments


def _last_opening(folder: Path) -> tuple[int | None, int | None]:
    """When the lane was last opened, and by which process, read from the lock file written at that time."""
    file = folder / "LOCK"
    try:
        return file.stat().st_mtime_ns // 1000, int(read_small(file))
    except (FileNotFoundError, ValueError):
        return None, None


def _first_seq(path: Path) -> int:
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        first = first_seq_of(file.read(ALIGN))
    if first is None:
        raise CorruptionError(f"{path}: begins with no frame; restore the file from a copy")
    return first
