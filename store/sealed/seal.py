"""Turns a lane's closed segments into a sealed unit: verified, written, read back, compared, renamed."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.errors import CorruptionError, RemoteError
from rollbook.store.ids import new_id, now_us
from rollbook.store.marker import raise_marker
from rollbook.store.permissions import make_folder
from rollbook.store.safe_paths import fsync_file, fsync_folder
from rollbook.store.sealed import projections
from rollbook.store.sealed.parquet import TABLE_SCHEMA, same_bits, split, write_file
from rollbook.store.sealed.remote import discard
from rollbook.store.sealed.unit import (
    TURNS,
    SealedSegment,
    Unit,
    lane_units_folder,
    unsealed_start,
    write_manifest,
)
from rollbook.store.settings import SealSettings
from rollbook.store.spill import private_database
from rollbook.store.wal.files import (
    carried_to,
    lane_folder,
    quarantine,
    read_watermark,
    segment_numbers,
    segment_path,
)
from rollbook.store.wal.segment import SegmentInfo, Start, segment_batches, verify_segment

UNIT_WAL_BYTES = 64 << 20
"""Small segments next to each other are sealed together up to about this many bytes of WAL."""

logger = logging.getLogger(__name__)


def closed_segments(store: Path, lane: str, *, all_of_it: bool = False) -> list[int]:
    """Numbers of the segments that are closed and not sealed, rising.

    Args:
        all_of_it: the last segment too, if nothing of it is this host's alone.
    """
    folder = lane_folder(store, lane)
    start = unsealed_start(store, lane).number
    mark, carried = read_watermark(folder), carried_to(store, lane)
    end = mark.segment
    if all_of_it and (carried is None or carried.next_seq >= mark.next_seq):
        end += 1  # segments behind what was carried hold no event
    elif carried is not None:
        end = min(end, carried.segment)  # what other hosts do not have yet stays in its file
    return [n for n in segment_numbers(folder) if start <= n < end]


def seal_closed(store: Path, lane: str, settings: SealSettings, *, all_of_it: bool = False) -> Iterator[Unit]:
    """Seal what is closed, unit by unit, in order.

    Args:
        all_of_it: the lane's last segment too: its writer is gone, and the caller holds the lane's lock.

    Raises:
        CorruptionError: a segment is damaged; the lane is quarantined, what came before it is sealed.
    """
    group: list[int] = []
    size = 0
    for number in closed_segments(store, lane, all_of_it=all_of_it):
        size += segment_path(lane_folder(store, lane), number).stat().st_size
        group.append(number)
        if size >= UNIT_WAL_BYTES:
            yield seal_segments(store, lane, group, settings)
            group, size = [], 0
    if group:
        yield seal_segments(store, lane, group, settings)


def seal_segments(store: Path, lane: str, numbers: Sequence[int], settings: SealSettings) -> Unit:
    """Seal these segments, which follow each other and the last sealed unit, as one unit.

    Raises:
        CorruptionError: a segment is damaged, or what was written did not read back the same.
    """
    start = unsealed_start(store, lane)
    infos, tables = _read_segments(store, lane, numbers, start)
    segments = tuple(SealedSegment(i.number, i.first_seq, i.events, i.bytes, i.chain.hex()) for i in infos)
    unit = Unit(lane, 1, start.chain.hex(), segments, (), now_us())
    return write_unit(store, unit, pa.concat_tables(tables), settings)


def _read_segments(
    store: Path, lane: str, numbers: Sequence[int], start: Start
) -> tuple[list[SegmentInfo], list[pa.Table]]:
    folder = lane_folder(store, lane)
    infos: list[SegmentInfo] = []
    tables = [TABLE_SCHEMA.empty_table()]
    chain, next_seq = start.chain, start.next_seq
    mark = read_watermark(folder)
    for number in numbers:
        path = segment_path(folder, number)
        stop = mark.offset if number == mark.segment else None
        info, bad = verify_segment(path, chain, next_seq, stop)
        if bad is not None or info is None:
            reason = (
                f"{path}: damaged at offset {bad.offset if bad else 0} ({bad.reason if bad else 'empty'})"
            )
            quarantine(folder, reason)
            raise CorruptionError(f"{reason}: it is not sealed; restore it from a copy")
        chain, next_seq = info.chain, info.first_seq + info.events
        infos.append(info)
        for batch in segment_batches(path, stop):
            lanes = pa.repeat(pa.scalar(lane), batch.num_rows)
            tables.append(pa.Table.from_arrays([lanes, *batch.columns], schema=TABLE_SCHEMA))
    return infos, tables


def write_unit(store: Path, unit: Unit, table: pa.Table, settings: SealSettings) -> Unit:
    """Write the table's rows as the unit's files; the unit appears whole, by a rename.

    Raises:
        CorruptionError: what was written does not read back the same.
    """
    raise_marker(store)
    parent = lane_units_folder(store, unit.lane)
    if not parent.exists():
        make_folder(parent)
        fsync_folder(parent.parent)
        fsync_folder(store)
    folder = parent / f".{unit.name}.{new_id()}"
    make_folder(folder)
    try:
        parts = split(table)
        del table  # only `parts` refers to the rows from here on, so their memory is freed part by part
        files = tuple(write_file(folder / name, part, settings) for name, part in parts.items())
        for name in parts:
            fsync_file(folder / name)
        unit = replace(unit, files=files, several=_count_several(parts))
        write_manifest(folder, unit)
        for name, part in parts.items():
            _compare(folder, name, part)
        fsync_folder(folder)
        folder.rename(parent / unit.name)
        fsync_folder(parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return unit


def _count_several(parts: dict[str, pa.Table]) -> int:
    if TURNS not in parts:
        return 0
    with private_database() as connection:
        connection.register("turns", parts[TURNS])
        [row] = connection.execute(projections.several("turns")).fetchall()
    return int(row[0])


def _compare(folder: Path, name: str, part: pa.Table) -> None:
    differs, done = None, 0
    with pq.ParquetFile(folder / name, page_checksum_verification=True) as file:
        for group in range(file.num_row_groups):
            back = file.read_row_group(group).cast(TABLE_SCHEMA)
            differs = differs or same_bits(part.slice(done, back.num_rows), back)
            done += back.num_rows
    if differs is not None or done != part.num_rows:
        reason = differs or f"{done} rows of {part.num_rows}"
        raise CorruptionError(f"{folder / name}: what was written does not read back the same: {reason}")


def remove_leftovers(store: Path, lane: str) -> int:
    """Remove units that were left incomplete; how many. The caller is the store's only sealer."""
    leftovers = [f for f in lane_units_folder(store, lane).glob(".*") if f.is_dir()]
    for folder in leftovers:
        try:
            discard(store, folder)
        except RemoteError as error:  # sealing goes on without object storage; the next pass tries again
            logger.warning("%s is not removed yet: %s", folder, error)
    return len(leftovers)


def remove_sealed_wal(store: Path, lane: str, units: Sequence[Unit], keep_bytes: int) -> list[int]:
    """Remove sealed WAL files, oldest first, except the newest `keep_bytes`; the numbers of the
    removed ones."""
    folder = lane_folder(store, lane)
    sealed = [s for unit in units for s in unit.segments if segment_path(folder, s.number).exists()]
    total = 0
    gone: list[int] = []
    for segment in reversed(sealed):
        total += segment.bytes
        if total > keep_bytes:
            gone.append(segment.number)
    for number in sorted(gone):
        segment_path(folder, number).unlink(missing_ok=True)
    if gone:
        fsync_folder(folder)
    return sorted(gone)
