"""Leases: they keep sealed files from being removed while a reader uses them.

A lease is a file in `leases/` that names units. Its holder keeps it locked (`flock`), so it ends
with the process, however that ends. Taking a lease and removing units exclude each other by the
lock of `leases/LOCK`, which both hold for milliseconds. Hence a unit that a lease names, and
that existed when the lease was taken, keeps its files until the lease is released. A unit that
had gone by then is in `Lease.missing`, and the reader lists the units again. Readers without a
lease may find a file gone; they then read again from the current units.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import orjson

from rollbook.store.errors import StoreError
from rollbook.store.ids import new_id
from rollbook.store.permissions import make_folder, open_file
from rollbook.store.safe_paths import open_plain
from rollbook.store.sealed.unit import MANIFEST, Unit, current_units, lane_units_folder
from rollbook.store.wal.files import try_lock

PATIENCE_S = 10.0
"""How long to wait for others to take leases, or to remove units."""
_SUFFIX = ".lease"
_NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that prevent a lease but not reading: no permission, a read-only file system, a full disk."""

UnitName = tuple[str, str]
"""(lane, name of the unit)"""

logger = logging.getLogger(__name__)


class Lease(contextlib.AbstractContextManager["Lease"]):
    """Keeps units from being removed until it is released, collected, or its process has ended.

    Attributes:
        missing: units that it names and that had gone before it was taken.
    """

    def __init__(self, path: Path | None, fd: int, missing: frozenset[UnitName]) -> None:
        self.missing = missing
        self._end = weakref.finalize(self, _release, path, fd, os.getpid())

    def release(self) -> None:
        """Give the units back. Safe to call twice."""
        self._end()

    def __exit__(self, *_: object) -> None:
        self.release()


def take_lease(store: Path, units: Mapping[str, Collection[str]]) -> Lease:
    """Keep units of each lane, by name, from being removed.

    Where this process cannot write into the store, nothing is kept: the lease is an empty one.

    Raises:
        StoreError: another process has been removing units for `PATIENCE_S` seconds.
    """
    try:
        with _locked(store, fcntl.LOCK_SH):
            path, fd = _write(store, {lane: sorted(set(names)) for lane, names in units.items()})
            named = {(lane, name) for lane, names in units.items() for name in names}
            missing = {(lane, name) for lane, name in named if not _there(store, lane, name)}
            return Lease(path, fd, frozenset(missing))
    except OSError as error:
        if error.errno not in _NO_WRITING:
            raise
        if error.errno != errno.EROFS:  # files of a store that cannot be written are not replaced either
            _warn(str(store), error.strerror)
        return Lease(None, -1, frozenset())


@lru_cache(maxsize=64)  # warn once per process and store
def _warn(store: str, why: str | None) -> None:
    logger.warning("%s: no lease on sealed files (%s): they may be replaced while they are read", store, why)


def lease_units(store: Path, lanes: Iterable[str]) -> tuple[dict[str, list[Unit]], Lease]:
    """The current units of each lane, and a lease on all of them.

    Raises:
        CorruptionError: a manifest is damaged.
        StoreError: as `take_lease`.
    """
    lanes = list(lanes)
    while True:
        units = {lane: current_units(store, lane) for lane in lanes}
        lease = take_lease(
            store, {lane: [unit.name for unit in lane_units] for lane, lane_units in units.items()}
        )
        # Compared as a whole, not by name only: retention changes the manifest of a unit that stays.
        if not lease.missing and units == {lane: current_units(store, lane) for lane in lanes}:
            return units, lease
        lease.release()


def leased(store: Path) -> set[UnitName]:
    """Every unit that a lease names. Files of processes that have ended are removed."""
    names: set[UnitName] = set()
    for path in sorted((store / "leases").glob(f"[!.]*{_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # released meanwhile
            names |= _names_if_held(path)
    return names


@contextlib.contextmanager
def removing(store: Path) -> Iterator[set[UnitName]]:
    """Context for removing units: gives the leased units, and no new lease is taken meanwhile. Hold it
    briefly.

    Raises:
        StoreError: others have been taking leases for `PATIENCE_S` seconds.
    """
    with _locked(store, fcntl.LOCK_EX):
        for path in (store / "leases").glob(f".*{_SUFFIX}"):
            path.unlink(missing_ok=True)  # whoever was writing it has died: nobody takes a lease now
        yield leased(store)


@contextlib.contextmanager
def _locked(store: Path, kind: int) -> Iterator[None]:
    folder = store / "leases"
    make_folder(folder)
    fd = open_file(folder / "LOCK", os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not try_lock(fd, kind):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{folder / 'LOCK'} has been held for {PATIENCE_S:g} s: see (`lslocks`) which process "
                    "holds it, and whether that is stopped"
                )
            time.sleep(0.002)
        yield
    finally:
        os.close(fd)


def _write(store: Path, names: dict[str, list[str]]) -> tuple[Path, int]:
    """A locked lease file. It gets its name last, so one that is seen is whole and locked."""
    path = store / "leases" / f"{new_id()}{_SUFFIX}"
    hidden = path.with_name(f".{path.name}")
    fd = open_file(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with open(fd, "wb", closefd=False) as file:
            file.write(orjson.dumps({"process": os.getpid(), "units": names}))
        hidden.rename(path)
    except BaseException:
        os.close(fd)
        hidden.unlink(missing_ok=True)
        raise
    return path, fd


def _there(store: Path, lane: str, name: str) -> bool:
    return (lane_units_folder(store, lane) / name / MANIFEST).exists()


def _names_if_held(path: Path) -> set[UnitName]:
    fd = open_plain(path, os.O_RDONLY)
    try:
        if try_lock(fd, fcntl.LOCK_EX):
            path.unlink(missing_ok=True)
            return set()
        with open(fd, "rb", closefd=False) as file:
            units = orjson.loads(file.read())["units"]
    finally:
        os.close(fd)
    return {(lane, name) for lane, names in units.items() for name in names}


def _release(path: Path | None, fd: int, owner: int) -> None:
    """End a lease. In a fork of its process only the copy of the descriptor goes."""
    if path is None:
        return
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
    os.close(fd)
