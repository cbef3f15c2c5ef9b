"""The tables of a store: their columns, which file of a unit each of them names, their properties. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from rollbook.store.sealed.derived import SCALARS
from rollbook.store.sealed.field_ids import COLUMN_IDS, SCALARS_IDS, SCALARS_SCHEMA, numbered
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sealed.unit import MARKS, TURNS

NAMESPACE = "rollbook"
"""Name of the catalog, as pyiceberg calls it, and of the namespace of the tables."""
STORE, COLUMNS, FILES = "rollbook.store", "rollbook.columns", "rollbook.files"
"""Properties: of a table the id of its store, and its columns; of a snapshot the digest of its files."""
NAME_MAPPING = "schema.name-mapping.default"
MERGED = 8
"""Manifests are merged when there are so many; each commit adds one or two."""
MANIFEST_BYTES = 1 << 20
"""Manifests that are as large are merged no further: some 3,000 files."""
LISTED = 20
"""Earlier metadata files that a table's metadata names."""
_LOG_BOUNDS = ("lane", "seq", "kind", "time", "run", "trajectory_id", "turn_id", "policy_version", "step")
_SCALARS_BOUNDS = ("trajectory_id", "turn_id", "run", "lane", "seq", "requested", "policy_version")


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table.

    Attributes:
        schema: its columns with their numbers.
        bounds: columns whose lowest and highest value in each file engines find in the metadata. None of
            them holds text, which erasure would have to reach there, or floats, whose NaN has no order.
        file: name of the file of a unit that it is made of.
    """

    name: str
    schema: pa.Schema
    bounds: tuple[str, ...]
    file: str


TABLES = (
    TableDefinition("turns", numbered(TABLE_SCHEMA, COLUMN_IDS), _LOG_BOUNDS, TURNS),
    TableDefinition("marks", numbered(TABLE_SCHEMA, COLUMN_IDS), _LOG_BOUNDS, MARKS),
    TableDefinition("scalars", numbered(SCALARS_SCHEMA, SCALARS_IDS), _SCALARS_BOUNDS, SCALARS),
)


def properties_of(table: TableDefinition, store_id: str, folder: str) -> dict[str, str]:
    """What a table's metadata says beside its columns.

    Args:
        folder: where its metadata is kept.
    """
    return {
        STORE: store_id,
        COLUMNS: ",".join(table.schema.names),
        "write.metadata.path": folder,
        "write.metadata.previous-versions-max": str(LISTED),
        # Names in old metadata are not followed to be deleted: `publish` removes by what lies in the folder.
        "write.metadata.delete-after-commit.enabled": "false",
        "commit.manifest-merge.enabled": "true",
        "commit.manifest.target-size-bytes": str(MANIFEST_BYTES),
        "commit.manifest.min-count-to-merge": str(MERGED),
        # Another's commit changes what is to be done, so that it has to be found again, not repeated.
        "commit.retry.num-retries": "0",
        "write.metadata.metrics.default": "counts",
        **{f"write.metadata.metrics.column.{name}": "truncate(16)" for name in table.bounds},
    }


def digest_of(files: Mapping[str, int]) -> str:
    """What tells the files of a table, each with its bytes, from any others."""
    lines = "".join(f"{path}\n{size}\n" for path, size in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
