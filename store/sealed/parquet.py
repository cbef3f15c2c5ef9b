"""Writes and reads the Parquet files of a unit, sorted for point reads.

Fat rows (`turn.requested`, `turn.completed`) go to `turns.parquet`, all others to `marks.parquet`, so that
questions about small things never pass over tokens and text. Both hold the log's columns, the lane first,
sorted by trajectory and then by place in the lane.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollbook.store.errors import SHORT, CorruptionError, ShortageError, StoreError
from rollbook.store.events import BodyStored
from rollbook.store.events.codec import conform
from rollbook.store.events.event import kinds_where
from rollbook.store.events.schema import LOG_SCHEMA
from rollbook.store.permissions import make_empty
from rollbook.store.sealed.field_ids import COLUMN_IDS, numbered
from rollbook.store.sealed.remote import is_outage, place, refused
from rollbook.store.sealed.unit import MARKS, TURNS, SealedFile, SealedSegment, Unit
from rollbook.store.settings import SealSettings, read_settings

TABLE_SCHEMA = pa.schema([pa.field("lane", pa.string()), *LOG_SCHEMA])
"""The log's columns with the lane first: of sealed files and of `Store.table`."""

FAT_KINDS = tuple(kinds_where(lambda properties: properties.fat))
MARKS_ROW_GROUP = 512
BATCH_ROWS, BATCH_BYTES = 1024, 4 << 20
"""A batch that is read back holds so many rows, or about so many bytes of JSON."""
MOST_ROWS, MOST_BYTES = 1 << 20, 8 << 30
"""Of one row group, its values in memory."""
_FEW_VALUES = ["lane", "kind", "schema_version", "run", "policy", "policy_version", "step"]
_ORDER = [("trajectory_id", "ascending", "at_start"), ("seq", "ascending")]
_SPLIT_BYTES = {"logprobs.list.element": "BYTE_STREAM_SPLIT"}
"""Measured on token ids of real text: PLAIN under zstd beats dictionary, delta and byte-stream-split,
which hide repeated n-grams from it; logprobs gain from byte-stream-split. See `python -m bench seal`."""


def split(table: pa.Table) -> dict[str, pa.Table]:
    """The rows of each file, by trajectory and then by place; files without rows are left out."""
    fat = pc.is_in(table.column("kind"), pa.array(FAT_KINDS))
    keys = table.select([key for key, *_ in _ORDER])
    parts: dict[str, pa.Table] = {}
    for name, mask in ((TURNS, fat), (MARKS, pc.invert(fat))):
        # By row numbers, so that the rows are copied once.
        rows = pc.indices_nonzero(mask)
        if len(rows):
            parts[name] = table.take(rows.take(pc.sort_indices(keys.take(rows), sort_keys=_ORDER)))
    return parts


