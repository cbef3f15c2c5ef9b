"""The medium that a store's settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollbook.store.errors import ConfigError, MediumError
from rollbook.store.external_access import allows_folder, allows_host, not_allowed, remedy
from rollbook.store.medium.medium import Medium
from rollbook.store.sealed.remote import remote_folder
from rollbook.store.settings import MediumSettings, OwnMediumSettings, StoreSettings

if TYPE_CHECKING:
    from rollbook.store.medium.folders import SharedFolders

SCHEMES = ("s3", "gs", "az", "file", "nats")


def store_address(url: str, settings: MediumSettings) -> tuple[OwnMediumSettings, str]:
    """The medium's settings, and the store's id, that an address such as s3://bucket/prefix/STORE-ID names.

    Args:
        settings: all but the address, from the operator's command line.

    Raises:
        ConfigError: it has no id at its end.
    """
    base, _, store_id = url.rstrip("/").rpartition("/")
    if not base or not store_id:
        raise ConfigError(
            f"{url!r}: name the address with the store's id at its end, as `rollbook store info` says it"
        )
    return OwnMediumSettings(**(settings.model_dump() | {"url": base})), store_id


def opened_medium(settings: MediumSettings, store_id: str) -> Medium:
    """The medium of a store.

    Raises:
        ConfigError: the address cannot be used, or what it takes is not installed.
        MediumError: the store's own files name it, and the operator does not.
    """
    assert settings.url is not None
    url = settings.url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(
            f"[medium] url {parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}: use "
            "s3://bucket/prefix, gs://, az://, nats://host:port,host:port or file:///folder, without "
            "credentials"
        )
    if not isinstance(settings, OwnMediumSettings):
        _refuse_others(url, settings.endpoint)
    try:
        if parts.scheme == "nats":
            from rollbook.store.medium.nats import NatsMedium

            return NatsMedium(url, store_id)
        from rollbook.store.medium.objects import ObjectMedium
    except ImportError as error:
        raise ConfigError(
            f"[medium] url {url!r}: `pip install 'rollbook[cluster]'` ({error.name} is missing)"
        ) from error
    return ObjectMedium(f"{url}/{store_id}", settings.endpoint)


def opened_folders(settings: StoreSettings, store_id: str) -> SharedFolders:
    """Where the hosts of a store share folders: in the medium, or in object storage beside one that is none.

    Raises:
        ConfigError: there is no object storage.
    """
    from rollbook.store.medium.folders import SharedFolders

    url, endpoint = settings.medium.url, settings.medium.endpoint
    if url is None or urlsplit(url).scheme == "nats":
        url, endpoint = settings.remote.uri, settings.remote.endpoint
    if url is None:
        raise ConfigError(
            "checkpoints go from host to host by object storage: set `uri` under [remote] in store.toml, as "
            "messages of NATS are too small for them"
        )
    return SharedFolders(remote_folder(url, store_id), endpoint)


def _refuse_others(url: str, endpoint: str | None) -> None:
    """Check that the operator allows what the log is sent to, and read from."""
    parts, missing = urlsplit(url), list[str]()
    if parts.scheme == "file":
        missing += [] if allows_folder(parts.path) else [parts.path]
    elif parts.scheme == "nats":
        hosts = [urlsplit(f"nats://{host}") for host in parts.netloc.split(",")]
        missing += [h.netloc.rpartition("@")[2] for h in hosts if not allows_host(h.hostname or "", h.port)]
    else:
        missing += not_allowed(parts.scheme, parts.netloc, endpoint)
    if missing:
        raise MediumError(f"the store's own files say that its log goes to {url}: {remedy(*missing)}")
