"""Connects to the catalog's database, migrates it, and turns its errors into readable ones.

SQLite and PostgreSQL behave alike here: one writing transaction at a time (SQLite's write lock, a PostgreSQL
advisory lock), reading transactions see one snapshot, and the unfinished transaction of a killed process is
rolled back.

A catalog is in the store's folder, or where the operator's settings allow it. Alembic brings its schema up to
date.

The catalog's tables. `alembic/` migrates an older database to them.

Only types, keys and constraints that SQLite and PostgreSQL share. Text has no length: PostgreSQL would
refuse what SQLite takes.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    create_engine,
    event,
    inspect,
    make_url,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from rollbook.store.errors import CatalogError, OutsideError
from rollbook.store.external_access import allows_folder, allows_host, remedy
from rollbook.store.permissions import make_empty
from rollbook.store.safe_paths import refuse_no_plain

if TYPE_CHECKING:
    from alembic.config import Config

SCHEMA_REVISION = "0004"

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


class ServiceHeadRow(Base):
    """The newest position that a process of a training service took, in the order of all; one row. `epoch` is
    another where the tables were made anew."""

    __tablename__ = "service_head"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    epoch: Mapped[str] = mapped_column(String(36))
    position: Mapped[int] = mapped_column(BigInteger)


class ServiceBatchRow(Base):
    """Where the events of a position are, or will be once they are durable: so many from a number on."""

    __tablename__ = "service_batches"
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    lane: Mapped[str] = mapped_column(String(63))
    seq: Mapped[int] = mapped_column(BigInteger)
    events: Mapped[int] = mapped_column(Integer)
    process: Mapped[str] = mapped_column(String(36))


class ServiceProcessRow(Base):
    """A process of a training service, which is alive until then unless it says so again."""

    __tablename__ = "service_processes"
    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    until: Mapped[float] = mapped_column(Double)
    trains: Mapped[bool] = mapped_column(Boolean)


class ServiceSeatRow(Base):
    """Who does what is asked of a model, or samples for a request."""

    __tablename__ = "service_seats"
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    process: Mapped[str] = mapped_column(String(36))
    trains: Mapped[bool] = mapped_column(Boolean)


TABLES: tuple[type[Base], ...] = (StoreMeta, LaneRow, SegmentRow, UnitRow, CheckpointRow)
"""The tables of what the log says, one that refers to another after it. The others hold what is so for a
moment, among the processes of a training service."""


def as_dict(row: Base) -> dict[str, Any]:
    """A row's values by column, in the table's order."""
    return {column.name: getattr(row, column.name) for column in row.__table__.columns}


PATIENCE_S = 30
"""How long a transaction waits for another process's to end."""
CONNECT_S = 10
_ADVISORY_LOCK = 0x726F6C6C626F6F6B  # "rollbook"
_SECRETS = ("password", "sslpassword")
_BUSY = ("database is locked", "lock timeout")
_UNREACHABLE = ("unable to open database file", "readonly database", "disk is full", "connection", "resolve")

