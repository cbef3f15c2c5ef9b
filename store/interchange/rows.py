"""Rows to Parquet, a group at a time."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.events import Json

GROUP_ROWS = 1024
GROUP_WEIGHT = 4 << 20
"""A row group is written when its rows hold about this many array elements and characters."""


class RowWriter:
    """Writes rows (column -> value) to one Parquet file; holds no more than a row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.rows = 0
        self._schema = schema
        self._sink = pa.OSFile(str(path), "wb")
        self._writer: Any = pq.ParquetWriter(self._sink, schema, compression="zstd")
        self._waiting: list[Json] = []
        self._weight = 0

    def add(self, row: Json) -> None:
        """Take one row. Lists may be numpy arrays."""
        self._waiting.append(row)
        self._weight += weight(row)
        self.rows += 1
        if len(self._waiting) >= GROUP_ROWS or self._weight >= GROUP_WEIGHT:
            self._write_group()

    @property
    def bytes(self) -> int:
        """Size of the file so far, without the rows that wait."""
        return int(self._sink.tell())

    def close(self) -> None:
        """Write what waits, and the file's footer."""
        if self._waiting:
            self._write_group()
        self._writer.close()
        self._sink.close()

    def _write_group(self) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist(self._waiting, schema=self._schema))
        self._waiting, self._weight = [], 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def weight(value: Any) -> int:
    """About how many array elements and characters a value holds."""
    if isinstance(value, dict):
        return sum(map(weight, value.values()))
    if isinstance(value, list):
        return sum(map(weight, value))
    return len(value) if hasattr(value, "__len__") else 1
