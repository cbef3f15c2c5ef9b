"""The temporary folder of a DuckDB connection, for data that does not fit into memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator

import duckdb

SHARE = 2
"""DuckDB may fill at most 1 / SHARE of the free space of that disk."""


QUIET = "SET enable_progress_bar = false"
"""For each connection: the bar is printed on the standard output, among whatever is printed there."""


class Spill:
    """A folder that only its owner may enter, in the system's place for temporary files (`TMPDIR`).

    It is removed by `release`, or when nothing refers to this object any more. If none can be
    made (a full or a read-only disk), `config` disables spilling: queries then have only memory.
    """

    def __init__(self) -> None:
        self.config: dict[str, str | bool | int | float | list[str]] = {"temp_directory": ""}
        self._end: Callable[[], object] = lambda: None
        try:
            folder = tempfile.mkdtemp(prefix="rollbook-sql-")
            free = shutil.disk_usage(folder).free
        except OSError:
            return
        self._end = weakref.finalize(self, _remove, folder, os.getpid())
        self.config = {"temp_directory": folder, "max_temp_directory_size": f"{free // SHARE}B"}

    def release(self) -> None:
        """Remove the folder; a connection that still uses it can no longer spill."""
        self._end()


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the process has a copy of this, and not the folder
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def private_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory database with one thread for internal queries, and its temporary folder."""
    spill = Spill()
    try:
        with duckdb.connect(":memory:", config={"threads": 1} | spill.config) as connection:
            connection.execute(QUIET)
            yield connection
    finally:
        spill.release()
