"""A DuckDB connection that reads the store's sealed files and can reach nothing else here or on the
network.

DuckDB's own settings do most of it: no external access except to the given folders, no
extensions, no secrets, no Python variables, and a locked configuration. But they leave every
readable folder writable. So a query is refused before DuckDB sees it if it has one of the words
that write files (`COPY`, `EXPORT`, `ATTACH`) anywhere but in a string or a quoted name; DuckDB
accepts `COPY` inside a `WITH` and after `EXPLAIN` as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

import duckdb

from rollbook.store.errors import QueryError
from rollbook.store.spill import QUIET
from rollbook.store.sql.columns import literal
from rollbook.store.sql.narrowing import MOST_TURNS, narrowed
from rollbook.store.sql.relations import LazyViews

WORDS = ("copy", "export", "attach")
"""Words of SQL that make DuckDB write a file, or open one for writing."""
_WORD = re.compile(rf"(?<![a-z_])(?:{'|'.join(WORDS)})(?![a-z0-9_])".encode(), re.IGNORECASE)
CLOSED = {
    "python_enable_replacements": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "allow_persistent_secrets": False,
}
_MAY_CHANGE = (
    *("threads", "timezone", "calendar", "default_order", "default_null_order", "explain_output"),
    "enable_progress_bar",
)
"""Switches that change no more than how a query runs, or how its rows come out."""
_RESULT = (
    *("fetch", "description", "rowcount", "df", "pl", "arrow", "to_arrow", "register", "unregister"),
    "interrupt",
)
"""Beginnings of the names of what needs no view."""
_T = TypeVar("_T")
_REMEDY = "add --allow-files to the command, or allow_files=True to connect()"


def close_doors(connection: duckdb.DuckDBPyConnection, folders: Iterable[str]) -> None:
    """Restrict the connection for good to files in these folders (they end with a slash)."""
    listed = ", ".join(map(literal, sorted(set(folders))))
    changeable = ", ".join(f"'{name}'" for name in _MAY_CHANGE)
    connection.execute(
        f"SET allowed_directories = [{listed}]; SET allowed_configs = [{changeable}]; "
        "SET enable_external_access = false; SET lock_configuration = true"
    )


def refuse_writing(query: str) -> None:
    """Check that a query has no statement that writes a file.

    Raises:
        QueryError: it has one.
    """
    text = query.encode()
    matches = list(_WORD.finditer(text))
    tokens = duckdb.tokenize(query) if matches else []
    for match in matches:
        begin, kind = max(((at, kind) for at, kind in tokens if at <= match.start()), default=(0, None))
        # Not in a comment: the tokenizer and the parser need not agree on where a line of it ends.
        if kind != duckdb.token_type.string_const and text[begin : begin + 1] != b'"':
            raise QueryError(
                f"{match[0].decode().upper()} writes or opens files, and this connection only reads the "
                f"store: leave it out (as a name, put it in double quotes), or {_REMEDY}"
            )


class Connection(AbstractContextManager["Connection"]):
    """A DuckDB connection over the log: everything that DuckDB's has, but queries that write files
    are refused.

    It is used like DuckDB's own: `execute(...).fetchall()`, `sql(...).df()`, `with`, `close`.
    Views are created when a query names them.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, views: LazyViews, *, allow_files: bool = False
    ) -> None:
        self._connection, self._views = connection, views
        self._allow_files = allow_files

    @property
    def raw(self) -> duckdb.DuckDBPyConnection:
        """DuckDB's own connection, with all views, for a library that needs one.

        Its queries are not checked, so sealed files can be overwritten with it.
        """
        self._views.make_all(self._connection)
        return self._connection

    def _run(
        self, run: Callable[..., _T], query: Any, *arguments: Any, theirs: str | None = None, **options: Any
    ) -> _T:
        """Run a query, of which only `theirs` (default: all) is another's, and names views."""
        text = query if isinstance(query, str) else str(query.query)
        named = text if theirs is None else theirs
        if not self._allow_files:
            refuse_writing(named)
        self._views.make_for(self._connection, named)
        try:
            return run(query, *arguments, **options)
        except duckdb.CatalogException:
            # It may name a view in a way that its words do not show; a misspelt one is suggested from all
            # that there are. One statement alone had no effect yet.
            alone = len(self._connection.extract_statements(text)) == 1
            if not alone or not self._views.make_all(self._connection):
                raise
            return run(query, *arguments, **options)

    def execute(self, query: Any, parameters: Any = None) -> Self:
        """Run statements; the last one's rows are fetched with `fetchall` and the like.

        Raises:
            QueryError: one would write a file.
            duckdb.Error: as DuckDB's own.
        """
        self._run_narrowed(self._connection.execute, query, parameters)
        return self

    def _run_narrowed(self, run: Callable[..., _T], query: Any, *arguments: Any, **options: Any) -> _T:
        """Run a query of others, with as much of `turns` as it names."""
        if (
            isinstance(query, str)
            and (narrow := narrowed(self._connection, query, self._views.in_place)) is not None
        ):
            around = narrow.around()
            try:
                text = narrow.whole()
                if narrow.which is not None:
                    turns = self._run_narrowed(self._connection.execute, narrow.which).fetchall()
                    text = narrow.of(turns) if len(turns) <= MOST_TURNS else text
                return self._run(run, text, *arguments, theirs=around, **options)
            except (duckdb.BinderException, duckdb.ParserException, duckdb.CatalogException):
                pass  # what is wrong is told of the query as it stands
        return self._run(run, query, *arguments, **options)

    def executemany(self, query: Any, parameters: Any = None) -> Self:
        """Run a statement for each of several rows of parameters.

        Raises:
            QueryError, duckdb.Error: as `execute`.
        """
        self._run(self._connection.executemany, query, parameters)
        return self

    def sql(self, query: Any, **options: Any) -> Any:
        """A query as DuckDB's relation, which runs when its rows are asked for.

        Raises:
            QueryError, duckdb.Error: as `execute`.
        """
        return self._run_narrowed(self._connection.sql, query, **options)

    query = from_query = sql

    def read(self, query: str, parameters: Any = None) -> Self:
        """`execute` for a query that Rollbook has written: no view is created for it.

        Raises:
            duckdb.Error: as DuckDB's own.
        """
        self._run(self._connection.execute, self._views.in_place(query), parameters, theirs="")
        return self

    def relation(self, query: str, parameters: Any = None, **conditions: str) -> Any:
        """`sql` for a query that Rollbook has written: no view is created for it.

        Args:
            conditions: that others have written, by what stands for them in braces.

        Raises:
            QueryError, duckdb.Error: as `execute`.
        """
        whole = self._views.in_place(query)
        for name, condition in conditions.items():
            whole = whole.replace(f"{{{name}}}", condition)
        theirs = " ".join(conditions.values())
        return self._run(self._connection.sql, whole, params=parameters, theirs=theirs)

    def cursor(self) -> Connection:
        """Another connection to the same views, for another thread."""
        cursor = self._connection.cursor()
        cursor.execute(QUIET)
        return Connection(cursor, self._views, allow_files=self._allow_files)

    duplicate = cursor

    def close(self) -> None:
        """Close it, so that the sealed files may be removed again."""
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        # What ends a query is asked for after each; other ways to a view are as DuckDB has them.
        return getattr(self._connection if name.startswith(_RESULT) else self.raw, name)


def explained(error: duckdb.Error) -> QueryError:
    """The message for a query that DuckDB refused: its own words, and how to allow what the sandbox
    denies."""
    text = str(error).strip()
    if isinstance(error, duckdb.PermissionException):
        return QueryError(f"{text}: only the store's own files are open to a query; {_REMEDY}")
    if "configuration has been locked" in text:
        return QueryError(f"{text}: {_REMEDY}")
    return QueryError(text)


def folders_of(paths: Iterable[str]) -> set[str]:
    """The folders, as they are named and without links, each with a slash at its end."""
    return {f"{path.rstrip('/')}/" for path_given in paths for path in (path_given, _real(path_given))}


def _real(path: str) -> str:
    return path if "://" in path else os.path.realpath(path)