def write_file(path: Path, table: pa.Table, settings: SealSettings) -> SealedFile:
    """Write one file and describe it. The caller makes it durable."""
    rows = settings.row_group if path.name == TURNS else MARKS_ROW_GROUP
    with pq.ParquetWriter(
        make_empty(path),
        numbered(TABLE_SCHEMA, COLUMN_IDS),
        compression="zstd",
        compression_level=settings.compression_level,
        use_dictionary=_FEW_VALUES,
        column_encoding=_SPLIT_BYTES,
        sorting_columns=[
            pq.SortingColumn(TABLE_SCHEMA.get_field_index(key), nulls_first=True)
            for key in ("trajectory_id", "seq")
        ],
        write_page_checksum=True,
    ) as writer:
        writer.write_table(table, row_group_size=rows)
    return SealedFile(path.name, table.num_rows, path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(store: Path, unit: Unit, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of one of the unit's files (none where it has no such file), pages checked.

    Raises:
        CorruptionError: the file is missing or damaged.
        RemoteError: it is in object storage, which does not answer or refuses.
    """
    schema = TABLE_SCHEMA if columns is None else pa.schema([TABLE_SCHEMA.field(c) for c in columns])
    if unit.file(name) is None:
        return schema.empty_table()
    try:
        system, folder = place(store, unit)
        with system.open_input_file(f"{folder}/{name}") as source:
            table = checked_parquet(source).read(columns=columns)
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, OSError) as error:
        raise damaged(store, unit, name, error) from error


def row_group_ends(store: Path, unit: Unit, name: str) -> list[int]:
    """For each row group of one of the unit's files the number of the row after its last one.

    Raises:
        CorruptionError, RemoteError: as `read_file`.
    """
    if unit.file(name) is None:
        return []
    try:
        system, folder = place(store, unit)
        with system.open_input_file(f"{folder}/{name}") as source:
            footer = checked_parquet(source).metadata
        return list(accumulate(footer.row_group(i).num_rows for i in range(footer.num_row_groups)))
    except (pa.ArrowException, OSError) as error:
        raise damaged(store, unit, name, error) from error


def checked_parquet(source: Any, *, at_once: bool = True) -> pq.ParquetFile:
    """A sealed or derived file as Parquet, pages checked, whose row groups are of a size that ours can have.

    A few bytes of Parquet can encode any number of values, so the sizes in a row group's metadata are checked
    before it is read.

    Args:
        at_once: the columns of a row group are fetched together, in other threads: for few reads, or for
            files that are far away. A local file is read in less time without.

    Raises:
        pa.ArrowException: it is no Parquet, or a row group is larger.
    """
    file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=at_once)
    for group in range(file.num_row_groups):
        refuse_large(file.metadata, group)
    return file


def refuse_large(metadata: Any, group: int) -> None:
    """Check that a row group is not larger than Rollbook writes, before it is read.

    Raises:
        pa.ArrowInvalid: it is larger.
    """
    about = metadata.row_group(group)
    columns = [about.column(i) for i in range(about.num_columns)]
    size = sum(max(c.total_uncompressed_size, 4 * c.num_values) for c in columns)
    if about.num_rows > MOST_ROWS or size > MOST_BYTES:
        raise pa.ArrowInvalid(
            f"row group {group} has {about.num_rows:,} rows in {size:,} bytes, which none of ours has"
        )


def damaged(store: Path, unit: Unit, name: str, error: object) -> StoreError:
    """The error for an unreadable file of a unit: RemoteError if only object storage failed.

    ShortageError if descriptors or memory ran out.
    """
    if unit.remote is not None and is_outage(error):
        return refused(f"{unit.remote}/{name}", read_settings(store).remote, error)
    where = unit.remote or store / "sealed" / unit.lane / unit.name
    if isinstance(error, OSError) and error.errno in SHORT:
        return ShortageError(f"{where}/{name} cannot be read now: {error}; try again")
    return CorruptionError(f"{where}/{name}: a sealed file of lane {unit.lane!r} cannot be read: {error}")


def unit_table(store: Path, unit: Unit, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of the unit, in the order of the lane.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    table = pa.concat_tables([read_file(store, unit, name, columns) for name in (TURNS, MARKS)])
    order = np.argsort(table.column("seq").to_numpy())
    return table.combine_chunks().take(pa.array(order))


def segment_rows(store: Path, unit: Unit, segment: SealedSegment, start: int) -> Iterator[pa.RecordBatch]:
    """The events of one of the unit's segments, from one on, in the order of the lane, as `LOG_SCHEMA`.

    A segment is read by itself, since a unit may be larger than memory. Row groups without these
    rows are skipped; besides the rows, one row group is held at a time.

    Args:
        start: sequence number of the first event.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    end = segment.first_seq + segment.events
    parts = [_rows_between(store, unit, name, start, end) for name in (TURNS, MARKS)]
    table = pa.concat_tables(parts).combine_chunks()
    order = np.argsort(table.column("seq").to_numpy())
    sizes = pc.binary_length(table.column("extra")).to_numpy()[order]
    for rows in _runs(sizes, BATCH_ROWS, BATCH_BYTES):
        part: Any = table.take(pa.array(order[rows])).combine_chunks()
        yield conform(part.to_batches()[0])


def segment_bodies(store: Path, unit: Unit, segment: SealedSegment, end: int) -> pa.Table:
    """The bodies that one of the unit's segments stores before sequence number `end`, as `LOG_SCHEMA`.

    Raises:
        CorruptionError: a file is missing or damaged.
    """
    rows = _rows_between(store, unit, MARKS, segment.first_seq, end)
    return rows.filter(pc.equal(rows.column("kind"), BodyStored.KIND))


def _rows_between(store: Path, unit: Unit, name: str, first: int, end: int) -> pa.Table:
    """The rows of one of the unit's files with `first <= seq < end`, without the lane."""
    tables = [pa.Table.from_batches([], LOG_SCHEMA)]
    if unit.file(name) is None:
        return tables[0]
    try:
        system, folder = place(store, unit)
        with (
            system.open_input_file(f"{folder}/{name}") as source,
            checked_parquet(source) as file,
        ):
            for group in _groups_between(file.metadata, first, end):
                refuse_large(file.metadata, group)
                table = file.read_row_group(group).select(LOG_SCHEMA.names).cast(LOG_SCHEMA)
                seq = table.column("seq")
                inside = pc.and_(pc.greater_equal(seq, first), pc.less(seq, end))
                tables.append(table.filter(inside))
    except (pa.ArrowException, OSError) as error:
        raise damaged(store, unit, name, error) from error
    return pa.concat_tables(tables)


def _groups_between(metadata: Any, first: int, end: int) -> Iterator[int]:
    """Row groups that may hold a row with `first <= seq < end`, by their statistics."""
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if "seq" not in paths:
        raise pa.ArrowInvalid("it has no column seq")
    column = paths.index("seq")
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        known = statistics is not None and isinstance(statistics.min, int)
        if not known or (statistics.min < end and statistics.max >= first):
            yield group


def _runs(sizes: Any, rows: int, size: int) -> Iterator[slice]:
    """Neighbouring rows grouped into slices: at most so many rows, and about so many bytes. Pure."""
    start = held = 0
    for row, own in enumerate(sizes.tolist()):
        if row > start and (row - start >= rows or held + own > size):
            yield slice(start, row)
            start, held = row, 0
        held += own
    if start < len(sizes):
        yield slice(start, len(sizes))


def same_bits(ours: pa.Table, theirs: pa.Table) -> str | None:
    """The first column in which two tables differ, None where they are the same bit for bit.

    Floats are compared as the integers of their bits, so that NaN equals itself and -0.0 is not 0.0.
    """
    if ours.num_rows != theirs.num_rows:
        return f"{ours.num_rows} rows against {theirs.num_rows}"
    for name in ours.schema.names:
        a, b = (_bits(t.column(name).combine_chunks()) for t in (ours, theirs))
        if not a.equals(b):
            return str(name)
    return None


def _bits(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_float64(column.type):
        return pa.array(column.to_numpy(zero_copy_only=False).view(np.int64), mask=_nulls(column))
    if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type):
        values = column.flatten().to_numpy(zero_copy_only=False).view(np.int32)
        lengths = pc.list_value_length(column)
        offsets = np.concatenate(([0], np.cumsum(pc.fill_null(lengths, 0).to_numpy()))).astype(np.int32)
        mask = pa.array(_nulls(column))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=mask)
    return column


def _nulls(column: pa.Array) -> Any:
    return column.is_null().to_numpy(zero_copy_only=False)
