"""Brings a store's Iceberg tables up to its current units: each by one commit that swaps files.

A table is compared with the units by its files, so whatever happened between (units sealed, merged, erased,
dropped or moved, a call that was killed), the next call makes them equal. One process commits at a time. A
commit costs as much after the thousandth as after the first: manifests are merged, old snapshots expire, and
their files are removed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from rollbook.store.errors import CatalogError, CorruptionError
from rollbook.store.log.store import Store
from rollbook.store.sealed.derived import SCALARS
from rollbook.store.sealed.leases import lease_units
from rollbook.store.sealed.remote import outage_explained
from rollbook.store.sealed.unit import Unit, current_units
from rollbook.store.tables.catalog import (
    TableCatalog,
    find_table,
    is_damage,
    metadata_folders,
    name_of,
    open_tables,
)
from rollbook.store.tables.definitions import FILES, MERGED, TABLES, TableDefinition, digest_of
from rollbook.store.tables.files import files_of, lane_of

CLAIM = "publishing tables"
PATIENCE_S = 60.0
"""How long to wait for another process that publishes."""
BATCH = 1_000
"""Where files are only added, so many to a commit: a first call that is cut short is gone on with."""
KEPT = 20
"""Newest snapshots that an expiry keeps; it comes when there are twice as many. pyiceberg copies a table's
metadata, and so all of them, a dozen times a commit."""
ATTEMPTS = 4
"""How often to look again where another program has changed a table, or a file has gone, meanwhile."""
AT_ONCE = 8
"""Footers read at the same time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TablePublished:
    """What became of a table.

    Attributes:
        table: its name in the catalog.
        snapshot: id of the current one; None where the table never had a file.
        files, rows: in that.
        added, removed: files that this call added and removed.
        metadata: address of the newest metadata file: who has no catalog opens the table by it.
    """

    table: str
    snapshot: int | None
    files: int
    rows: int
    added: int
    removed: int
    metadata: str


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The tables of a store, and the URL of the catalog that has them, without a password."""

    catalog: str
    tables: tuple[TablePublished, ...]


class _UnreadableError(Exception):
    """The files of a table's metadata are gone or damaged."""


def publish_tables(
    log: Store, *, anew: bool = False, on_file: Callable[[int, int], None] = lambda done, total: None
) -> PublishReport:
    """Make the store's tables equal to its current units.

    Args:
        anew: make the tables themselves anew, whatever the catalog has by their names.
        on_file: called with how many new files of a commit were looked at, and how many there are.

    Raises:
        CatalogError: the catalog cannot be reached or used, or its tables are another store's.
        RemoteError: files or metadata are in object storage, which does not answer or refuses.
        CorruptionError: a sealed file is missing or damaged.
        LaneLockedError: another process has been publishing for too long.
    """
    with log.claim(CLAIM, "try again when it is done", PATIENCE_S), open_tables(log) as catalog:
        # Scalars stay on the host of their units, so that those of several are no table.
        definitions = [table for table in TABLES if not (catalog.several and table.file == SCALARS)]
        units = [unit for lane in log.own_lanes() for unit in current_units(catalog.folder, lane)]
        tables = [_brought_up(catalog, definition, units, anew, on_file) for definition in definitions]
        return PublishReport(catalog.shown, tuple(tables))


def _brought_up(
    catalog: TableCatalog,
    definition: TableDefinition,
    units: Sequence[Unit],
    anew: bool,
    on_file: Callable[[int, int], None],
) -> TablePublished:
    """What became of a table.

    Args:
        units: the current ones, as the call began.
    """
    name = name_of(definition)
    why: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            with outage_explained(name, catalog.log.settings().remote):
                table = find_table(catalog, definition, anew=anew)
                wanted = _wanted(catalog, definition, units)
                if _digest(catalog, table) == digest_of(wanted):
                    return _published(definition, table, 0, 0)
                return _swapped(catalog, definition, table, on_file)
        except _UnreadableError as error:
            logger.warning("%s cannot be read and is made anew: %s", name, error)
            why, anew = error, True
        except (CommitFailedException, ValidationException) as error:
            why, anew = error, False
        except FileNotFoundError as error:  # erasure waits for nobody
            why = error
    if isinstance(why, FileNotFoundError):
        raise CorruptionError(f"{why}: a sealed file is missing: restore it from a copy") from why
    raise CatalogError(f"{name} is not published: another program keeps changing it ({why})") from why


