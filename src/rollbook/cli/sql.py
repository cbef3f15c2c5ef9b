"""`rollbook sql`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rollbook.cli.errors import querying
from rollbook.cli.options import AsOf, RunOfStep, StoreOption
from rollbook.cli.terminal import print_json, print_table
from rollbook.transcript.text import visible


def sql(
    query: Annotated[str, typer.Argument(help='E.g. "select * from trajectories".')],
    store: StoreOption,
    format: Annotated[Literal["table", "json", "csv"], typer.Option(help="How to print the rows.")] = "table",
    as_of: AsOf = "head",
    run: RunOfStep = None,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="Let the query open and write other files, and extensions.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Model, or its name at the hub, whose tokenizer gives tokens their text."),
    ] = None,
) -> None:
    """Query the live log with SQL (DuckDB). A query reads the store, and nothing else of this machine.

    Views: events, runs, trajectories, turns, tokens, rewards, preferences, paths,
    outliers, bodies, launches; policies, syncs, activations, steps, metrics, evaluations,
    samples, drops, lineage, ledger.
    Their columns: docs/sql.md, or rollbook sql "describe turns".
    """
    import duckdb

    from rollbook.cli.runs import of_run
    from rollbook.engines.hub import model_folder
    from rollbook.store.errors import QueryError
    from rollbook.store.open import open_store
    from rollbook.store.sql.query import connect_at

    model = None if model is None else model_folder(model, weights=False)
    log = open_store(store)
    with of_run(log, run):
        connection = connect_at(log, as_of, run, allow_files=allow_files, model=model)
    with querying(connection):
        if not duckdb.extract_statements(query):
            raise QueryError("the query is empty: write e.g. select * from trajectories")
        if sys.stdout.isatty():
            connection.execute("SET enable_progress_bar = true")
        result = connection.execute(query)
        names = [column[0] for column in result.description or ()]
        rows = result.fetchall()
    if format == "json":
        print_json([dict(zip(names, row, strict=True)) for row in rows])
    elif format == "csv":
        _print_csv(names, rows)
    else:
        print_table(names, rows)


def _print_csv(names: list[str], rows: list[tuple[Any, ...]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(_plain, names))
    writer.writerows([_plain(value) for value in row] for row in rows)


def _plain(value: Any) -> Any:
    """A value as CSV has it: exact, but on a terminal with no character that would drive it."""
    import orjson

    plain = orjson.dumps(value, default=str).decode() if isinstance(value, (list, dict)) else value
    return visible(plain, lines=True) if isinstance(plain, str) and sys.stdout.isatty() else plain
