"""A real PostgreSQL server for tests, on a socket of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine

DATABASE = "test"
EMPTY = (
    "select pg_terminate_backend(pid) from pg_stat_activity "
    "where datname = current_database() and pid <> pg_backend_pid()",
    "drop schema public cascade",
    "create schema public",
)
"""Statements that leave nothing of a database, nor of who is connected: making another one takes longer."""
USER, PASSWORD = "rollbook", "se/cr:et@1"
READY_S = 60


@dataclass(frozen=True)
class Server:
    """A PostgreSQL server on a socket in its own folder."""

    folder: Path

    def url(self, database: str, password: str = PASSWORD) -> URL:
        """URL of one of its databases."""
        return URL.create(
            "postgresql+psycopg", USER, password, database=database, query={"host": str(self.folder)}
        )

    def run(self, *statements: str, database: str = "postgres") -> None:
        """Run statements outside of a transaction, such as `create database`."""
        engine = create_engine(self.url(database), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for sql in statements:
                connection.exec_driver_sql(sql)
        engine.dispose()


def _programs() -> Path | None:
    """Folder of initdb and postgres: on the path, or where Debian puts them (the newest version)."""
    path = shutil.which("postgres")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3]))
    return Path(path).parent if path else debian[-1].parent if debian else None


def _account() -> dict[str, Any]:
    """Arguments that make a child process run as postgres where we are root: the server refuses root."""
    if os.geteuid() != 0:
        return {}
    return {"user": "postgres", "group": "postgres", "extra_groups": []}


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A fresh server for the session, stopped at its end by its process number."""
    pytest.importorskip("psycopg", reason="no PostgreSQL driver: pip install 'rollbook[postgres]'")
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    # Not below pytest's own folder, which the account postgres may not enter; and socket paths are short.
    folder = Path(tempfile.mkdtemp(prefix="rollbook-pg-"))
    process = None
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        data = folder / "data"
        make = [programs / "initdb", "-D", data, "-U", USER, "-A", "scram-sha-256", f"--pwfile={secret}"]
        initdb = subprocess.run(
            [*make, "--no-sync", "--encoding=UTF8", "--locale=C"],
            **_account(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert initdb.returncode == 0, initdb.stderr
        options = (
            "listen_addresses=",
            f"unix_socket_directories={folder}",
            "fsync=off",
            "max_connections=40",
        )
        serve = [programs / "postgres", "-D", data, *(word for o in options for word in ("-c", o))]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(serve, **_account(), cwd=folder, stdout=log, stderr=log)
        server = Server(folder)
        _await(server, process)
        server.run(f"create database {DATABASE}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ROLLBOOK_ALLOW", str(folder))  # the tests' stores may lead to it
            yield server
    finally:
        if process is not None:
            _stop(process)
        shutil.rmtree(folder)


def _await(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            server.run("select 1")
            return
        except Exception:
            if process.poll() is not None or time.monotonic() > deadline:
                print((server.folder / "log").read_text())
                raise
            time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its connections at once; by force if that takes long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGQUIT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
