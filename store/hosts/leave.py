"""Makes a host's folder a store of one host again, with all that the others wrote, every byte the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.store.config import read_toml, toml_text
from rollbook.store.events import CheckpointRemoved, CheckpointWritten
from rollbook.store.fold.checkpoints import held_and_removed
from rollbook.store.hosts.carrier import SHARED, Carrier
from rollbook.store.hosts.replica import FOLLOWED
from rollbook.store.log.store import Store
from rollbook.store.permissions import replace_small
from rollbook.store.safe_paths import fsync_folder
from rollbook.store.settings import read_settings
from rollbook.store.wal.files import (
    CARRIED_OUT,
    FENCED,
    HOST,
    REPLICA,
    REPLICAS,
    SHIPPED,
    TOLD,
    lane_folder,
    read_watermark,
    write_watermark,
)


@dataclass(frozen=True, slots=True)
class LeaveReport:
    """What is in the folder now.

    Attributes:
        lanes: lane -> its events.
        checkpoints: those that were fetched.
    """

    lanes: dict[str, int]
    checkpoints: tuple[str, ...]


def leave(log: Store, carrier: Carrier) -> LeaveReport:
    """Make the folder a store of this host alone. The other hosts are not to write it any more.

    Where this is cut short, the next call goes on.

    Raises:
        LaneLockedError: another host's process still runs.
        MediumError: the medium does not answer.
        StoreError: what it holds is damaged.
    """
    carrier.end_others()
    carrier.catch_up()
    head, own = log.head(), set(log.own_lanes())
    replicas = [lane for lane in log.lanes() if lane not in own]
    fetched = _fetched(log)
    carrier.close()
    _settle(log.path, replicas)
    return LeaveReport(head, fetched)


def _fetched(log: Store) -> tuple[str, ...]:
    """Fetch the checkpoints that are not here."""
    events = log.events_of({CheckpointWritten.KIND, CheckpointRemoved.KIND})
    held, _ = held_and_removed(events)
    missing = [record.path for record in held if not (log.path / record.path).exists()]
    return tuple(path for path in missing if log.folder(path).exists())


def _settle(store: Path, replicas: list[str]) -> None:
    """Remove what says that there are other hosts; last of all, what says that there were."""
    for lane in replicas:
        write_watermark(lane_folder(store, lane), read_watermark(lane_folder(store, lane)))  # durably
    for folder in (store / "lanes").iterdir():
        for name in (REPLICA, FOLLOWED, SHIPPED, FENCED):
            (folder / name).unlink(missing_ok=True)
    settings, values = read_settings(store), _values(store / "store.toml")
    values.pop("medium", None)
    if settings.remote.uri is not None:
        values["remote"] = settings.remote.table()
    replace_small(store / "store.toml", toml_text(values).encode())
    for name in (REPLICAS, SHARED, TOLD, CARRIED_OUT, HOST):
        (store / name).unlink(missing_ok=True)
    fsync_folder(store)


def _values(path: Path) -> dict[str, Any]:
    return read_toml(path) if path.exists() else {}