def _swapped(
    catalog: TableCatalog, definition: TableDefinition, table: Table, on_file: Callable[[int, int], None]
) -> TablePublished:
    lanes = catalog.log.own_lanes()
    units, lease = lease_units(catalog.folder, lanes)
    with lease:  # what is looked at is not removed meanwhile
        wanted = _wanted(catalog, definition, [unit for lane in lanes for unit in units[lane]])
        added, removed = _difference(catalog, table, wanted)
        # A swap is one commit. What is only added may come in several.
        parts = [added] if removed else [added[i : i + BATCH] for i in range(0, len(added), BATCH)]
        named = {path: size for path, size in wanted.items() if path not in set(added)}
        for part in parts:
            sizes = {path: wanted[path] for path in part}
            named |= sizes
            files = _described(catalog, definition, table, sizes, on_file)
            of_others = {
                k: v for k, v in _properties(table.current_snapshot()).items() if k.startswith(FILES)
            }
            _commit(table, files, removed, of_others | {catalog.files_property: digest_of(named)})
    _expire(catalog, definition, table)
    return _published(definition, table, len(added), len(removed))


def _wanted(catalog: TableCatalog, definition: TableDefinition, units: Sequence[Unit]) -> dict[str, int]:
    """The files that the table is to have of these units; other hosts read no file of this one's disk."""
    readable = [unit for unit in units if unit.remote is not None or not catalog.several]
    return files_of(catalog.folder, definition, readable)


def _published(definition: TableDefinition, table: Table, added: int, removed: int) -> TablePublished:
    snapshot = table.current_snapshot()
    counts = _properties(snapshot)
    files, rows = (int(counts.get(f"total-{what}", 0)) for what in ("data-files", "records"))
    number = None if snapshot is None else snapshot.snapshot_id
    return TablePublished(name_of(definition), number, files, rows, added, removed, table.metadata_location)


def _properties(snapshot: Snapshot | None) -> Mapping[str, str]:
    return {} if snapshot is None or snapshot.summary is None else snapshot.summary.additional_properties


def _digest(catalog: TableCatalog, table: Table) -> str:
    """Digest of the files that this host published in a table."""
    snapshot, nothing = table.current_snapshot(), digest_of({})
    if snapshot is None:
        return nothing
    return _properties(snapshot).get(catalog.files_property, nothing if catalog.several else "")


def _difference(
    catalog: TableCatalog, table: Table, wanted: Mapping[str, int]
) -> tuple[list[str], list[DataFile]]:
    """Paths of the files that the table lacks, and the files that it is not to have.

    Raises:
        _UnreadableError: its manifests are gone or damaged.
    """
    snapshot = table.current_snapshot()
    if snapshot is None:
        return sorted(wanted), []
    try:
        entries = [e for m in snapshot.manifests(table.io) for e in m.fetch_manifest_entry(table.io)]
    except Exception as error:
        if not is_damage(error):
            raise
        raise _UnreadableError(str(error)) from error
    if catalog.several:  # those of other lanes are another host's
        own = set(catalog.log.own_lanes())
        entries = [entry for entry in entries if lane_of(entry.data_file.file_path) in own]
    present = {entry.data_file.file_path: entry.data_file for entry in entries}
    times = Counter(entry.data_file.file_path for entry in entries)  # another program may have added it again
    # A file that was derived anew may have another size, by which engines find its footer.
    same = {p for p, file in present.items() if wanted.get(p) == file.file_size_in_bytes and times[p] == 1}
    return sorted(wanted.keys() - same), [file for path, file in present.items() if path not in same]