_VERSION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""Where Alembic notes the revision, as it makes it itself."""

_Mode = Literal["read", "write", "migrate"]


def without_secrets(url: URL) -> str:
    """The URL as it may be shown."""
    return url._replace(password=None).difference_update_query(_SECRETS).render_as_string()


class Database:
    """The database of one catalog, at this release's schema.

    Args:
        remake: do not migrate; drop tables that differ from this release's, and create them
            anew.

    Raises:
        CatalogError: it cannot be reached, is damaged, or a newer release made it.
    """

    def __init__(self, url: URL, *, remake: bool = False) -> None:
        self.name = without_secrets(url)
        with self._explained():
            self._engine = _engine(url)
            try:
                self._bring_up_to_date(remake)
            except BaseException:
                self._engine.dispose()
                raise

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that writes; there is one at a time. It commits as a whole or not at all."""
        with self._explained(), self._begin("write") as connection, Session(connection) as session:
            yield session
            session.flush()

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that sees the database as it is at one moment."""
        with self._explained(), self._begin("read") as connection, Session(connection) as session:
            yield session

    @contextlib.contextmanager
    def listening(self, channel: str) -> Iterator[Callable[[float], Iterator[str]]]:
        """Context: what gives the messages that come on a channel of PostgreSQL, within so many seconds."""
        with self._explained(), self._engine.connect() as plain:
            connection = plain.execution_options(isolation_level="AUTOCOMMIT")
            connection.exec_driver_sql(f"listen {channel}")
            driver: Any = connection.connection.driver_connection
            try:
                yield lambda within_s: (notify.payload for notify in driver.notifies(timeout=within_s))
            finally:
                plain.invalidate()  # it listens, which nobody else is to find

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    @contextlib.contextmanager
    def _begin(self, mode: _Mode) -> Iterator[Connection]:
        with self._engine.connect() as plain:
            isolation: dict[str, Any] = {}
            if mode == "read" and plain.dialect.name == "postgresql":
                isolation = {"isolation_level": "REPEATABLE READ"}
            connection = plain.execution_options(rollbook_mode=mode, **isolation)
            with connection.begin():
                if connection.dialect.name == "postgresql" and mode != "read":
                    connection.exec_driver_sql(f"set local lock_timeout = '{PATIENCE_S}s'")
                    connection.exec_driver_sql(f"select pg_advisory_xact_lock({_ADVISORY_LOCK})")
                yield connection

    # Migrations -------------------------------------------------------------------------------

    def _bring_up_to_date(self, remake: bool) -> None:
        with self._begin("read") as connection:
            if _is_whole(connection) if remake else _revision(connection) == SCHEMA_REVISION:
                return
        with self._begin("migrate") as connection:
            # Asked again: of processes that open a new catalog together, one makes it and the others wait.
            revision = _revision(connection)
            if revision not in (None, SCHEMA_REVISION):
                self._refuse_unknown(str(revision))
            if remake and not _is_whole(connection):
                Base.metadata.drop_all(connection)
                for name in (*FORMER_TABLES, "alembic_version"):
                    connection.exec_driver_sql(f"drop table if exists {name}")
            if _is_empty(connection):
                _make(connection)
            elif revision != SCHEMA_REVISION:
                upgrade(connection)

    def _refuse_unknown(self, revision: str) -> None:
        if revision not in known_revisions():
            raise CatalogError(
                f"catalog {self.name} is at revision {revision!r}, which this release does not know "
                f"(it knows up to {SCHEMA_REVISION}): update rollbook, or name another database and run "
                "`rollbook store rebuild-catalog`"
            )

    # Errors -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ModuleNotFoundError as error:
            driver = (
                'pip install "rollbook[postgres]"' if error.name == "psycopg" else f"install {error.name}"
            )
            raise CatalogError(f"catalog {self.name} needs a driver that is missing: {driver}") from error
        except (SQLAlchemyError, sqlite3.Error) as error:
            cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
            reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise CatalogError(f"catalog {self.name}: {reason}: {_remedy(error, reason)}") from error


def _remedy(error: Exception, reason: str) -> str:
    if any(words in reason for words in _BUSY):
        return f"another process has kept it busy for {PATIENCE_S} seconds; try again when it has ended"
    if isinstance(error, ArgumentError):
        return "mend [catalog] url in store.toml, or ROLLBOOK_CATALOG_URL"
    operational = isinstance(error, OperationalError | sqlite3.OperationalError)
    if operational and any(words in reason for words in _UNREACHABLE):
        return (
            "see that it can be reached and written, or name another one ([catalog] url in store.toml, or "
            "ROLLBOOK_CATALOG_URL) and run `rollbook store rebuild-catalog`; nothing in the log depends on it"
        )
    return "run `rollbook store rebuild-catalog`: it is derived from the log, and nothing in the log is lost"


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    version = connection.exec_driver_sql("select version_num from alembic_version").scalar()
    return None if version is None else str(version)


def _is_empty(connection: Connection) -> bool:
    """Whether none of the catalog's tables is there."""
    ours = {"alembic_version", *Base.metadata.tables}
    return ours.isdisjoint(inspect(connection).get_table_names())


def _make(connection: Connection) -> None:
    """Create all tables of the current schema directly, where none exists: that takes a tenth of
    the time of all migrations."""
    Base.metadata.create_all(connection, checkfirst=False)
    _VERSION.create(connection, checkfirst=False)
    connection.execute(_VERSION.insert().values(version_num=SCHEMA_REVISION))


def _is_whole(connection: Connection) -> bool:
    """Whether every table is there with its columns, at this release's revision."""
    if _revision(connection) != SCHEMA_REVISION:
        return False
    inspector = inspect(connection)
    there = set(inspector.get_table_names())
    return all(
        name in there
        and {column["name"] for column in inspector.get_columns(name)} == set(table.columns.keys())
        for name, table in Base.metadata.tables.items()
    )


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        options = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_S}
        return create_engine(url, connect_args=options, pool_pre_ping=True)
    if url.database not in (None, "", ":memory:"):
        with contextlib.suppress(OSError):  # where it cannot be made, SQLite says so
            make_empty(Path(str(url.database)))  # its journals take its mode
    return _sqlite_engine(url)


