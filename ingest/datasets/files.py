"""Reads the rows of a data file, one at a time: JSONL, a JSON list, or Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.errors import InterchangeError
from rollbook.store.events import Json

BATCH = 256
"""Rows of Parquet in memory at a time."""
JSON_BYTES = 1 << 30
"""Largest JSON list; it is held as a whole."""
KINDS = (".jsonl", ".json", ".parquet")


def rows_of(path: Path) -> Iterator[tuple[int, Json]]:
    """(line or row number from 1, row) of each row that is not empty.

    Raises:
        InterchangeError: it cannot be read, or a row is no object; with the remedy.
    """
    if path.suffix not in KINDS:
        raise InterchangeError(f"{path}: its name ends with none of {', '.join(KINDS)}: convert or rename it")
    try:
        rows = {".jsonl": _of_lines, ".json": _of_list, ".parquet": _of_parquet}[path.suffix](path)
        for number, row in rows:
            if not isinstance(row, dict):
                raise InterchangeError(f"{path}, row {number}: is no object with keys")
            yield number, row
    except OSError as error:
        raise InterchangeError(f"cannot read {path}: {error.strerror or error}") from error


def _of_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parsed(path, f"line {number}", line.removeprefix(b"\xef\xbb\xbf"))


def _of_list(path: Path) -> Iterator[tuple[int, Any]]:
    size = path.stat().st_size
    if size > JSON_BYTES:
        raise InterchangeError(f"{path}: {size} bytes of JSON do not fit into memory: write JSONL or Parquet")
    rows = _parsed(path, "all of it", path.read_bytes())
    if not isinstance(rows, list):
        raise InterchangeError(f"{path}: holds no list of rows: write [{{...}}, ...], or JSONL")
    yield from enumerate(rows, 1)


def _of_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except pa.ArrowException as error:
        raise InterchangeError(f"{path}: cannot be read as Parquet after row {number}: {error}") from error


def _without_nulls(value: Any) -> Any:
    """The value without keys of null: Parquet gives each message the keys of all messages."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _parsed(path: Path, where: str, data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InterchangeError(f"{path}, {where}: no JSON ({error})") from error
