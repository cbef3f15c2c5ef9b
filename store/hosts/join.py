"""Makes a folder of a store that other hosts write: its marker, its settings, and then it follows."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.config import toml_lines
from rollbook.store.errors import NotAStoreError
from rollbook.store.hosts.carrier import Carrier
from rollbook.store.hosts.host import host_name
from rollbook.store.ids import new_id
from rollbook.store.log.store import Store
from rollbook.store.marker import MARKER, read_marker
from rollbook.store.medium.medium import STORE
from rollbook.store.medium.open import opened_medium, store_address
from rollbook.store.permissions import make_empty, make_folder
from rollbook.store.safe_paths import fsync_folder
from rollbook.store.settings import MediumSettings, read_settings


@dataclass(frozen=True, slots=True)
class JoinReport:
    """What there is now.

    Attributes:
        host: this one's name among the store's.
        lanes: lane -> its events.
    """

    host: str
    lanes: dict[str, int]


def join(folder: Path, url: str, settings: MediumSettings) -> JoinReport:
    """Make a new folder one of the hosts of the store at `url`, such as s3://bucket/prefix/STORE-ID.

    Args:
        settings: all but the address, which goes without the store's id.

    Raises:
        NotAStoreError: the folder is not empty, or no store is at `url`.
        ConfigError, MediumError: the address cannot be used; the medium does not answer or refuses.
        StoreError: what the medium holds is damaged.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NotAStoreError(f"{folder} exists and is not empty: name an empty or a new folder")
    own, store_id = store_address(url, settings)
    medium = opened_medium(own, store_id)
    try:
        marker = medium.read(STORE, 0)
    finally:
        medium.close()
    if not marker:
        raise NotAStoreError(
            f"{url} holds no store: name the address as `rollbook store info` says it on another host"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{new_id()}")
    try:
        _write(temporary, marker[0], own)
        temporary.rename(folder)  # in place of an empty folder, too
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)
    try:
        with contextlib.closing(Carrier(folder, store_id, own)) as carrier:
            carrier.catch_up()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # so that the same command can be given again
        raise
    return JoinReport(host_name(folder), Store(folder, store_id).head())


def _write(folder: Path, marker: bytes, settings: MediumSettings) -> None:
    make_folder(folder / "lanes")
    make_empty(folder / MARKER).write_bytes(marker)
    read_marker(folder)  # refuses what a newer release wrote, or what is no marker
    chosen = {name: value for name, value in settings.model_dump(mode="json").items() if value is not None}
    make_empty(folder / "store.toml").write_text(toml_lines({"medium": chosen}).lstrip("\n") + "\n")
    read_settings(folder)
    fsync_folder(folder)
