"""The catalog's tables. `alembic/` migrates an older database to them.

Only types, keys and constraints that SQLite and PostgreSQL share. Text has no length: PostgreSQL would
refuse what SQLite takes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_REVISION = "0003"

OPEN, CLOSED, SEALED, DROPPED = "open", "closed", "sealed", "dropped"
"""States of a segment: possibly still written; closed; also in a sealed unit; removed, only its row left."""
FORMER_TABLES = ("steps", "consumers", "policy_versions")
"""Tables of earlier schema revisions that no longer exist in the current one."""


class Base(DeclarativeBase):
    """Declarative base of the catalog's tables."""


class StoreMeta(Base):
    """Which store this is the catalog of: one row."""

    __tablename__ = "store_meta"
    store_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    format: Mapped[int] = mapped_column(Integer)


class LaneRow(Base):
    """A lane, and the process that opened it last; null where no opening was recorded."""

    __tablename__ = "lanes"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    opened_us: Mapped[int | None] = mapped_column(BigInteger)
    process: Mapped[int | None] = mapped_column(Integer)
    truncated_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Cut off as a torn tail at that opening; no file keeps it, so it is null after a rebuild."""


class SegmentRow(Base):
    """A segment of a lane; `events` and `bytes` are null while it is open, `unit` while it is in none."""

    __tablename__ = "segments"
    lane: Mapped[str] = mapped_column(String(63), ForeignKey("lanes.name"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    first_seq: Mapped[int] = mapped_column(BigInteger)
    events: Mapped[int | None] = mapped_column(BigInteger)
    bytes: Mapped[int | None] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(7))
    unit: Mapped[str | None] = mapped_column(Text)


class UnitRow(Base):
    """A sealed unit that counts; superseded ones have no row."""

    __tablename__ = "units"
    lane: Mapped[str] = mapped_column(String(63), ForeignKey("lanes.name"), primary_key=True)
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    first_segment: Mapped[int] = mapped_column(Integer)
    last_segment: Mapped[int] = mapped_column(Integer)
    generation: Mapped[int] = mapped_column(Integer)
    first_seq: Mapped[int] = mapped_column(BigInteger)
    next_seq: Mapped[int] = mapped_column(BigInteger)
    bytes: Mapped[int] = mapped_column(BigInteger)
    remote: Mapped[str | None] = mapped_column(Text)
    sealed_us: Mapped[int] = mapped_column(BigInteger)
    dropped_us: Mapped[int | None] = mapped_column(BigInteger)
    chain: Mapped[str] = mapped_column(String(32))


class CheckpointRow(Base):
    """A checkpoint in the store, by its path relative to the store."""

    __tablename__ = "checkpoints"
    path: Mapped[str] = mapped_column(Text, primary_key=True)
    run: Mapped[str] = mapped_column(Text)
    policy: Mapped[str] = mapped_column(Text)
    policy_version: Mapped[int] = mapped_column(BigInteger)
    weights_digest: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger)


TABLES: tuple[type[Base], ...] = (StoreMeta, LaneRow, SegmentRow, UnitRow, CheckpointRow)
"""Every table, one that refers to another after it."""


def as_dict(row: Base) -> dict[str, Any]:
    """A row's values by column, in the table's order."""
    return {column.name: getattr(row, column.name) for column in row.__table__.columns}
