"""What `rollbook store upload` and `rollbook store attach` print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from rollbook.cli.terminal import Console, print_json, say
from rollbook.store.open import open_store
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.attach import attach
from rollbook.store.upkeep.upload import remote_folder, upload_units

_MIB = 1 << 20


def run_upload(path: Path, as_json: bool) -> None:
    """Move the store's sealed units to object storage and print what was done.

    Raises:
        NotAStoreError, ConfigError, RemoteError, CorruptionError, LaneLockedError: as `upload_units`.
    """
    log = open_store(path)
    here = [u for lane in log.lanes() for u in current_units(log.path, lane) if u.remote is None]
    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("uploading", total=sum(unit.bytes for unit in here))
        report = upload_units(log, lambda name, size: progress.update(task, advance=size))
    address = remote_folder(log.settings().remote.uri or "", log.store_id)
    if as_json:
        _print_json({"address": address} | report.as_json())
        return
    say(f"{address}: {len(report.units)} units more, {report.bytes / _MIB:.1f} MiB, read back and compared")
    say(f"{report.freed / _MIB:.1f} MiB of local files removed")
    for name in report.kept:
        say(f"{name}: a reader still has its local files; a later upload removes them")


def run_attach(path: Path, uri: str, endpoint: str | None, as_json: bool) -> None:
    """Create a store that reads units from object storage, and print a summary.

    Raises:
        NotAStoreError, ConfigError, RemoteError, CorruptionError, FormatError: as `attach`.
    """
    report = attach(path, uri, endpoint)
    if as_json:
        _print_json(report.as_json())
        return
    say(f"{path} reads {uri}: {report.units} units, {report.bytes / _MIB:.1f} MiB, which stay there")
    for lane, events in report.lanes.items():
        say(f"lane {lane}: {events} events, to the end of its last uploaded unit")
    for address in report.unfinished:
        say(f"{address}: an upload that was cut short; it has no manifest, and nobody reads it")


def _print_json(values: dict[str, Any]) -> None:
    print_json(values)
