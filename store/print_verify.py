"""`rollbook store verify`: the report of `store.verify`, with a progress bar on stderr."""

from __future__ import annotations

from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollbook.store.log import open_store
from rollbook.store.verify import LaneVerified, lane_bytes, verify_store

_MIB = 1 << 20


def run_verify(path: Path, as_json: bool) -> int:
    """Verify the store and print what was found; the exit code: 0, or 1 where a lane is damaged.

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
    if as_json:
        print(orjson.dumps([lane.as_json() for lane in found], option=orjson.OPT_INDENT_2).decode())
    else:
        _print(found)
    return 1 if any(lane.fault for lane in found) else 0


def _print(found: list[LaneVerified]) -> None:
    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("lane")
    for name in ("events", "units", "WAL files", "MiB"):
        table.add_column(name, justify="right")
    table.add_column("whole")
    for lane in found:
        counts = (lane.events, lane.units, lane.wal_files)
        whole = "yes" if lane.fault is None else "[red]no[/]"
        table.add_row(lane.lane, *(f"{count:,}" for count in counts), f"{lane.bytes / _MIB:,.1f}", whole)
    console.print(table)
    for lane in found:
        if lane.fault is not None:
            console.print(
                f"lane {lane.lane}: {lane.fault}: restore the file from a copy, and verify again",
                markup=False,
                soft_wrap=True,
                style="red",
            )
