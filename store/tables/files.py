"""Files that tables are made of, and how pyiceberg opens files for a store: none outside of it.

What is new has the store's modes, object storage is found by the store's settings, and a name in a table's
metadata leads nowhere that the store's own files do not (`safe_paths`, `external_access`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyarrow import fs
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFile

from rollbook.store.errors import OutsideError
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.sealed.derived import SCALARS, build_derived
from rollbook.store.sealed.remote import remote_place
from rollbook.store.sealed.unit import Unit, derived_folder, unit_folder
from rollbook.store.settings import read_settings
from rollbook.store.tables.definitions import TableDefinition

FOLDER = "iceberg"
"""Folder of a store, here and in object storage, with the metadata of its tables."""
STORE_FOLDER = "rollbook.folder"
"""Property of the catalog: the store's folder."""
REMOTE = "s3://"
_NAMED = (FOLDER, "sealed", "derived")
"""Folders of a store that its tables name files of."""


def lane_of(path: str) -> str:
    """The lane of a file of a unit, or derived from one, by its address."""
    return path.rsplit("/", 3)[1]


def files_of(store: Path, table: TableDefinition, units: Sequence[Unit]) -> dict[str, int]:
    """The files of these units that a table names, each with its bytes. Missing scalars are derived.

    Raises:
        CorruptionError, RemoteError: scalars are missing and cannot be derived.
    """
    files: dict[str, int] = {}
    folder_of = derived_folder if table.file == SCALARS else unit_folder
    lanes: dict[str, str] = {}  # the folder of a lane's units: a path takes long to put together
    for unit in units:
        if unit.dropped_us is not None:
            continue
        lane = lanes.get(unit.lane) or lanes.setdefault(unit.lane, str(folder_of(store, unit).parent))
        if table.file == SCALARS:
            path = f"{lane}/{unit.name}/{SCALARS}"
            if not os.path.exists(path):
                build_derived(store, unit)
            files[path] = os.stat(path).st_size
        elif (file := unit.file(table.file)) is not None:
            files[f"{unit.remote or f'{lane}/{unit.name}'}/{file.name}"] = file.bytes
    return files


class StoreFiles(FileIO):
    """The files of one store's tables.

    Args:
        properties: with the store's folder.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        super().__init__(dict(properties))
        self._store = Path(properties[STORE_FOLDER])

    def new_input(self, location: str) -> InputFile:
        """The file at this address, to be read."""
        return PyArrowFile(location, *self.place(location)[::-1])

    def new_output(self, location: str) -> OutputFile:
        """The file at this address, to be made."""
        return _NewFile(location, *self.place(location)[::-1])

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove the file at this address."""
        system, path = self.place(location if isinstance(location, str) else location.location)
        system.delete_file(path)

    def place(self, location: str) -> tuple[fs.FileSystem, str]:
        """The file system of an address, and the path in it.

        Raises:
            OutsideError: it is not in the store.
            ConfigError, RemoteError: it is in object storage that is not to be asked.
        """
        if location.startswith(REMOTE):
            return remote_place(location, read_settings(self._store).remote)
        path = Path(os.path.normpath(location))
        if not any(path.is_relative_to(self._store / name) for name in _NAMED):
            raise OutsideError(f"{location} is not in {self._store}, whose table names it; it was not opened")
        return fs.LocalFileSystem(), str(path)

    def names_in(self, folder: str) -> list[str]:
        """Names of the files in a folder; none where there is no folder."""
        system, path = self.place(folder)
        infos = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return [info.base_name for info in infos if info.is_file]


class _NewFile(PyArrowFile):
    """A file that is made with the store's mode; names of metadata are never given twice."""

    def create(self, overwrite: bool = False) -> Any:
        """The stream to write it by."""
        if not self.location.startswith(REMOTE):
            make_folder(Path(self._path).parent)
            make_empty(Path(self._path))
        return super().create(overwrite=True)
