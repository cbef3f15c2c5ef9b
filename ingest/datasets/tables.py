"""Reads the rows of Parquet and Arrow files, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.errors import InterchangeError
from rollbook.store.sealed.page_headers import refuse_large_pages

BATCH = 256
"""Rows in memory at a time."""


def of_parquet(path: Path, packed: str | None) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of a Parquet file.

    Raises:
        InterchangeError: it cannot be read.
    """
    _refuse_packed(path, packed)
    number = 0
    try:
        refuse_large_pages(path)
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except pa.ArrowException as error:
        raise InterchangeError(f"{path}: cannot be read as Parquet after row {number}: {error}") from error


def of_arrow(path: Path, packed: str | None) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of an Arrow file, as a stream or with a footer.

    Raises:
        InterchangeError: it cannot be read.
    """
    _refuse_packed(path, packed)
    number = 0
    try:
        with pa.memory_map(str(path)) as file:
            for batch in _batches(file):
                batch.validate(full=True)
                for start in range(0, batch.num_rows, BATCH):
                    for row in batch.slice(start, BATCH).to_pylist():
                        number += 1
                        yield number, _without_nulls(row)
    except pa.ArrowException as error:
        raise InterchangeError(f"{path}: cannot be read as Arrow after row {number}: {error}") from error


def _batches(file: Any) -> Iterator[Any]:
    footed = file.read(6) == b"ARROW1"
    file.seek(0)
    if footed:
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(file)


def _refuse_packed(path: Path, packed: str | None) -> None:
    if packed is not None:
        raise InterchangeError(f"{path}: is compressed as a whole: unpack it first")


def _without_nulls(value: Any) -> Any:
    """The value without keys of null: a table gives each message the keys of all messages."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
