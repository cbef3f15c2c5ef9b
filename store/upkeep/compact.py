"""Merges neighbouring sealed units into larger ones, so that a lane has few files however it was
written.

Sizes are those of the log that a unit holds (its segments' bytes; Parquet takes about half).
Neighbours are merged, up to `compact_bytes` together, when

1. they are at least `FEWEST`, and none holds more than half of their total: so each is at least
   doubled, and a row is written again at most log2(compact_bytes / size of its first unit) times;
   half as often if units are alike, as they then grow fourfold; or
2. they are at least two, and no neighbour on either side fits with them: nothing more can be added
   to them except by rule 1, so this happens about once.

Every row keeps its bits: the written unit is read back and compared. That takes memory for about
three times the merged rows, at most about 3 x `compact_bytes`; a unit that is read whole takes
less.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rollbook.store.errors import RemoteError
from rollbook.store.ids import now_us
from rollbook.store.sealed.leases import UnitName, removing
from rollbook.store.sealed.parquet import damaged, read_file
from rollbook.store.sealed.remote import discard
from rollbook.store.sealed.seal import write_unit
from rollbook.store.sealed.unit import (
    MARKS,
    TURNS,
    UNIT_NAME,
    Unit,
    all_units,
    choose,
    current_units,
    lane_units_folder,
)
from rollbook.store.settings import SealSettings, read_settings
from rollbook.store.wal.files import HOST, read_told

FEWEST = 4
"""Fewest neighbours that are merged although more may follow."""
READ_S = 600.0
"""So long other hosts' readers may take for what they have begun to read."""
GONE = ".gone"
"""End of the hidden name that a folder has while it is removed."""

logger = logging.getLogger(__name__)


def compact(store: Path, lane: str, settings: SealSettings) -> Iterator[tuple[Unit, tuple[Unit, ...]]]:
    """Do every due merge; yields each new unit and the units that it replaces, which are not removed yet.

    The caller is the only one that changes the store's sealed units.

    Raises:
        CorruptionError: a unit is damaged, or what was written did not read back the same.
    """
    uploads = read_settings(store).remote.uri is not None
    while True:
        units = current_units(store, lane)
        run = next_run([_size(unit, uploads) for unit in units], settings.compact_bytes)
        if run is None:
            return
        old = tuple(units[run[0] : run[1]])
        yield merge(store, old, settings), old


def next_run(sizes: Sequence[int | None], limit: int) -> tuple[int, int] | None:
    """The first units to merge: positions [start, stop), or None. Pure.

    Args:
        sizes: bytes of each unit of a lane, in order; None where a unit is not to be touched.
        limit: most bytes of a merged unit.
    """
    for start in range(len(sizes)):
        best: tuple[int, int] | None = None
        total = largest = 0
        for stop in range(start + 1, len(sizes) + 1):
            size = sizes[stop - 1]
            if size is None or total + size > limit:
                break
            total, largest = total + size, max(largest, size)
            doubled = stop - start >= FEWEST and 2 * largest <= total
            if doubled or (stop - start >= 2 and _is_closed(sizes, start, stop, total, limit)):
                best = (start, stop)
        if best is not None:
            return best
    return None


def _is_closed(sizes: Sequence[int | None], start: int, stop: int, total: int, limit: int) -> bool:
    """Whether no neighbour can be merged with these. At the lane's end one may still come."""
    if stop == len(sizes):
        return False
    around = [sizes[stop], *([sizes[start - 1]] if start else [])]
    return all(size is None or total + size > limit for size in around)


def _only_remote_copy(unit: Unit, current: Sequence[Unit]) -> bool:
    """Whether removing the unit would remove the only remote copy of its events."""
    return unit.remote is not None and any(
        other.remote is None and other.first <= unit.last and unit.first <= other.last for other in current
    )


def _is_read_elsewhere(unit: Unit, current: Sequence[Unit], told: Collection[str]) -> bool:
    """Whether other hosts may read a replaced unit's files.

    Args:
        told: the lane's units that other hosts know of.
    """
    if unit.remote is None:
        return False
    if unit.name in told:
        return True
    replacing = [other for other in current if other.first <= unit.last and unit.first <= other.last]
    erased = any(len(other.erased) > len(unit.erased) for other in replacing)
    return not erased and now_us() - max(other.sealed_us for other in replacing) < READ_S * 1e6


def _size(unit: Unit, uploads: bool) -> int | None:
    # A store that only reads from object storage does not fetch it all to merge it. An excerpt has no need of
    # it: all of a lane is one unit.
    if unit.left_out or unit.dropped_us is not None or (unit.remote is not None and not uploads):
        return None
    return sum(segment.bytes for segment in unit.segments)


def merge(store: Path, units: Sequence[Unit], settings: SealSettings) -> Unit:
    """One unit of a higher generation with all rows of these, which follow each other.

    Raises:
        CorruptionError: a unit is damaged, or what was written did not read back the same.
    """
    segments = tuple(segment for unit in units for segment in unit.segments)
    erased = tuple(erasure for unit in units for erasure in unit.erased)
    generation = max(unit.generation for unit in units) + 1
    new = Unit(units[0].lane, generation, units[0].chain_before, segments, (), now_us(), erased=erased)
    return write_unit(store, new, pa.concat_tables(_parts(store, units)), settings)


def _parts(store: Path, units: Sequence[Unit]) -> list[pa.Table]:
    parts: list[pa.Table] = []
    for unit in units:
        tables = [read_file(store, unit, name) for name in (TURNS, MARKS)]
        seqs = np.sort(np.concatenate([table["seq"].to_numpy() for table in tables]))
        if not np.array_equal(seqs, np.arange(unit.first_seq, unit.next_seq)):
            events = f"{unit.first_seq} to {unit.next_seq - 1}"
            raise damaged(store, unit, TURNS, f"the unit does not hold events {events} once each")
        parts += tables
    return parts


def remove_superseded(store: Path, lane: str) -> list[str]:
    """Remove replaced units and the files derived from them; their names.

    Units that a reader has leased stay until a later call, and so do those in object storage until their
    replacement is there too; those that other hosts may read, until these were told of the replacement, and,
    where nothing was erased, for `READ_S` after it was made. The caller is the only one that changes the
    store's sealed units.

    Raises:
        StoreError: readers have kept the lock of the leases for too long.
    """
    every = all_units(store, lane)
    current = choose(every)
    told = None
    if (store / HOST).exists():
        told = {name for lanes in read_told(store).values() for name in lanes.get(lane, ())}
    old = [
        unit.name
        for unit in every
        if unit not in current
        and not _only_remote_copy(unit, current)
        and not (told is not None and _is_read_elsewhere(unit, current, told))
    ]
    derived = store / "derived" / lane
    known = {unit.name for unit in every}
    orphans = [f.name for f in derived.glob("*") if UNIT_NAME.fullmatch(f.name) and f.name not in known]
    gone = list(derived.glob(f".*{GONE}"))  # leftovers of an interrupted call
    with removing(store) if old or orphans else contextlib.nullcontext(set[UnitName]()) as held:
        free = [name for name in (*old, *orphans) if (lane, name) not in held]
        for folder in (lane_units_folder(store, lane), derived):
            for name in free:
                # Renamed first, so that no reader sees it partly removed.
                with contextlib.suppress(FileNotFoundError):
                    gone.append((folder / name).rename(folder / f".{name}{GONE}"))
    for path in gone:
        try:
            discard(store, path)
        except RemoteError as error:  # the rest is hidden by its name; the sealer's next pass removes it
            logger.warning("%s is not removed yet: %s", path, error)
    return [name for name in free if name in old]
