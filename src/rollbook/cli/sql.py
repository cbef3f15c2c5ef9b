"""What `rollbook sql` and `rollbook store info` print."""

from __future__ import annotations

import contextlib
import csv
import sys
from pathlib import Path
from typing import Any

import duckdb
import orjson
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from rollbook.cli.runs import of_run
from rollbook.cli.show.terminal_text import visible
from rollbook.cli.terminal import Console, print_json
from rollbook.store.catalog.catalog import Catalog
from rollbook.store.cut import format_cut
from rollbook.store.errors import CatalogError, QueryError
from rollbook.store.open import open_store
from rollbook.store.sql.object_storage import outage
from rollbook.store.sql.query import connect_at
from rollbook.store.sql.sandbox import explained

CELL_WIDTH = 60


def run_query(
    store: Path,
    query: str,
    format_: str,
    as_of: str,
    run: str | None,
    allow_files: bool = False,
    model: Path | None = None,
) -> None:
    """Run one query and print its rows.

    Raises:
        QueryError: the SQL is wrong; the message is DuckDB's.
        ModelError: the model directory has no tokenizer.
    """
    log = open_store(store)
    with of_run(log, run):
        connection = connect_at(log, as_of, run, allow_files=allow_files, model=model)
    try:
        if not duckdb.extract_statements(query):
            raise QueryError("the query is empty: write e.g. select * from trajectories")
        result = connection.execute(query)
        names = [column[0] for column in result.description or ()]
        rows = result.fetchall()
    except duckdb.InterruptException:
        raise KeyboardInterrupt from None
    except duckdb.Error as error:
        raise outage(error) or explained(error) from error
    if format_ == "json":
        _print_json(names, rows)
    elif format_ == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(map(_plain, names))
        writer.writerows([_plain(value) for value in row] for row in rows)
    else:
        _print_table(names, rows)


def _plain(value: Any) -> Any:
    """A value as CSV has it: exact, but on a terminal with no character that would drive it."""
    plain = _dumps(value) if isinstance(value, (list, dict)) else value
    return visible(plain, lines=True) if isinstance(plain, str) and sys.stdout.isatty() else plain


def _dumps(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _print_json(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    objects = [dict(zip(names, row, strict=True)) for row in rows]
    print_json(objects)


def _print_table(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(names))]
    for name, number in zip(names, numeric, strict=True):
        table.add_column(name, justify="right" if number and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console()
    widths = [max([len(n), *(len(_cell(row[i])) for row in rows)]) for i, n in enumerate(names)]
    if sum(widths) + 2 * len(widths) <= console.width:
        console.print(table)
    else:
        _print_expanded(console, names, rows)
    Console(stderr=True).tell((f"{len(rows)} rows", "dim"))


def _print_expanded(console: Console, names: list[str], rows: list[tuple[Any, ...]]) -> None:
    """A line per value: for rows that are wider than the terminal."""
    width = max(len(name) for name in names)
    for number, row in enumerate(rows, 1):
        console.tell((f"-- row {number} --", "dim"))
        for name, value in zip(names, row, strict=True):
            line = Text(f"{name:<{width}}  ", style="bold").append(_cell(value), style="not bold")
            console.print(line, overflow="fold", soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    whole = _dumps(value) if isinstance(value, (list, dict)) else str(value)
    text = visible(whole[: CELL_WIDTH + 1], lines=True)
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"


def print_info(store: Path, as_json: bool) -> None:
    """Print what the lanes' own files say, and what the catalog does."""
    log = open_store(store)
    info: dict[str, Any] = {"path": str(log.path), "id": log.store_id, "head": format_cut(log.head())}
    tables: dict[str, list[dict[str, Any]]] = {}
    try:
        with contextlib.closing(Catalog.of(log.path)) as catalog:
            tables = catalog.rows()
            info["catalog"] = catalog.name
    except (CatalogError, SQLAlchemyError) as error:  # a backup, a full disk: the lanes' files say the most
        info["catalog"] = f"not read: {error}"
    if as_json:
        print_json(info | tables)
        return
    console = Console()
    console.print(
        f"store    {info['id']} at {info['path']}\nhead     {info['head']}\ncatalog  {info['catalog']}",
        soft_wrap=True,
    )
    for name, rows in tables.items():
        if rows and name != "store_meta":
            console.tell("\n", (name, "bold"))
            _print_table(list(rows[0]), [tuple(row.values()) for row in rows])
