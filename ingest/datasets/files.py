"""Reads the rows of data files, one at a time, wherever they stand: a file, a folder, a pattern.

What is held in memory is bounded: a row, a batch of Parquet or Arrow, or one JSON list. A compressed file is
read as it is unpacked.
"""

from __future__ import annotations

import csv
import glob
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa

from rollbook.ingest.datasets.folders import files_of
from rollbook.ingest.datasets.tables import of_arrow, of_parquet
from rollbook.store.errors import InterchangeError
from rollbook.store.events import Json

JSON_BYTES = 1 << 30
"""Largest JSON list; it is held as a whole."""
ROW_BYTES = 64 << 20
"""Largest row of a file of lines."""
ROWS = 20_000_000
"""Most rows of one import: of each a name is held."""
PACKED = {".gz": "gzip", ".zst": "zstd"}
CSV_NUMBERS = frozenset(("label", "margin", "score_chosen", "score_rejected", "reward", "success"))
"""Columns of CSV that hold numbers, true or false; all others hold texts."""
BOM = b"\xef\xbb\xbf"


def rows_of(path: Path) -> Iterator[tuple[str, Json]]:
    """(where it stands, row) of each row that is not empty.

    Raises:
        InterchangeError: something cannot be read, or a row is no object; with file, row and remedy.
    """
    count = 0
    for file in _files(path):
        suffix, packed = kind_of(file)
        read = READERS.get(suffix)
        if read is None:
            raise InterchangeError(f"{file}: its name ends with none of {KINDS}: convert or rename it")
        try:
            for number, row in read(file, packed):
                where = f"{file}, row {number}"
                if not isinstance(row, dict):
                    raise InterchangeError(f"{where}: is no object with keys")
                count += 1
                if count > ROWS:
                    raise InterchangeError(f"{where}: more than {ROWS:,} rows: import parts of it")
                yield where, row
        except (OSError, pa.ArrowException) as error:
            raise InterchangeError(f"cannot read {file}: {_why(error)}") from error


def size_of(path: Path) -> int:
    """Bytes of the file, or of all files, for a bar; 0 where there is none."""
    try:
        return sum(file.stat().st_size for file in _files(path))
    except (OSError, InterchangeError):
        return 0


def kind_of(file: Path) -> tuple[str, str | None]:
    """(suffix by which it is read, how it is compressed)."""
    packed = PACKED.get(file.suffix)
    return (file.with_suffix("") if packed else file).suffix, packed


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return files_of(path, lambda file: kind_of(file)[0] if kind_of(file)[0] in READERS else None)
    if not path.exists() and glob.has_magic(str(path)):
        found = sorted(Path(name) for name in glob.glob(str(path)))
        if not found:
            raise InterchangeError(f"{path}: no file has such a name")
        return found
    return [path]


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _opened(path: Path, packed: str | None) -> IO[bytes]:
    """The file's bytes, unpacked as they are read."""
    if packed is None:
        return path.open("rb")
    stream: Any = pa.input_stream(str(path), compression=packed)
    return io.BufferedReader(stream)


def _of_lines(path: Path, packed: str | None) -> Iterator[tuple[int, Any]]:
    with _opened(path, packed) as file:
        yield from _lines(path, file)


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := file.readline(ROW_BYTES + 1):
        number += 1
        if len(line) > ROW_BYTES:
            raise InterchangeError(
                f"{path}, row {number}: has more than {ROW_BYTES:,} bytes: make it smaller"
            )
        if line.strip():
            yield number, _parsed(path, f"line {number}", line.removeprefix(BOM))


def _of_json(path: Path, packed: str | None) -> Iterator[tuple[int, Any]]:
    """A list of rows; or rows by lines, under a name that says JSON."""
    with _opened(path, packed) as file:
        data = file.read(JSON_BYTES + 1)
    if len(data) > JSON_BYTES:
        raise InterchangeError(f"{path}: more than {JSON_BYTES:,} bytes of JSON: write JSONL or Parquet")
    data = data.removeprefix(BOM)
    if data.lstrip()[:1] == b"{" and b"\n" in data.strip():
        first = data.lstrip().split(b"\n", 1)[0]
        if _is_json(first):
            yield from _lines(path, io.BytesIO(data))
            return
    rows = _parsed(path, "all of it", data)
    if not isinstance(rows, list):
        raise InterchangeError(f"{path}: holds no list of rows: write [{{...}}, ...], or JSONL")
    yield from enumerate(rows, 1)


def _of_csv(path: Path, packed: str | None) -> Iterator[tuple[int, Any]]:
    """A row each, by the names in the first; what is empty is absent."""
    with _opened(path, packed) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        csv.field_size_limit(ROW_BYTES)
        reader = csv.reader(text, delimiter="\t" if kind_of(path)[0] == ".tsv" else ",", strict=True)
        number = 0
        try:
            names = next(reader, [])
            if len(set(names)) < len(names) or not any(names):
                raise InterchangeError(f"{path}, row 1: {names!r} do not name the columns, each once")
            for number, values in enumerate(reader, 1):
                if len(values) != len(names) and values:
                    raise InterchangeError(
                        f"{path}, row {number}: {len(values)} values for {len(names)} names"
                    )
                row = {name: value for name, value in zip(names, values, strict=False) if name and value}
                if row:
                    yield number, {name: _csv_value(path, number, name, value) for name, value in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise InterchangeError(f"{path}, after row {number}: no CSV in UTF-8 ({error})") from error


def _csv_value(path: Path, number: int, name: str, value: str) -> Any:
    """A text, or the number, true or false that it spells in columns of those."""
    if name not in CSV_NUMBERS:
        return value
    return _parsed(path, f"row {number}, {name}", value.strip().lower().encode())


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _parsed(path: Path, where: str, data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InterchangeError(f"{path}, {where}: no JSON ({error})") from error


Reader = Callable[[Path, str | None], Iterator[tuple[int, Any]]]
READERS: Mapping[str, Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _of_lines),
    ".json": _of_json,
    **dict.fromkeys((".csv", ".tsv"), _of_csv),
    ".parquet": of_parquet,
    ".arrow": of_arrow,
}
KINDS = ", ".join((*READERS, *(f"{kind}{packed}" for packed in PACKED for kind in (".jsonl",))))
