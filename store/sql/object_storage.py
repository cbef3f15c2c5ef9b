"""Lets DuckDB read sealed files in object storage, without an extension: through pyarrow's file system.

DuckDB reads one open file from several threads, each by a seek and then a read. On a handle with one
position (s3fs, fsspec's wrapper of pyarrow) the seek of one thread moves the read of another, and the bytes
are wrong. Here each thread has its own position, and pyarrow reads at it.
"""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import duckdb

from rollbook.store.errors import ConfigError, RemoteError
from rollbook.store.sealed.remote import outage_explained, remote_place
from rollbook.store.settings import RemoteSettings

KEPT_OPEN = 4096
"""Files of a connection whose size is remembered."""
_NEVER_CHANGED = datetime(2020, 1, 1, tzinfo=UTC)
_TROUBLE = re.compile(r"^(?:[\w.]+\.)?RemoteError: (.*)$", re.MULTILINE)


def read_object_storage(connection: duckdb.DuckDBPyConnection, settings: RemoteSettings) -> None:
    """Let the connection read s3:// addresses.

    Raises:
        ConfigError: fsspec, through which DuckDB calls us, is not installed.
    """
    try:
        connection.register_filesystem(file_system(settings))
    except ModuleNotFoundError as error:
        if error.name != "fsspec":
            raise
        raise ConfigError(
            'SQL over sealed files in object storage needs the extra "s3": pip install "rollbook[s3]"'
        ) from error


def outage(error: duckdb.Error) -> RemoteError | None:
    """The RemoteError that made a query fail, or None if something else did."""
    match = _TROUBLE.search(str(error))
    return None if match is None else RemoteError(match[1])


class _Handle:
    """An open file with a position for each thread; pyarrow's own reads at any position, from any thread."""

    def __init__(self, file: Any, address: str, settings: RemoteSettings) -> None:
        self._file, self._address, self._settings = file, address, settings
        self._at = threading.local()

    def seek(self, position: int, whence: int = 0) -> int:
        start = {0: 0, 1: self.tell(), 2: self._file.size()}[whence]
        self._at.position = start + position
        return self.tell()

    def tell(self) -> int:
        return getattr(self._at, "position", 0)

    def read(self, size: int = -1) -> bytes:
        size = self._file.size() - self.tell() if size < 0 else size
        with outage_explained(self._address, self._settings):
            data: bytes = self._file.read_at(size, self.tell())
        self._at.position = self.tell() + len(data)
        return data

    def close(self) -> None:
        """The file stays open for the connection's next query."""


def file_system(settings: RemoteSettings) -> Any:
    """The fsspec file system over s3:// addresses that DuckDB reads through.

    Raises:
        ModuleNotFoundError: fsspec is not installed.
    """
    from fsspec import AbstractFileSystem

    class SealedFiles(AbstractFileSystem):  # type: ignore[misc,unused-ignore]
        """What DuckDB calls. Sealed files never change, so an opened one is never looked at again."""

        protocol = "s3"
        cachable = False

        def __init__(self) -> None:
            super().__init__()
            self._opened = lru_cache(maxsize=KEPT_OPEN)(self._open_once)

        def _open_once(self, address: str) -> Any:
            system, path = remote_place(address, settings)
            with outage_explained(address, settings):
                return system.open_input_file(path)

        def open(self, path: str, mode: str = "rb", **_: Any) -> _Handle:
            return _Handle(self._opened(path), path, settings)

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            return {"name": path, "size": self._opened(path).size(), "type": "file"}

        def exists(self, path: str, **_: Any) -> bool:
            return True

        def modified(self, path: str) -> datetime:
            return _NEVER_CHANGED

        def glob(self, path: str, **_: Any) -> list[str]:
            return [path]  # every address comes from a manifest; none is a pattern

    return SealedFiles()
