"""The catalog of a store: its lanes, units and checkpoints, for people and dashboards.

Whatever writes them also notes them here. It is derived data: no append waits for it and no
answer depends on it. `rollbook store rebuild-catalog` rebuilds it from the files alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import URL, delete, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from rollbook.store.catalog.database import (
    CLOSED,
    DEFAULT,
    DROPPED,
    OPEN,
    SEALED,
    TABLES,
    URL_VARIABLE,
    Base,
    CheckpointRow,
    Database,
    LaneRow,
    SegmentRow,
    StoreMeta,
    UnitRow,
    as_dict,
    look_at_files,
    parse_url,
    refuse_outside,
)
from rollbook.store.errors import CatalogError, NotAStoreError
from rollbook.store.events import CheckpointWritten
from rollbook.store.ids import now_us
from rollbook.store.safe_paths import read_small
from rollbook.store.sealed.unit import Unit
from rollbook.store.settings import read_settings
from rollbook.store.wal.segment import LaneState

logger = logging.getLogger(__name__)


class Catalog:
    """The catalog of one store, migrated to this release's schema when it is opened.

    Args:
        database: where it is kept.
        store_id, format_: of the store.

    Raises:
        CatalogError: the database is the catalog of another store.
    """

    def __init__(self, database: Database, store_id: str, format_: int) -> None:
        self._database = database
        self.name = database.name
        with database.read() as session:
            noted = [(row.store_id, row.format) for row in session.scalars(select(StoreMeta))]
        if noted != [(store_id, format_)]:
            with database.write() as session:
                note_store(session, database.name, store_id, format_)

    @classmethod
    def of(cls, store: Path) -> Catalog:
        """The catalog of the store in this folder, where its settings say.

        Raises:
            CatalogError: the database cannot be reached, is damaged, is another store's, or a newer
                release made it.
        """
        store_id, format_ = read_identity(store)
        database = Database(catalog_url(store))
        try:
            return cls(database, store_id, format_)
        except BaseException:
            database.close()
            raise

    def record_lane(self, lane: str, state: LaneState) -> None:
        """Note that this process opened the lane, the closed segments it found, and the one it began."""
        with self._database.write() as session:
            row = find_lane(session, lane)
            row.opened_us, row.process = now_us(), os.getpid()
            row.truncated_bytes = state.truncated_bytes
            first = state.segments[0].number if state.segments else state.last_segment + 1
            # Read together, and held: the session then has each of them without a query of its own.
            rows = select(SegmentRow).where(SegmentRow.lane == lane, SegmentRow.number >= first)
            held = session.scalars(rows).all()
            for info in state.segments:
                write_segment(session, lane, info.number, info.first_seq, info.events, info.bytes)
            write_segment(session, lane, state.last_segment + 1, state.next_seq)
            del held

    def record_units(self, lane: str, units: Iterable[Unit]) -> None:
        """Record the complete list of a lane's current units; rows of other units of the lane are deleted."""
        with self._database.write() as session:
            write_units(session, lane, units)

    def record_checkpoint(self, run: str, record: CheckpointWritten) -> None:
        """Note a checkpoint."""
        with self._database.write() as session:
            write_checkpoint(session, run, record)

    def forget_checkpoint(self, run: str, path: str) -> None:
        """Note that a checkpoint was removed."""
        with self._database.write() as session:
            session.execute(delete(CheckpointRow).where(CheckpointRow.run == run, CheckpointRow.path == path))

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Every table's rows at one moment, each table in the order of its key."""
        with self._database.read() as session:
            return {table.__tablename__: _dicts(session, table) for table in TABLES}

    def close(self) -> None:
        """Give the database connections back."""
        self._database.close()


def note_opening(store: Path, lane: str, state: LaneState) -> None:
    """Note in the store's catalog that this process opened a lane, unless the catalog is out of reach."""
    _note(store, f"lane {lane} is written", lambda catalog: catalog.record_lane(lane, state))


def note_units(store: Path, lane: str, units: Iterable[Unit]) -> bool:
    """Note in the store's catalog which units of a lane count now; False if that is out of reach."""
    kept = list(units)
    return _note(store, f"lane {lane} is sealed", lambda catalog: catalog.record_units(lane, kept))


def note_checkpoint(store: Path, run: str, record: CheckpointWritten) -> None:
    """Note a checkpoint in the store's catalog, unless that is out of reach."""
    text = f"checkpoint {record.path} is written"
    _note(store, text, lambda catalog: catalog.record_checkpoint(run, record))


def note_removed_checkpoint(store: Path, run: str, path: str) -> None:
    """Note in the store's catalog that a checkpoint was removed, unless that is out of reach."""
    _note(store, f"checkpoint {path} is removed", lambda catalog: catalog.forget_checkpoint(run, path))


def _note(store: Path, what: str, write: Callable[[Catalog], None]) -> bool:
    """Write to the catalog. It is derived, so its outage is a warning and stops nothing."""
    try:
        with contextlib.closing(Catalog.of(store)) as catalog:
            write(catalog)
    except (CatalogError, SQLAlchemyError) as error:
        logger.warning("%s, but the catalog does not know: %s", what, error)
        return False
    return True


