"""What `rollbook store info`, `rebuild-catalog`, `checkpoints` and `upload` print."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from sqlalchemy.exc import SQLAlchemyError

from rollbook.cli.progress import counted, progress
from rollbook.cli.runs import of_run
from rollbook.cli.terminal import MIB, Console, print_json, print_table, say
from rollbook.store.catalog.catalog import Catalog
from rollbook.store.catalog.rebuild import rebuild_catalog
from rollbook.store.cut import format_cut
from rollbook.store.errors import CatalogError
from rollbook.store.open import open_store
from rollbook.store.sealed.remote import remote_folder
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.checkpoints import (
    HeldCheckpoint,
    Keep,
    keep_of,
    list_checkpoints,
    remove_checkpoints,
)
from rollbook.store.upkeep.upload import upload_units


def print_info(store: Path, as_json: bool) -> None:
    """Print the state of the lanes, from their files and from the catalog."""
    log = open_store(store)
    info: dict[str, Any] = {"path": str(log.path), "id": log.store_id, "head": format_cut(log.head())}
    if (medium := log.settings().medium.url) is not None:
        info["medium"] = f"{medium.rstrip('/')}/{log.store_id}"
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
        f"store    {info['id']} at {info['path']}\nhead     {info['head']}\ncatalog  {info['catalog']}"
        + (f"\nmedium   {info['medium']}" if "medium" in info else ""),
        soft_wrap=True,
    )
    for name, rows in tables.items():
        if rows and name != "store_meta":
            console.tell("\n", (name, "bold"))
            print_table(list(rows[0]), [tuple(row.values()) for row in rows])


def run_rebuild(path: Path, as_json: bool) -> None:
    """Rebuild the catalog of the store at `path`: progress on stderr, what was done on stdout."""
    log, began = open_store(path), time.monotonic()
    total = sum(log.head().values())
    with counted("reading the log") as ran:
        done = rebuild_catalog(log, lambda events: ran(events, total))
    seconds = time.monotonic() - began
    if as_json:
        print_json(asdict(done) | {"seconds": round(seconds, 3)})
        return
    if done.moved is not None:
        say(f"the catalog was broken; what was there is now {done.moved}")
    say(f"{done.catalog}: made anew from {done.events} events in {seconds:.1f} s")
    say(", ".join(f"{name} {count}" for name, count in done.rows.items()))


def run_checkpoints(
    path: Path,
    run: str | None,
    policy: str | None,
    keep_last: int | None,
    keep_every: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    """List checkpoints, or remove those that are not to be kept, and print which.

    Raises:
        BadParameter: they are to be removed, and nothing says which to keep.
        UpkeepError: there is none.
        LaneLockedError: somebody trains a policy of which some are to be removed.
    """
    log, keep = open_store(path), keep_of(keep_last, keep_every)
    if yes and keep is None:
        raise typer.BadParameter("goes with --keep-last or --keep-every", param_hint="--yes")
    gone: set[str] = set()
    with of_run(log, run):
        checkpoints = list_checkpoints(log, keep or Keep(1), run, policy)
        if yes and keep is not None:
            for key in sorted({(each.run, each.policy) for each in checkpoints if each.goes}):
                gone |= remove_checkpoints(log, keep, *key)
    if as_json:
        print_json([asdict(each) | {"goes": each.goes, "went": each.path in gone} for each in checkpoints])
        return
    verb = None if keep is None else "stays: it is being read" if yes else "would go"
    head = ["run", "policy", "version", "step", "MiB", "checkpoint", "needed"]
    print_table(head, [_row(each, "removed now" if each.path in gone else verb) for each in checkpoints])
    if keep is None:
        free = [each for each in checkpoints if each.goes]
        size = sum(each.bytes or 0 for each in free) / MIB
        say(f"nothing needs {len(free)} of them, {size:.1f} MiB: --keep-last and --keep-every say which go")
    else:
        going = [each for each in checkpoints if (each.path in gone if yes else each.goes)]
        size = sum(each.bytes or 0 for each in going) / MIB
        there = sum(each.bytes is not None for each in checkpoints)
        verb = "removed" if yes else "would remove"
        say(f"{verb} {len(going)} of {there} checkpoints, {size:.1f} MiB{'' if yes else ': --yes does'}")


def _row(checkpoint: HeldCheckpoint, verb: str | None) -> tuple[object, ...]:
    """A checkpoint's row.

    Args:
        verb: what becomes of one that the rule lets go; None: there is no rule.
    """
    if checkpoint.removed is not None:
        needed = f"removed ({checkpoint.removed})"
    elif checkpoint.bytes is None:
        needed = "its folder is gone"
    else:
        needed = "; ".join(checkpoint.why_kept) or verb or ""
    size = None if checkpoint.bytes is None else round(checkpoint.bytes / MIB, 1)
    path = checkpoint.path if checkpoint.optimizer else f"{checkpoint.path} (weights alone)"
    return (checkpoint.run, checkpoint.policy, checkpoint.policy_version, checkpoint.step, size, path, needed)


def run_upload(path: Path, as_json: bool) -> None:
    """Move the store's sealed units to object storage and print what was done.

    Raises:
        NotAStoreError, ConfigError, RemoteError, CorruptionError, LaneLockedError: as `upload_units`.
    """
    log = open_store(path)
    here = [u for lane in log.lanes() for u in current_units(log.path, lane) if u.remote is None]
    with progress("uploading", sum(unit.bytes for unit in here)) as advance:
        report = upload_units(log, lambda name, size: advance(size))
    address = remote_folder(log.settings().remote.uri or "", log.store_id)
    if as_json:
        print_json({"address": address} | asdict(report))
        return
    say(f"{address}: {len(report.units)} units more, {report.bytes / MIB:.1f} MiB, read back and compared")
    say(f"{report.freed / MIB:.1f} MiB of local files removed")
    for name in report.kept:
        say(f"{name}: a reader still has its local files; a later upload removes them")
