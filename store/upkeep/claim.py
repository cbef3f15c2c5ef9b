"""Lets one process at a time change a store's sealed units, and removes files for good.

Retention and erasure remove files.

Both first record durably that the files no longer count, and then remove them. An interrupted
removal leaves files that nobody reads, and the next run removes them.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollbook.store.errors import MediumError, UpkeepError
from rollbook.store.log.store import Store
from rollbook.store.safe_paths import fsync_folder
from rollbook.store.sealed.leases import removing
from rollbook.store.sealed.remote import discard, remove_remote_files
from rollbook.store.sealed.unit import (
    MARKS,
    TURNS,
    Unit,
    all_units,
    current_units,
    derived_folder,
    lane_units_folder,
    unit_folder,
)
from rollbook.store.wal.files import lane_folder, segment_path

CLAIM = "sealing"
"""Name of the `Store.claim` for changing sealed units: by the sealer, retention or erasure."""
PATIENCE_S = 60.0
"""How long to wait for the sealer to end its pass."""

logger = logging.getLogger(__name__)


def training_claim(run: str, policy: str) -> str:
    """Name of the `Store.claim` for adding to a policy's steps and checkpoints, and for removing them."""
    return f"training policy {policy} of run {run}"


@contextlib.contextmanager
def claim_upkeep(log: Store) -> Iterator[None]:
    """Hold the claim to change the store's sealed units.

    Raises:
        LaneLockedError: another process held it for `PATIENCE_S` seconds.
        UpkeepError: the store only reads what another one uploaded.
    """
    units = (unit for lane in log.own_lanes() for unit in current_units(log.path, lane))
    if log.settings().remote.uri is None and any(unit.remote is not None for unit in units):
        raise UpkeepError(
            f"{log.path} only reads what is in object storage: do this where it is written; or, if this is "
            "to be that store from now on and no other, set [remote] uri in store.toml"
        )
    with log.claim(CLAIM, "try again when it is done", PATIENCE_S, of_host=True):
        yield
        tell_others(log)


def tell_others(log: Store) -> None:
    """Tell other hosts which units are in object storage now. The caller alone changes sealed units."""
    if log.carrier is not None:
        try:
            log.carrier.tell_units()
        except MediumError as error:
            logger.warning("other hosts are told of sealed units by the sealer's next pass: %s", error)


UPKEEP_LANE = "upkeep"
"""Lane in which retention and erasure record what they did."""


def remove_wal(store: Path, unit: Unit) -> int:
    """Remove what is left of the unit's segments as WAL files; how many bytes."""
    folder = lane_folder(store, unit.lane)
    paths = [segment_path(folder, s.number) for s in unit.segments]
    # Newest first: a reader that misses the next segment reads the sealed unit instead.
    return _remove(folder, [path for path in reversed(paths) if path.exists()])


def _remove(folder: Path, files: Sequence[Path]) -> int:
    """Remove files of a folder, durably; how many bytes."""
    freed = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    if files:
        fsync_folder(folder)
    return freed


def remove_replaced(store: Path, lane: str, unit: Unit) -> None:
    """Remove every unit that this one replaced, leased or not, and the files derived from it."""
    others = [u for u in all_units(store, lane) if u.name != unit.name]
    old = [u for u in others if u.first <= unit.last and u.last >= unit.first]
    for other in old:
        remove_files(store, other)
    derived = store / "derived" / lane
    current = {u.name for u in current_units(store, lane)}
    stale = [f for f in derived.glob("*") if f.name not in current]
    with removing(store):
        # No lease can be taken meanwhile; a lease taken later does not name these units.
        folders = [unit_folder(store, other) for other in old] + [f for f in stale if f.name[0] != "."]
        for folder in folders:
            folder.rename(folder.with_name(f".{folder.name}.gone"))
    for hidden in lane_units_folder(store, lane).glob(".*"):
        discard(store, hidden)
    for hidden in derived.glob(".*"):
        shutil.rmtree(hidden)
    if old:
        fsync_folder(lane_units_folder(store, lane))


def remove_files(store: Path, unit: Unit) -> int:
    """Remove the unit's Parquet files, here and in object storage, and leave its manifest; how many bytes.

    Raises:
        RemoteError: object storage does not answer or refuses; the call can be repeated.
    """
    folder = unit_folder(store, unit)
    present = [path for name in (TURNS, MARKS) if (path := folder / name).exists()]
    return _remove(folder, present) + remove_remote_files(store, unit)


def remove_derived(store: Path, unit: Unit) -> None:
    """Remove what was derived from the unit."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(derived_folder(store, unit))