def catalog_url(store: Path) -> URL:
    """The URL of the catalog of the store in this folder; a relative SQLite file lies in that folder.

    The store's `store.toml` is not trusted: it may name only a file in the store or a server
    that the operator allows. ROLLBOOK_CATALOG_URL is set by the operator and may name any
    database.

    Raises:
        ConfigError, CatalogError: the settings cannot be read, or name no URL, or one of neither
            kind; or the file is a link, a pipe or the like.
    """
    override = os.environ.get(URL_VARIABLE)
    text = override or read_settings(store).catalog.url
    url = URL.create("sqlite", database=DEFAULT) if text is None else parse_url(text)
    if not override:
        refuse_outside(url, store)
    if url.get_backend_name() == "sqlite" and url.database:
        url = url.set(database=str(store.absolute() / url.database))
        look_at_files(Path(str(url.database)))
    return url


def read_identity(store: Path) -> tuple[str, int]:
    """Id and format of the store in this folder.

    Raises:
        NotAStoreError: there is none.
    """
    marker = store / "STORE.json"
    try:
        meta = orjson.loads(read_small(marker))
        return str(meta["id"]), int(meta["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotAStoreError(f"{marker} is not a Rollbook store's: {error!r}") from error


def note_store(session: Session, name: str, store_id: str, format_: int) -> None:
    """Record which store the catalog belongs to.

    Raises:
        CatalogError: it is another one's.
    """
    for row in session.scalars(select(StoreMeta)):
        if row.store_id != store_id:
            raise CatalogError(
                f"catalog {name} is that of store {row.store_id}, not of {store_id}: give each store a "
                "database of its own, and run `rollbook store rebuild-catalog`"
            )
    session.merge(StoreMeta(store_id=store_id, format=format_))


def _dicts(session: Session, table: type[Base]) -> list[dict[str, Any]]:
    key = [column.name for column in table.__table__.primary_key]
    rows = [as_dict(row) for row in session.scalars(select(table))]
    # Sorted here: databases differ in how they order text.
    return sorted(rows, key=lambda row: [row[name] for name in key])


def find_lane(session: Session, lane: str) -> LaneRow:
    """The lane's row, inserted if it is missing."""
    row = session.merge(LaneRow(name=lane))
    session.flush()
    return row


def write_segment(
    session: Session,
    lane: str,
    number: int,
    first_seq: int,
    events: int | None = None,
    bytes_: int | None = None,
) -> None:
    """Note a segment that is in no unit: closed, or open if its size is not given."""
    row = session.get(SegmentRow, (lane, number))
    if row is not None and row.state in (SEALED, DROPPED):
        return
    state = OPEN if events is None else CLOSED
    session.merge(
        SegmentRow(
            lane=lane, number=number, first_seq=first_seq, events=events, bytes=bytes_, state=state, unit=None
        )
    )


def write_units(session: Session, lane: str, units: Iterable[Unit]) -> None:
    """Replace the lane's units by these, and update the states of its segments accordingly."""
    units = list(units)
    find_lane(session, lane)
    known = {row.name: row for row in session.scalars(select(UnitRow).where(UnitRow.lane == lane))}
    current = {unit.name: _unit_row(lane, unit) for unit in units}
    for name in known.keys() - current.keys():
        # Its segments are in another unit now, which the loop below notes; if in none, they are only closed.
        session.execute(
            update(SegmentRow)
            .where(SegmentRow.lane == lane, SegmentRow.unit == name)
            .values(state=CLOSED, unit=None)
        )
        session.execute(delete(UnitRow).where(UnitRow.lane == lane, UnitRow.name == name))
    for unit in units:
        row = current[unit.name]
        if unit.name in known and as_dict(known[unit.name]) == as_dict(row):
            continue
        session.merge(row)
        for segment in unit.segments:
            session.merge(
                SegmentRow(
                    lane=lane,
                    number=segment.number,
                    first_seq=segment.first_seq,
                    events=segment.events,
                    bytes=segment.bytes,
                    state=SEALED if unit.dropped_us is None else DROPPED,
                    unit=unit.name,
                )
            )


def write_checkpoint(session: Session, run: str, record: CheckpointWritten) -> None:
    """Record a checkpoint of a run; an earlier row of the same path is replaced."""
    session.merge(
        CheckpointRow(
            path=record.path,
            run=run,
            policy=record.policy,
            policy_version=record.policy_version,
            weights_digest=record.weights_digest,
            bytes=record.bytes,
        )
    )


def _unit_row(lane: str, unit: Unit) -> UnitRow:
    return UnitRow(
        lane=lane,
        name=unit.name,
        first_segment=unit.first,
        last_segment=unit.last,
        generation=unit.generation,
        first_seq=unit.first_seq,
        next_seq=unit.next_seq,
        bytes=unit.bytes,
        remote=unit.remote,
        sealed_us=unit.sealed_us,
        dropped_us=unit.dropped_us,
        chain=unit.chain,
    )
