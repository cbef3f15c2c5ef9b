"""Where a unit's files are: beside its manifest, or in object storage; and how they are taken away there.

In object storage a store lies at `<uri>/<store id>/`: a copy of `STORE.json`, and for each unit the folder
`sealed/<lane>/<unit>/` with its files and its manifest, which is put there last and taken away first. So a
manifest there stands for files that are whole. What a local manifest (`remote`) or the note `UPLOADING`
beside it names is all that may be there of a unit: nothing has to be looked for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from rollbook.store.errors import ConfigError, CorruptionError, RemoteError, StoreError
from rollbook.store.sealed.unit import (
    MANIFEST,
    MARKS,
    TURNS,
    Unit,
    manifest_bytes,
    read_manifest,
    unit_folder,
)
from rollbook.store.settings import RemoteSettings, read_settings

UPLOADING = "UPLOADING"
"""File in a unit's folder with the address that its files are on their way to."""


def place(store: Path, unit: Unit) -> tuple[fs.FileSystem, str]:
    """The file system of a unit's files, and the folder in it.

    Raises:
        ConfigError: the unit's address is of no known kind.
    """
    if unit.remote is None:
        return fs.LocalFileSystem(), str(unit_folder(store, unit))
    return remote_place(unit.remote, read_settings(store).remote)


def remote_place(uri: str, settings: RemoteSettings) -> tuple[fs.FileSystem, str]:
    """The file system behind an address such as s3://bucket/prefix, and the path in it.

    Raises:
        ConfigError: the address or the endpoint cannot be used.
    """
    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(f"remote address {shown!r}: use s3://bucket/prefix without '?', '#' or credentials")
    return _s3(settings.endpoint, os.getpid()), f"{parts.netloc}{parts.path}".rstrip("/")


@lru_cache(maxsize=8)
def _s3(endpoint: str | None, _process: int) -> fs.S3FileSystem:
    # Made once a process (its threads do not survive a fork): it keeps its connections.
    options: dict[str, Any] = {}
    if endpoint:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise ConfigError(
                "[remote] endpoint: use https://host:port; credentials come from the environment"
            )
        options = {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    return fs.S3FileSystem(**options)


# Errors ---------------------------------------------------------------------------------------------


def is_outage(error: object) -> bool:
    """Whether object storage did not answer or refused; not that a file is missing or wrong."""
    return isinstance(error, OSError) and "AWS Error" in str(error)


def refused(address: str, settings: RemoteSettings, error: object) -> RemoteError:
    """The error for object storage that did not do what it was asked."""
    service = "AWS" if settings.endpoint is None else urlsplit(settings.endpoint).netloc.rpartition("@")[2]
    return RemoteError(
        f"{address} (at {service}): {error}: see that the bucket is there, that the service answers, and "
        "that credentials and region are right (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION)"
    )


@contextlib.contextmanager
def explained(address: str, settings: RemoteSettings) -> Iterator[None]:
    """Says of an operation on object storage that failed which address it was for.

    Raises:
        RemoteError: instead of an OSError.
    """
    try:
        yield
    except StoreError:
        raise  # some are OSErrors too
    except OSError as error:
        raise refused(address, settings, error) from error


# Taking away ----------------------------------------------------------------------------------------


def remote_addresses(folder: Path) -> set[str]:
    """Where in object storage something of the unit in this folder may be."""
    found: set[str] = set()
    with contextlib.suppress(CorruptionError):  # a folder whose making was cut short
        found |= {uri for uri in [read_manifest(folder).remote] if uri is not None}
    with contextlib.suppress(FileNotFoundError):
        found.add((folder / UPLOADING).read_text())
    return found


def discard(store: Path, folder: Path) -> None:
    """Remove a unit's folder that no reader goes by, and before it what the unit has in object storage.

    A store without `[remote] uri` only reads what is there (`rollbook store attach`): it leaves it.

    Raises:
        RemoteError: something is still there; so is the folder, and this can be asked again.
    """
    settings = read_settings(store).remote
    if settings.uri is not None:
        for address in remote_addresses(folder):
            with explained(address, settings):
                system, path = remote_place(address, settings)
                _delete_all(system, path)
    shutil.rmtree(folder, ignore_errors=True)


def remove_remote_files(store: Path, unit: Unit) -> int:
    """Remove the unit's Parquet files from object storage; how many bytes.

    The manifest of a unit that was dropped stays there, saying so; that of any other goes too.

    Raises:
        RemoteError: some may still be there; this can be asked again.
    """
    settings, freed = read_settings(store).remote, 0
    for address in remote_addresses(unit_folder(store, unit)):
        with explained(address, settings):
            system, path = remote_place(address, settings)
            infos = system.get_file_info([f"{path}/{name}" for name in (MANIFEST, TURNS, MARKS)])
            if all(info.type == fs.FileType.NotFound for info in infos[1:]):
                continue
            if unit.dropped_us is not None and unit.remote is not None:
                put(system, f"{path}/{MANIFEST}", manifest_bytes(unit))
                _delete(system, path, (TURNS, MARKS))
            else:
                _delete_all(system, path)
        freed += sum(info.size for info in infos[1:] if info.type == fs.FileType.File)
    return freed


def put(system: fs.FileSystem, path: str, data: bytes) -> None:
    """Store a small object."""
    with system.open_output_stream(path) as sink:
        sink.write(data)


def _delete_all(system: fs.FileSystem, folder: str) -> None:
    _delete(system, folder, (MANIFEST,))
    with contextlib.suppress(FileNotFoundError):
        system.delete_dir(folder)


def _delete(system: fs.FileSystem, folder: str, names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            system.delete_file(f"{folder}/{name}")
