"""What `rollbook store rebuild-catalog` prints."""

from __future__ import annotations

import time
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollbook import store
from rollbook.cli.terminal import Console, print_json, say
from rollbook.store.catalog.rebuild import rebuild_catalog


def run_rebuild(path: Path, as_json: bool) -> None:
    """Rebuild the catalog of the store at `path`: progress on stderr, what was done on stdout."""
    log = store.open(path)
    console = Console(stderr=True)
    columns = (TextColumn("reading the log"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("events", total=sum(log.head().values()))
        done = rebuild_catalog(log, lambda events: bar.update(task, completed=events))
    seconds = time.monotonic() - began
    if as_json:
        values = {
            "catalog": done.catalog,
            "moved": None if done.moved is None else str(done.moved),
            "events": done.events,
            "rows": done.rows,
            "seconds": round(seconds, 3),
        }
        print_json(values)
        return
    if done.moved is not None:
        say(f"the catalog was broken; what was there is now {done.moved}")
    say(f"{done.catalog}: made anew from {done.events} events in {seconds:.1f} s")
    say(", ".join(f"{name} {count}" for name, count in done.rows.items()))
