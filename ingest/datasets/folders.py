"""Which files of a folder are a data set: those of `datasets.save_to_disk`, or data files beside each other.

A folder that holds more than one split, or the same data in two forms, is refused: whoever imports it says
which is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import orjson

from rollbook.store.errors import InterchangeError
from rollbook.store.inside import place_inside, read_small

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
        saved = {one: place_inside(folder, one) for one in _listed(folder, DATASETS, "splits")}
        return files_of(_one(folder, "splits", saved), kind)
    if (folder / STATE).is_file():
        return _saved(folder)
    found: dict[Path, str] = {}
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder).parts
        hidden = any(part.startswith((".", "_")) for part in inside)
        if hidden or file.name in NO_DATA or not file.is_file() or (read := kind(file)) is None:
            continue
        found[file] = read
        if len(found) > MOST_FILES:
            raise InterchangeError(f"{folder}: holds more than {MOST_FILES:,} files: name one below it")
    if not found:
        raise InterchangeError(f"{folder}: holds no file of rows: name a file, or the folder that has them")
    _one(folder, "kinds of files", {read: file.parent / f"*{read}" for file, read in found.items()})
    splits = {split: where for file in found for split, where in _splits(folder, file)}
    if splits:
        _one(folder, "splits", splits)
    return list(found)


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
        names = [one["filename"] if isinstance(one, dict) else one for one in listed]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InterchangeError(f"{folder / name}: does not list {key}: {error!r}; save it again") from error
    if not names or not all(isinstance(one, str) for one in names):
        raise InterchangeError(f"{folder / name}: {key} is {names!r}: it must list names; save it again")
    return names


def _one(folder: Path, what: str, found: Mapping[str, Path]) -> Path:
    """The only one of what was found, each with how it is named.

    Raises:
        InterchangeError: there are several.
    """
    if len(found) > 1:
        ways = ", ".join(f"'{found[name]}'" for name in sorted(found))
        raise InterchangeError(f"{folder}: holds {what} {', '.join(sorted(found))}: import one of {ways}")
    return next(iter(found.values()))
