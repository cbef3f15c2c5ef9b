"""Every test here runs over SQLite and over a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine
from tests.fakes.processes.postgresql import DATABASE, EMPTY, Server

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.catalog.catalog import catalog_url


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    """Which database the test's catalog is in."""
    return str(request.param)


@pytest.fixture
def database_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[URL]:
    """URL of an empty database."""
    if backend == "sqlite":
        yield URL.create("sqlite", database=str(tmp_path / "catalog-of-a-test.db"))
        return
    server: Server = request.getfixturevalue("postgres")
    yield server.url(DATABASE)
    server.run(*EMPTY, database=DATABASE)


@pytest.fixture
def store(tmp_path: Path, backend: str, database_url: URL) -> Store:
    """A new, empty store; with PostgreSQL, its settings name the database."""
    new = rb.open(tmp_path / "store", create=True)
    if backend == "postgresql":
        url = database_url.render_as_string(hide_password=False)
        (new.path / "store.toml").write_text(f'[catalog]\nurl = "{url}"\n')
    return new


@pytest.fixture
def raw(store: Store) -> Iterator[Engine]:
    """An engine on the database of the store's catalog, for looking at it and for breaking it."""
    engine = create_engine(catalog_url(store.path))
    yield engine
    engine.dispose()
