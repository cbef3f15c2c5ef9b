"""Where DuckDB puts what does not fit into memory: a folder for each connection, that goes with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator

import duckdb

SHARE = 2
"""At most one part in so many of what is free on that disk is filled."""


class Spill:
    """A folder that only its owner may enter, in the system's place for temporary files (`TMPDIR`).

    It is removed with `release`, or when nothing refers to this any more. Where none can be made (a full or a
    read-only disk), `config` says that nothing is put anywhere: queries then have the memory alone.
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
        """Remove the folder; a connection that still uses it can put nothing there any more."""
        self._end()


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the process has a copy of this, and not the folder
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def private_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory for queries of our own, of one thread, and its folder with it."""
    spill = Spill()
    try:
        with duckdb.connect(":memory:", config={"threads": 1} | spill.config) as connection:
            yield connection
    finally:
        spill.release()
