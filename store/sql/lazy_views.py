"""Views that are made when a query first names them.

DuckDB plans a view when it is made. To plan all of them takes a fifth of a second in an empty store, and in a
long one it reads footers of files that the query at hand does not ask for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence

import duckdb

from rollbook.store.sql.relations import INTERNAL

_WORD = re.compile(rf"(?:{INTERNAL}\.)?[a-z_]\w*", re.IGNORECASE)
_READ = re.compile(rf"\b(?:from|join)\s+((?:{INTERNAL}\.)?\w+)", re.IGNORECASE)
"""What a view of ours reads: it is named right behind one of these words."""
_CATALOG = re.compile(r"\b(?:show|pragma|duckdb_\w+|information_schema|sqlite_\w+|pg_\w+)\b", re.IGNORECASE)
"""What lists views."""


class LazyViews:
    """Views of one database, which its connections share, in several threads.

    Args:
        queries: (name, query) of each, after those it reads.
    """

    def __init__(self, queries: Sequence[tuple[str, str]]) -> None:
        self._queries = dict(queries)
        self._missing = set(self._queries)
        self._lock = threading.Lock()

    def make_for(self, connection: duckdb.DuckDBPyConnection, query: str) -> None:
        """Make what the query may name.

        Raises:
            duckdb.Error: a file that one of them reads cannot be read.
        """
        if self._missing:
            named = {word.lower() for word in _WORD.findall(query)} & self._queries.keys()
            self._make(connection, self._queries if _CATALOG.search(query) else named)

    def make_all(self, connection: duckdb.DuckDBPyConnection) -> bool:
        """Make all of them. Whether one was missing.

        Raises:
            duckdb.Error: as `make_for`.
        """
        missing = bool(self._missing)
        self._make(connection, self._queries)
        return missing

    def _make(self, connection: duckdb.DuckDBPyConnection, names: Iterable[str]) -> None:
        with self._lock:
            wanted = self._with_read(names)
            for name in [name for name in self._queries if name in wanted and name in self._missing]:
                connection.execute(f"CREATE VIEW {name} AS {self._queries[name]}")
                self._missing.discard(name)

    def _with_read(self, names: Iterable[str]) -> set[str]:
        """The views, and all that they read."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in self._queries and name not in found:
                found.add(name)
                waiting += _READ.findall(self._queries[name])
        return found
