"""Reads the rows of data files one at a time, from a file, a folder or a pattern.

What is held in memory is bounded: a row, a batch of Parquet or Arrow, or one JSON list. A
compressed file is read as it is unpacked.

A folder holds a data set of `datasets.save_to_disk`, or data files beside each other. One that
holds more than one split, or the same data in two forms, is refused: whoever imports it says which
is meant.
"""

from __future__ import annotations

import csv
import glob
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollbook.store.errors import InterchangeError
from rollbook.store.events import Json
from rollbook.store.safe_paths import place_inside, read_small
from rollbook.store.sealed.page_headers import refuse_large_pages

DATASET, DATASETS, STATE = "dataset_info.json", "dataset_dict.json", "state.json"
NO_DATA = frozenset((DATASET, DATASETS, STATE, "dataset_infos.json"))
SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?:[-_.]|$)")
"""How a file or a folder is named after a split."""
MOST_FILES = 10_000


def files_of(folder: Path, kind: Callable[[Path], str | None]) -> list[Path]:
    """The data files of a folder, in order.

    Args:
        kind: how a file is read; None: it is no data.

    Raises:
        InterchangeError: it holds none, or several data sets.
    """
    if (folder / DATASETS).is_file():
        saved = {entry: place_inside(folder, entry) for entry in _listed(folder, DATASETS, "splits")}
        return files_of(_only(folder, "splits", saved), kind)
    if (folder / STATE).is_file():
        return _saved(folder)
    kinds: dict[Path, str] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder).parts
        hidden = any(part.startswith((".", "_")) for part in inside)
        if hidden or file.name in NO_DATA or not file.is_file() or (read := kind(file)) is None:
            continue
        kinds[file] = read
        if len(kinds) > MOST_FILES:
            raise InterchangeError(f"{folder}: holds more than {MOST_FILES:,} files: name one below it")
    if not kinds:
        raise InterchangeError(f"{folder}: holds no file of rows: name a file, or the folder that has them")
    _only(folder, "kinds of files", {read: file.parent / f"*{read}" for file, read in kinds.items()})
    splits = {split: where for file in kinds for split, where in _splits(folder, file)}
    if splits:
        _only(folder, "splits", splits)
    return list(kinds)


def _splits(folder: Path, file: Path) -> Iterator[tuple[str, Path]]:
    """The splits that the names on the way to a file say, and what names all files of each."""
    where = folder
    for part in file.relative_to(folder).parts:
        if match := SPLIT.match(part):
            yield match[1], where / (f"{match[1]}*" if where / part == file else part)
        where = where / part


def _saved(folder: Path) -> list[Path]:
    """The files of a data set that `save_to_disk` wrote, in its order."""
    files = [place_inside(folder, name) for name in _listed(folder, STATE, "_data_files")]
    state = orjson.loads(read_small(folder / STATE))
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise InterchangeError(f"{folder}: a selection of rows: save it after flatten_indices()")
    return files


def _listed(folder: Path, name: str, key: str) -> list[str]:
    """The names that a note of a data set lists."""
    try:
        listed = orjson.loads(read_small(folder / name))[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in listed]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InterchangeError(f"{folder / name}: does not list {key}: {error!r}; save it again") from error
    if not names or not all(isinstance(entry, str) for entry in names):
        raise InterchangeError(f"{folder / name}: {key} is {names!r}: it must list names; save it again")
    return names


def _only(folder: Path, what: str, choices: Mapping[str, Path]) -> Path:
    """The only one of several choices, each name with the path to give for it.

    Raises:
        InterchangeError: there are several.
    """
    if len(choices) > 1:
        ways = ", ".join(f"'{choices[name]}'" for name in sorted(choices))
        raise InterchangeError(f"{folder}: holds {what} {', '.join(sorted(choices))}: import one of {ways}")
    return next(iter(choices.values()))


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
        files = sorted(Path(name) for name in glob.glob(str(path)))
        if not files:
            raise InterchangeError(f"{path}: no file has such a name")
        return files
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
