"""`rollbook store seal`: one pass of the sealer, or passes until it is interrupted.

It works at a low priority (`nice` 10; the order of disk accesses is left to the kernel), so that it takes
what a recording proxy and a trainer leave.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rollbook.cli.terminal import MIB, Console, print_json, table_of
from rollbook.store.errors import LaneLockedError, RollbookError
from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.upkeep.sealer import Sealer, SealReport

NICE = 10
PATIENCE_S = 60.0
"""How long a single pass waits for another process that changes sealed units."""
PARENT_S = 0.5
"""How often a sealer that was started by another process looks whether that is still there."""


def run_seal(path: Path, watch: bool, as_json: bool, parent: int | None = None) -> int:
    """Seal the store and print what was done; the exit code: 0, or 1 where a lane is damaged or
    tables were not published.

    Args:
        watch: make passes until SIGINT or SIGTERM, which is exit code 0.
        parent: number of the process to end with.

    Raises:
        NotAStoreError, ConfigError: there is nothing to seal.
        LaneLockedError: without `watch`, another process has been changing sealed units for too long.
    """
    store = open_store(path)
    store.settings()
    with contextlib.suppress(OSError):
        os.nice(NICE)
    stop = threading.Event()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent, stop), daemon=True).start()
    with stopped_by_signals(stop):
        if watch:
            _watch(store, Sealer(store, stop), stop, as_json)
            return 0
        with _progress() as on_step:
            report = Sealer(store, stop, on_step).run_once(PATIENCE_S)
    _print(report, as_json)
    return 1 if report.damage or report.unpublished else 0


def _follow(parent: int, stop: threading.Event) -> None:
    """Stop once the parent has ended: a process whose parent ends gets another one."""
    while os.getppid() == parent:
        if stop.wait(PARENT_S):
            return
    stop.set()


def _watch(store: Store, sealer: Sealer, stop: threading.Event, as_json: bool) -> None:
    poll_s = store.settings().seal.poll_s
    reported: set[str] = set()
    while not stop.is_set():
        troubles: list[str] = []
        try:
            poll_s = store.settings().seal.poll_s
            report = sealer.run_once()
            troubles = [*report.damage.values(), *filter(None, [report.unpublished])]
            if not report.idle:
                _print(report, as_json)
        except LaneLockedError:
            pass  # another process seals, or erases; look again
        except (RollbookError, OSError) as error:
            troubles = [str(error)]  # such as a full disk: nothing is sealed meanwhile, and then it goes on
        for trouble in troubles:
            if trouble not in reported:
                with contextlib.suppress(OSError):  # stderr may lead to a full disk too
                    Console(stderr=True).print(f"sealer: {trouble}", soft_wrap=True)
        reported = set(troubles)
        stop.wait(poll_s)


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM stop the sealer after the unit it is writing."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("sealing", total=None)
        yield lambda lane, step: progress.update(task, description=f"{lane}: {step}")


def _print(report: SealReport, as_json: bool) -> None:
    if as_json:
        print_json(report, indent=False)
        return
    console = Console()
    units = (">sealed", ">merged", ">removed")
    table = table_of("lane", *units, ">WAL files removed", ">log MiB", ">Parquet MiB")
    for lane in report.lanes:
        counts = (len(lane.sealed), len(lane.merged), len(lane.removed), lane.wal_files)
        sizes = (lane.log_bytes / MIB, lane.written_bytes / MIB)
        table.add_row(lane.lane, *map(str, counts), *(f"{size:.1f}" for size in sizes))
    console.print(table)
    console.print(f"{report.seconds:.1f} s")
    for name, damage in report.damage.items():
        console.print(f"lane {name} was not finished: {damage}", soft_wrap=True, style="red")
    if report.unpublished is not None:
        console.print(report.unpublished, soft_wrap=True, style="red")
