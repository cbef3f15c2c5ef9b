"""`rollbook store verify`: the report of `upkeep.verify`, with a progress bar on stderr."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rollbook.cli.terminal import Console, print_json
from rollbook.store.open import open_store
from rollbook.store.sql.incomplete import Incomplete, incomplete_turns
from rollbook.store.upkeep.verify import LaneVerified, lane_bytes, verify_store

MOST_NAMED = 1000
"""Incomplete turns that are named; of more it is only said that there are."""
_MIB = 1 << 20


def run_verify(path: Path, as_json: bool) -> int:
    """Verify the store and print what was found; the exit code: 0, or 1 where something is wrong.

    Where every lane is whole, turns are looked for that lack the events they rest on.

    Raises:
        NotAStoreError: there is none.
    """
    log = open_store(path)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = sum(lane_bytes(log.path, lane) for lane in log.lanes())
        task = progress.add_task("verifying", total=total)
        found = verify_store(
            log, lambda lane, count: progress.update(task, advance=count, description=f"verifying {lane}")
        )
    damaged = any(lane.fault for lane in found)
    incomplete = [] if damaged else list(islice(incomplete_turns(log), MOST_NAMED + 1))
    if as_json:
        told = {"lanes": [lane.as_json() for lane in found]}
        told["incomplete"] = [turn.as_json() for turn in incomplete]
        print_json(told)
    else:
        _print(found)
        _print_incomplete(incomplete)
    return 1 if damaged or incomplete else 0


def _print(found: list[LaneVerified]) -> None:
    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("lane")
    for name in ("events", "units", "WAL files", "MiB"):
        table.add_column(name, justify="right")
    table.add_column("whole")
    for lane in found:
        counts = (lane.events, lane.units, lane.wal_files)
        whole = Text("yes") if lane.fault is None else Text("no", "red")
        table.add_row(lane.lane, *(f"{count:,}" for count in counts), f"{lane.bytes / _MIB:,.1f}", whole)
    console.print(table)
    for lane in found:
        if lane.fault is not None:
            console.print(
                f"lane {lane.lane}: {lane.fault}: restore the file from a copy, and verify again",
                soft_wrap=True,
                style="red",
            )


def _print_incomplete(turns: list[Incomplete]) -> None:
    console = Console()
    for turn in turns[:MOST_NAMED]:
        console.print(str(turn), soft_wrap=True, style="red")
    if len(turns) > MOST_NAMED:
        console.print(f"and more than {MOST_NAMED} others", style="red")
