"""Locates a unit's files, beside its manifest or in object storage, and removes them from object
storage.

In object storage a store is at `<uri>/<store id>/`: a copy of `STORE.json`, and for each unit
the folder `sealed/<lane>/<unit>/` with its files and its manifest, which is written last and
removed first. So files next to a manifest there are complete. Everything of a unit that can be
there is named by its local manifest (`remote`) or by the note `UPLOADING` beside it: nothing has
to be searched for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from pyarrow import fs

from rollbook.store.errors import ConfigError, CorruptionError, RemoteError, StoreError
from rollbook.store.external_access import not_allowed, remedy
from rollbook.store.safe_paths import read_small
from rollbook.store.sealed.unit import (
    MANIFEST,
    MARKS,
    TURNS,
    UNIT_NAME,
    Unit,
    manifest_bytes,
    parse_manifest,
    read_manifest,
    unit_folder,
    with_remote,
)
from rollbook.store.settings import OwnRemoteSettings, RemoteSettings, read_settings

UPLOADING = "UPLOADING"
"""File in a unit's folder with the address to which its files are being uploaded."""


def remote_folder(uri: str, store_id: str) -> str:
    """Address of a store in object storage."""
    return f"{uri.rstrip('/')}/{store_id}"


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
        RemoteError: the store names it, and the operator does not.
    """
    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(f"remote address {shown!r}: use s3://bucket/prefix without '?', '#' or credentials")
    options = _service(settings.endpoint)
    if not isinstance(settings, OwnRemoteSettings):
        _refuse_others(parts.netloc, settings.endpoint)
    return _s3(options, os.getpid()), f"{parts.netloc}{parts.path}".rstrip("/")


def read_remote_unit(system: fs.FileSystem, path: str, address: str) -> Unit:
    """A unit by its manifest in object storage.

    Args:
        path: of its folder there; address: the same, as the unit's files are named by it.

    Raises:
        FileNotFoundError: there is none.
        CorruptionError: it is damaged.
        FormatError: a newer Rollbook wrote it.
    """
    with system.open_input_stream(f"{path}/{MANIFEST}") as stream:
        return with_remote(parse_manifest(stream.read(), f"{address}/{MANIFEST}"), address)


def _refuse_others(bucket: str, endpoint: str | None) -> None:
    """Check that the operator allows the bucket and the service, which receive this process's credentials."""
    if missing := not_allowed("s3", bucket, endpoint):
        raise RemoteError(
            f"the store's own files say that sealed files are at {' of '.join(missing)}, and your "
            f"credentials would go there: {remedy(*missing)}"
        )


@lru_cache(maxsize=8)
def _s3(service: tuple[str, str] | None, _process: int) -> fs.S3FileSystem:
    # Made once a process (its threads do not survive a fork): it keeps its connections.
    if service is None:
        return fs.S3FileSystem()
    return fs.S3FileSystem(scheme=service[0], endpoint_override=service[1])


def _service(endpoint: str | None) -> tuple[str, str] | None:
    """Scheme and host of an endpoint; None for AWS."""
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
        raise ConfigError("[remote] endpoint: use https://host:port; credentials come from the environment")
    return parts.scheme, parts.netloc


# Errors ---------------------------------------------------------------------------------------------


def is_outage(error: object) -> bool:
    """Whether object storage did not answer or refused; not that a file is missing or wrong."""
    return isinstance(error, OSError) and "AWS Error" in str(error)


def refused(address: str, settings: RemoteSettings, error: object) -> RemoteError:
    """The error for a failed operation on object storage."""
    service = "AWS" if settings.endpoint is None else urlsplit(settings.endpoint).netloc.rpartition("@")[2]
    return RemoteError(
        f"{address} (at {service}): {error}: see that the bucket is there, that the service answers, and "
        "that credentials and region are right (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION)"
    )


@contextlib.contextmanager
def explained(address: str, settings: RemoteSettings) -> Iterator[None]:
    """Names the address in the error of a failed operation on object storage.

    Raises:
        RemoteError: instead of an OSError.
    """
    try:
        yield
    except StoreError:
        raise  # some are OSErrors too
    except OSError as error:
        raise refused(address, settings, error) from error


@contextlib.contextmanager
def outage_explained(address: str, settings: RemoteSettings) -> Iterator[None]:
    """The same where object storage does not answer or refuses; that a file is missing or wrong stays what
    it is."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        # pyiceberg words a refusal anew, and keeps the original behind it.
        if is_outage(error) or is_outage(error.__cause__):
            raise refused(address, settings, error) from error
        raise


# Taking away ----------------------------------------------------------------------------------------


def remote_addresses(folder: Path) -> set[str]:
    """Where in object storage something of the unit in this folder may be."""
    addresses: set[str] = set()
    with contextlib.suppress(CorruptionError):  # a folder whose creation was interrupted
        addresses |= {uri for uri in [read_manifest(folder).remote] if uri is not None}
    with contextlib.suppress(FileNotFoundError):
        addresses.add(read_small(folder / UPLOADING).decode(errors="replace"))
    return {address for address in addresses if _of_unit(address, folder)}


def _of_unit(address: str, folder: Path) -> bool:
    """Whether an address has the form of one of the folder's lane's units: anything else there is
    not ours."""
    *_, sealed, lane, name = ("", "", "", *address.split("/"))
    return (sealed, lane) == ("sealed", folder.parent.name) and UNIT_NAME.fullmatch(name) is not None


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
