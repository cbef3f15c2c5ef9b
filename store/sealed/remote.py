"""Where a unit's files are: beside its manifest, or in object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from rollbook.store.errors import ConfigError
from rollbook.store.sealed.unit import Unit, unit_folder
from rollbook.store.settings import RemoteSettings, read_settings


def place(store: Path, unit: Unit) -> tuple[fs.FileSystem, str]:
    """The file system of a unit's files, and the folder in it.

    Raises:
        ConfigError: the unit's address is of no known kind.
    """
    if unit.remote is None:
        return fs.LocalFileSystem(), str(unit_folder(store, unit))
    return remote_place(unit.remote, read_settings(store).remote)


def remote_place(uri: str, settings: RemoteSettings) -> tuple[fs.FileSystem, str]:
    """The file system behind an address such as s3://bucket/prefix, and the path in it."""
    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc:
        raise ConfigError(f"remote address {uri!r}: use s3://bucket/prefix")
    options: dict[str, Any] = {}
    if settings.endpoint:
        endpoint = urlsplit(settings.endpoint)
        options = {"endpoint_override": endpoint.netloc, "scheme": endpoint.scheme or "https"}
    return fs.S3FileSystem(**options), f"{parts.netloc}{parts.path}".rstrip("/")