@lru_cache(maxsize=8)
def _sqlite_engine(url: URL) -> Engine:
    """The engine of a file. To make one takes longer than to write a lane's row: those of a process are kept,
    without the connections, which `Database.close` ends."""
    engine = create_engine(url, connect_args={"timeout": PATIENCE_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def refuse_strange(connection: sqlite3.Connection) -> None:
    """Check that a SQLite file has no views or triggers, which could pose as the catalog's tables.

    Raises:
        sqlite3.DatabaseError: it has some.
    """
    connection.execute("pragma trusted_schema = off")
    strange = "select name from sqlite_master where type in ('view', 'trigger') or sql like 'create virtual%'"
    if (row := connection.execute(strange).fetchone()) is not None:
        raise sqlite3.DatabaseError(f"{row[0]!r} in it is none of its tables")


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # SQLAlchemy begins transactions explicitly; by default the driver begins one at the first INSERT.
    connection.isolation_level = None
    refuse_strange(connection)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError as error:
            # If several processes create the file at once, only one may switch the mode, and SQLite does not
            # wait.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _begin_sqlite(connection: Connection) -> None:
    mode: _Mode = connection.get_execution_options().get("rollbook_mode", "write")
    cursor = connection.connection.cursor()
    # A migration replaces tables that others refer to.
    cursor.execute(f"pragma foreign_keys = {'off' if mode == 'migrate' else 'on'}")
    cursor.execute("begin" if mode == "read" else "begin immediate")
    cursor.close()


URL_VARIABLE = "ROLLBOOK_CATALOG_URL"
DEFAULT = "catalog.db"
"""The SQLite file of a store that names no other."""
_DRIVERS = ("sqlite", "sqlite+pysqlite")
_HARMLESS = {"host", "port", "sslmode", "connect_timeout", "application_name", "target_session_attrs"}
"""Query parameters of a PostgreSQL URL that name neither a local file nor a server other than `host`."""


def parse_url(text: str) -> URL:
    """The URL of a catalog.

    Raises:
        CatalogError: it is none. The message leaves the text out: it may hold a password.
    """
    try:
        return make_url(text)
    except (ArgumentError, ValueError):
        raise CatalogError(
            "the catalog's URL is not a SQLAlchemy URL such as postgresql+psycopg://user@host/database: mend "
            "[catalog] url in store.toml, or ROLLBOOK_CATALOG_URL"
        ) from None


def refuse_outside(url: URL, store: Path) -> None:
    """Check that a URL of `store.toml` names a SQLite file in the store, or a server that is allowed.

    Raises:
        CatalogError: it does not.
    """
    if url.drivername in _DRIVERS:
        _refuse_file(url, store)
        return
    if url.get_backend_name() != "postgresql":
        raise _refused(url, "use SQLite, or PostgreSQL")
    if strange := sorted(set(url.query) - _HARMLESS):
        raise _refused(url, f"a store's own settings may not set {strange[0]!r}")
    for host in _hosts(url):
        if not (allows_folder(host) if host.startswith("/") else allows_host(host, url.port)):
            raise _refused(url, f"it would connect you to {host!r}; {remedy(host)}")


def _refuse_file(url: URL, store: Path) -> None:
    file = url.database or ""
    if url.query or not file or file.startswith((":", "file:")):
        raise _refused(url, "its settings may name no more than a file, such as sqlite:///catalog.db")
    folder = os.path.realpath((store / file).parent)
    if not Path(folder).is_relative_to(store.resolve()) and not allows_folder(folder):
        raise _refused(url, f"{file!r} is not in the store's folder; {remedy(folder)}")


def _hosts(url: URL) -> list[str]:
    """The servers of a PostgreSQL URL, or the folders of their sockets; this host if the URL names none."""
    listed = url.query.get("host", ())
    named = [url.host or "", *([listed] if isinstance(listed, str) else listed)]
    hosts = [host for several in named if several for host in several.split(",")]
    # host:port is one of several ways to name a port; an address with several colons contains no port.
    return [host.split(":")[0] if host.count(":") == 1 else host for host in hosts or ["localhost"]]


def _refused(url: URL, why: str) -> CatalogError:
    return CatalogError(
        f"the catalog that store.toml names ({url.get_backend_name()}) is not opened: {why}; or give the "
        f"whole URL in {URL_VARIABLE}; nothing in the log depends on it"
    )


def look_at_files(file: Path) -> None:
    """Check that the paths SQLite will open are plain files or absent.

    Raises:
        CatalogError: one of them is a link, a pipe or the like.
    """
    try:
        for suffix in ("", "-wal", "-shm", "-journal"):
            refuse_no_plain(file.with_name(file.name + suffix))
    except OutsideError as error:
        raise CatalogError(f"the catalog is not opened: {error}") from error


# Few processes need Alembic, and its import takes a quarter of a second.


def known_revisions() -> set[str]:
    """The revisions that this release knows."""
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def upgrade(connection: Connection) -> None:
    """Bring the tables to the newest revision, in the connection's transaction."""
    from alembic import command

    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "rollbook:migrations")
    return config