def _described(
    catalog: TableCatalog,
    definition: TableDefinition,
    table: Table,
    files: Mapping[str, int],
    on_file: Callable[[int, int], None],
) -> list[DataFile]:
    """Files as a manifest has them, by their footers.

    `Table.add_files` and `parquet_file_to_data_file` do the same, and compare each file's columns with the
    table's: that takes ten times as long, and ours are what the sealer wrote and read back.

    Raises:
        CorruptionError: one is no Parquet of ours.
    """
    schema, spec = table.schema(), table.spec()
    plan, ids = compute_statistics_plan(schema, table.properties), parquet_path_to_id_mapping(schema)

    def describe(path: str) -> DataFile:
        system, place = catalog.files.place(path)
        try:
            with system.open_input_file(place) as source:
                footer = pq.read_metadata(source)
            statistics = data_file_statistics_from_parquet_metadata(footer, plan, ids)
        except (pa.ArrowException, KeyError) as error:
            raise CorruptionError(f"{path}: a sealed file cannot be read: {error}") from error
        about = statistics.to_serialized_dict()
        for column in _unbounded(footer, definition):
            about["lower_bounds"].pop(ids[column], None)
            about["upper_bounds"].pop(ids[column], None)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=path,
            file_format=FileFormat.PARQUET,
            partition=statistics.partition(spec, schema),
            file_size_in_bytes=files[path],
            sort_order_id=None,
            spec_id=spec.spec_id,
            equality_ids=None,
            key_metadata=None,
            **about,
        )

    described: list[DataFile] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for file in pool.map(describe, files):
            described.append(file)
            on_file(len(described), len(files))
    return described


def _unbounded(footer: Any, definition: TableDefinition) -> set[str]:
    """Columns with values in a row group that does not say between which: pyiceberg passes over that one,
    and an engine would pass over its rows."""
    found = set()
    columns = [i for i in range(footer.num_columns) if footer.schema.column(i).path in definition.bounds]
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, columns):
            known = column.statistics
            if known is None or (not known.has_min_max and known.null_count < column.num_values):
                found.add(column.path_in_schema)
    return found


def _commit(
    table: Table, added: Sequence[DataFile], removed: Sequence[DataFile], about: dict[str, str]
) -> None:
    """One commit that removes and adds files. What only adds also merges manifests; a swap, once there are
    enough of them, merges by a second snapshot in the same commit.

    Raises:
        CommitFailedException: another program's commit came between.
    """
    snapshot = table.current_snapshot()
    manifests = len(snapshot.manifests(table.io)) if snapshot is not None and removed else 0
    with table.transaction() as transaction:
        update = transaction.update_snapshot(snapshot_properties=about)
        with update.overwrite() if removed else update.merge_append() as producer:
            for file in removed:
                producer.delete_data_file(file)
            for file in added:
                producer.append_data_file(file)
        if manifests >= MERGED:
            with transaction.update_snapshot(snapshot_properties=about).merge_append():
                pass


def _expire(catalog: TableCatalog, definition: TableDefinition, table: Table) -> None:
    """Let old snapshots go, and what nothing names any more in the folders of the table's metadata: pyiceberg
    leaves manifests of expired snapshots, old metadata, and what a killed commit wrote."""
    snapshots = sorted(table.snapshots(), key=lambda snapshot: snapshot.sequence_number or 0)
    if len(snapshots) < 2 * KEPT:
        return
    held = {ref.snapshot_id for ref in table.refs().values()}
    old = [s.snapshot_id for s in snapshots[:-KEPT] if s.snapshot_id not in held]
    if old:
        table.maintenance.expire_snapshots().by_ids(old).commit()
    named = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.snapshots():
        named.add(snapshot.manifest_list)
        named |= {manifest.manifest_path for manifest in snapshot.manifests(table.io)}
    for folder in metadata_folders(catalog, definition):
        for name in catalog.files.names_in(folder):
            if f"{folder}/{name}" not in named:
                catalog.files.delete(f"{folder}/{name}")
