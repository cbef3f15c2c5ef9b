"""Alembic's entry point: runs the catalog's migrations on the connection it is given."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from rollbook.store.catalog.database import Base

config = context.config


def run() -> None:
    """Migrate online, on the connection of the caller or on `sqlalchemy.url`."""
    connection = config.attributes.get("connection")
    if connection is not None:
        _migrate(connection)
        return
    engine = create_engine(config.get_main_option("sqlalchemy.url") or "")
    with engine.begin() as own:
        _migrate(own)


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()


run()
