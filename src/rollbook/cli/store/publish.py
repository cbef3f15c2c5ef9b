"""`rollbook store publish`: Iceberg tables of the sealed units, and what it prints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rollbook.cli.progress import counted
from rollbook.cli.terminal import print_json, print_table, say
from rollbook.store.open import open_store
from rollbook.store.tables.publish import publish_tables


def run_publish(path: Path, anew: bool, as_json: bool) -> None:
    """Publish the store at `path`: progress on stderr, its tables on stdout.

    Raises:
        NotAStoreError, CatalogError, RemoteError, CorruptionError, LaneLockedError: as `publish_tables`.
    """
    log = open_store(path)
    with counted("reading footers") as ran:
        report = publish_tables(log, anew=anew, on_file=ran)
    if as_json:
        print_json(asdict(report))
        return
    rows = [(t.table, t.snapshot, t.files, t.rows, t.added, t.removed) for t in report.tables]
    print_table([*("table", "snapshot", "files", "rows", "added", "removed")], rows)
    for table in report.tables:
        say(f"{table.table}: {table.metadata}")
    say(f"catalog: {report.catalog}")
