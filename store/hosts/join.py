"""Makes a folder of a store that other hosts write: its marker, its settings, and then it follows."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from rollbook.store.config import toml_text
from rollbook.store.errors import NotAStoreError
from rollbook.store.hosts.carrier import Carrier
from rollbook.store.hosts.host import host_name
from rollbook.store.log.store import Store
from rollbook.store.marker import made_whole, new_place
from rollbook.store.medium.medium import STORE
from rollbook.store.medium.open import opened_medium, store_address
from rollbook.store.permissions import make_empty
from rollbook.store.settings import MediumSettings, RemoteSettings, read_settings


@dataclass(frozen=True, slots=True)
class JoinReport:
    """What there is now.

    Attributes:
        host: this one's name among the store's.
        lanes: lane -> its events.
    """

    host: str
    lanes: dict[str, int]


def join(
    folder: Path, url: str, settings: MediumSettings, remote: RemoteSettings | None = None
) -> JoinReport:
    """Make a new folder one of the hosts of the store at `url`, such as s3://bucket/prefix/STORE-ID.

    Args:
        settings: all but the address, which goes without the store's id.
        remote: where sealed files are kept, if not in the medium.

    Raises:
        NotAStoreError: the folder is not empty, or no store is at `url`.
        ConfigError, MediumError: the address cannot be used; the medium does not answer or refuses.
        StoreError: what the medium holds is damaged.
    """
    folder = new_place(folder)
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
    with made_whole(folder, marker[0]) as building:
        tables = {"medium": own.table()}
        if remote is not None:
            tables["remote"] = remote.table()
        make_empty(building / "store.toml").write_text(toml_text(tables))
        read_settings(building)
    try:
        with contextlib.closing(Carrier(folder, store_id, own)) as carrier:
            carrier.catch_up()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # so that the same command can be given again
        raise
    return JoinReport(host_name(folder), Store(folder, store_id).head())
