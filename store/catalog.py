"""The catalog: what the store holds, in a relational database. Derived; never acknowledged against.

SQLite beside the log by default, any SQLAlchemy URL otherwise; the schema keeps to types and keys that
SQLite and PostgreSQL share. `alembic/` holds its migrations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import BigInteger, Engine, ForeignKey, String, create_engine, inspect, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from rollbook.store.events import CheckpointWritten
from rollbook.store.ids import now_us
from rollbook.store.lane.recovery import LaneState

SCHEMA_REVISION = "0001"


class Base(DeclarativeBase):
    """Declarative base of the catalog's tables."""


class LaneRow(Base):
    """A lane, and the process that opened it last."""

    __tablename__ = "lanes"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    opened_us: Mapped[int] = mapped_column(BigInteger)
    process: Mapped[int]
    truncated_bytes: Mapped[int] = mapped_column(BigInteger)


class SegmentRow(Base):
    """A closed segment of a lane."""

    __tablename__ = "segments"
    lane: Mapped[str] = mapped_column(String(63), ForeignKey("lanes.name"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    first_seq: Mapped[int] = mapped_column(BigInteger)
    events: Mapped[int] = mapped_column(BigInteger)
    bytes: Mapped[int] = mapped_column(BigInteger)


class CheckpointRow(Base):
    """A checkpoint in the store, by its path relative to the store."""

    __tablename__ = "checkpoints"
    path: Mapped[str] = mapped_column(String(512), primary_key=True)
    run: Mapped[str] = mapped_column(String(128))
    policy: Mapped[str] = mapped_column(String(128))
    policy_version: Mapped[int] = mapped_column(BigInteger)
    weights_digest: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)


class Catalog:
    """The catalog of one store, migrated to this release's schema when it is opened."""

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = {"timeout": 30} if url.startswith("sqlite") else {}
        self._engine: Engine = create_engine(url, connect_args=options)
        with self._engine.connect() as connection:
            current = None
            if inspect(connection).has_table("alembic_version"):
                query = "select version_num from alembic_version"
                current = connection.exec_driver_sql(query).scalar()
        if current != SCHEMA_REVISION:
            self._migrate()

    @classmethod
    def beside(cls, store: Path) -> Catalog:
        """The default: a SQLite file in the store's folder."""
        return cls(f"sqlite:///{store / 'catalog.db'}")

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", "rollbook:migrations")
        with self._engine.begin() as connection:
            if connection.dialect.name == "sqlite":
                # Of processes that open a new store together, one migrates and the others wait.
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def record_lane(self, lane: str, state: LaneState) -> None:
        """Note that this process opened the lane, and the closed segments it found."""
        with Session(self._engine) as session, session.begin():
            session.merge(
                LaneRow(
                    name=lane,
                    opened_us=now_us(),
                    process=os.getpid(),
                    truncated_bytes=state.truncated_bytes,
                )
            )
            session.flush()
            for info in state.segments:
                session.merge(
                    SegmentRow(
                        lane=lane,
                        number=info.number,
                        first_seq=info.first_seq,
                        events=info.events,
                        bytes=info.bytes,
                    )
                )

    def record_checkpoint(self, run: str, record: CheckpointWritten) -> None:
        """Note a checkpoint."""
        with Session(self._engine) as session, session.begin():
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

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Every table's rows, for `rollbook store info`."""
        with Session(self._engine) as session:
            return {
                table.__tablename__: [_as_dict(row) for row in _all(session, table)]
                for table in (LaneRow, SegmentRow, CheckpointRow)
            }

    def close(self) -> None:
        """Give the database connections back."""
        self._engine.dispose()


def _all(session: Session, table: type[Base]) -> Iterable[Base]:
    return session.scalars(select(table).order_by(*table.__table__.primary_key))


def _as_dict(row: Base) -> dict[str, Any]:
    return {column.name: getattr(row, column.name) for column in row.__table__.columns}
