"""`rollbook store verify` and `repair`: the reports of `upkeep`, with a progress bar on stderr."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from rich.text import Text

from rollbook.cli.progress import progress
from rollbook.cli.terminal import MIB, Console, print_json, table_of
from rollbook.store.events import CheckpointWritten, Json
from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.upkeep.verify import (
    Fault,
    Incomplete,
    LaneRepaired,
    LaneVerified,
    incomplete_turns,
    lane_bytes,
    repair_store,
    verify_store,
)

MOST_NAMED = 1000
"""Incomplete turns that are named; of more it is only said that there are."""


def run_verify(path: Path, weights: bool, as_json: bool) -> int:
    """Verify the store and print what was found; the exit code: 0, or 1 where something is wrong.

    Where every lane is whole, turns are looked for that lack the events they rest on.

    Args:
        weights: read checkpoints too.

    Raises:
        NotAStoreError: there is none.
    """
    log = open_store(path)
    with progress("verifying", _size(log)) as advance:
        verified = verify_store(log, advance)
    damaged = any(lane.fault for lane in verified)
    incomplete = [] if damaged else list(islice(incomplete_turns(log), MOST_NAMED + 1))
    of_weights = _of_weights(log) if weights and not damaged else None
    if as_json:
        print_json({"lanes": _lanes_json(verified), "incomplete": incomplete, "weights": of_weights})
    else:
        _print(log.path, verified)
        _print_incomplete(incomplete)
        if not damaged:
            _print_weights(log, of_weights)
    return 1 if damaged or incomplete or (of_weights and of_weights.faults) else 0


def _size(log: Store) -> int:
    return sum(lane_bytes(log.path, lane) for lane in log.lanes())


def _lanes_json(lanes: Sequence[LaneVerified | LaneRepaired]) -> list[Json]:
    return [asdict(lane) | {"whole": lane.fault is None} for lane in lanes]


@dataclass(frozen=True, slots=True)
class _Weights:
    """The check of checkpoints, and of events about weights: how many were read, and what is wrong."""

    checkpoints: int
    faults: list[str]


def _of_weights(log: Store) -> _Weights:
    from rollbook.replay.claims.backed import checkpoint_faults, checkpoints_of, find_unbacked

    held = checkpoints_of(log)
    with progress("reading checkpoints", len(held)) as advance:
        faults: list[object] = [*checkpoint_faults(log, held, advance), *find_unbacked(log)]
    return _Weights(len(held), [str(fault) for fault in faults])


def _print_weights(log: Store, weights: _Weights | None) -> None:
    console = Console()
    if weights is None:
        if next(iter(log.events_of({CheckpointWritten.KIND})), None) is not None:
            console.print("checkpoints were not read: --weights compares them with the log, too")
        return
    if not weights.faults:
        are = "checkpoint is" if weights.checkpoints == 1 else "checkpoints are"
        console.print(f"{weights.checkpoints} {are} what the log says, and what was served is backed by them")
    for fault in weights.faults:
        console.print(fault, soft_wrap=True, style="red", markup=False)


def run_repair(path: Path, as_json: bool) -> int:
    """Repair the store and print what was done; the exit code: 0, or 1 where something is still damaged.

    Raises:
        NotAStoreError: there is none.
        LaneLockedError, UpkeepError, RemoteError: as `upkeep.verify`.
    """
    log = open_store(path)
    with progress("verifying", _size(log)) as advance:
        lanes = repair_store(log, advance)
    if as_json:
        print_json({"lanes": _lanes_json(lanes)})
    else:
        _print_repaired(lanes)
    return 1 if any(lane.fault for lane in lanes) else 0


def _print_repaired(lanes: list[LaneRepaired]) -> None:
    console = Console()
    table = table_of("lane", ">repaired", "whole")
    for lane in lanes:
        whole = Text("yes") if lane.fault is None else Text("no", "red")
        table.add_row(lane.lane, str(len(lane.repaired)), whole)
    console.print(table)
    for lane in lanes:
        for fault in lane.repaired:
            line = f"lane {lane.lane}: {fault}: removed; sealed unit {fault.unit} is read instead"
            console.print(line, soft_wrap=True)
        if lane.fault is not None:
            line = f"lane {lane.lane}: {lane.fault}: left as it is; restore the file from a copy"
            console.print(line, soft_wrap=True, style="red")


def _remedy(path: Path, fault: Fault) -> str:
    if fault.unit is None:
        return "restore the file from a copy, and verify again"
    return (
        f"sealed unit {fault.unit} holds the same events and is whole: "
        f"rollbook store repair --store {shlex.quote(str(path))}"
    )


def _print(path: Path, lanes: list[LaneVerified]) -> None:
    console = Console()
    table = table_of("lane", ">events", ">units", ">WAL files", ">MiB", "whole")
    for lane in lanes:
        counts = (lane.events, lane.units, lane.wal_files)
        whole = Text("yes") if lane.fault is None else Text("no", "red")
        table.add_row(lane.lane, *(f"{count:,}" for count in counts), f"{lane.bytes / MIB:,.1f}", whole)
    console.print(table)
    if left_out := sum(lane.left_out for lane in lanes):
        console.tell(f"an excerpt: {left_out:,} events of these lanes were left out of it")
    for lane in lanes:
        if lane.fault is not None:
            console.print(
                f"lane {lane.lane}: {lane.fault}: {_remedy(path, lane.fault)}",
                soft_wrap=True,
                style="red",
            )


def _print_incomplete(turns: list[Incomplete]) -> None:
    console = Console()
    for turn in turns[:MOST_NAMED]:
        console.print(str(turn), soft_wrap=True, style="red")
    if len(turns) > MOST_NAMED:
        console.print(f"and more than {MOST_NAMED} others", style="red")
