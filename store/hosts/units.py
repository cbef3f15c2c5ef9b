"""Sealed units of other hosts' lanes: their owners tell of them, their manifests are copied, and their files
stay in object storage."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from rollbook.store.hosts.replica import Replica
from rollbook.store.hosts.session import seconds
from rollbook.store.medium.medium import Medium, units_sequence
from rollbook.store.medium.register import Register
from rollbook.store.permissions import make_folder, replace_small
from rollbook.store.sealed.remote import explained, read_remote_unit, remote_place
from rollbook.store.sealed.unit import (
    UNIT_NAME,
    Unit,
    choose,
    current_units,
    read_manifest,
    unit_folder,
    unsealed_start,
    write_manifest,
)
from rollbook.store.settings import read_settings
from rollbook.store.wal.files import (
    TOLD,
    Told,
    folders_of_lanes,
    is_replica,
    lane_folder,
    read_told,
    read_watermark,
    segment_numbers,
    segment_path,
)

UNITS_S = 5.0
"""Between two looks whether hosts tell of other units."""
AWAY_S = 30.0
"""Who has not looked for so long may have missed entries that are gone."""
_DROPPED = "!"
"""Behind the name of a unit whose files retention has removed."""


class Telling:
    """Tells other hosts which units of this host's lanes are in object storage, by a register of the host.

    A lane's own chunks could not: units change when nobody writes the lane any more, and once it has ended.
    """

    def __init__(self, medium: Medium, store: Path, host: str) -> None:
        self._register = Register(medium, units_sequence(host))
        self._store = store

    def tell(self) -> None:
        """Tell of what has changed since they were told last. The caller alone changes sealed units.

        Raises:
            MediumError: the medium does not answer.
        """
        now: Told = {}
        for lane in folders_of_lanes(self._store):
            if not is_replica(self._store, lane):
                for store, name in _units_elsewhere(self._store, lane):
                    now.setdefault(store, {}).setdefault(lane, []).append(name)
        if now == read_told(self._store):
            return
        while not self._register.replace(now):
            self._register.read()
        replace_small(self._store / TOLD, orjson.dumps(now))


def _units_elsewhere(store: Path, lane: str) -> Iterator[tuple[str, str]]:
    """(the store's address, name) of a lane's current units in object storage; a unit that was dropped has a
    mark."""
    for unit in current_units(store, lane) if (store / "sealed" / lane).exists() else ():
        if unit.remote is not None:
            place = unit.remote.removesuffix(_place(lane, unit.name))
            yield place, unit.name + (_DROPPED if unit.dropped_us is not None else "")


def _place(lane: str, name: str) -> str:
    """A unit's place below the store's."""
    return f"/sealed/{lane}/{name}"


@dataclass(slots=True)
class _Told:
    """What one host has told of, and when that was looked at."""

    register: Register
    value: Told = field(default_factory=dict)
    looked: float = 0.0


@dataclass(slots=True)
class Listening:
    """What other hosts have told of their units. One thread uses it, but for `hurry`."""

    medium: Medium
    _hosts: dict[str, _Told] = field(default_factory=dict)
    _hurried: bool = True

    def hurry(self) -> None:
        """Look at once. Any thread may call it."""
        self._hurried = True

    def due(self) -> float:
        """When it is to be looked next (`session.seconds`)."""
        return 0.0 if self._hurried else self.as_of + UNITS_S

    @property
    def as_of(self) -> float:
        """All that was told at this time is known here."""
        return min((told.looked for told in self._hosts.values()), default=seconds())

    def of(self, host: str, lane: str) -> list[str]:
        """The addresses of a lane's units that its host told of last."""
        told = self._hosts[host].value if host in self._hosts else {}
        return [store + _place(lane, name) for store, lanes in told.items() for name in lanes.get(lane, ())]

    def look(self, hosts: Iterable[str]) -> None:
        """See what is new of these hosts.

        Raises:
            MediumError: the medium does not answer.
        """
        self._hurried, begun = False, seconds()
        known = {host: self._hosts.get(host) for host in hosts}
        for host, told in known.items():
            if told is None or begun - told.looked > AWAY_S:
                self.look_whole(host, begun)
        later = [told for told in known.values() if told is not None and told.looked < begun]
        wanted = [(told.register.sequence, told.register.number + 1, 1) for told in later]
        for told, entries in zip(later, self.medium.read_each(wanted, newest=True), strict=True):
            if entries:
                told.value = told.register.read() or {}
            told.looked = begun

    def look_whole(self, host: str, since: float) -> None:
        """See what is new of a host, also where entries that were not seen are gone; not where that was done
        since a time (`session.seconds`).

        Raises:
            MediumError: the medium does not answer.
        """
        begun = seconds()
        told = self._hosts.setdefault(host, _Told(Register(self.medium, units_sequence(host))))
        if told.looked < since:
            told.value = told.register.read() or {}
            told.looked = begun


def take_units(store: Path, replica: Replica, told: list[str]) -> None:
    """Have the manifests of a replica's units as its owner told of them, and remove what they replace.

    Args:
        told: addresses of units.

    Raises:
        RemoteError: object storage does not answer, or has one no more: it was replaced meanwhile.
    """
    if not told:
        return
    settings, lane = read_settings(store), replica.lane
    known = _manifests(store, lane)
    for entry in told:
        address = entry.removesuffix(_DROPPED)
        unit = known.get(address.rpartition("/")[2])
        if unit is None or (unit.dropped_us is not None) != entry.endswith(_DROPPED):
            with explained(address, settings.remote):
                unit = read_remote_unit(*remote_place(address, settings.remote), address)
            make_folder(unit_folder(store, unit))
            write_manifest(unit_folder(store, unit), unit)
    if settle(store, replica, settings.seal.keep_wal_bytes):
        replica.units = told  # else readers are behind, and all of this is done again


def settle(store: Path, replica: Replica, keep: int) -> bool:
    """Go on behind the units whose manifests are here, and remove what they replace; whether readers are past
    all that is in them.

    Args:
        keep: so many bytes of segments stay that are in units.
    """
    lane = replica.lane
    here = _manifests(store, lane)
    for name in here.keys() - {unit.name for unit in choose(here.values())}:
        shutil.rmtree(store / "sealed" / lane / name, ignore_errors=True)
    replica.skip_to(unsealed_start(store, lane))
    for unit in current_units(store, lane):
        if unit.erased or unit.dropped_us is not None:
            for segment in unit.segments:
                segment_path(replica.folder, segment.number).unlink(missing_ok=True)
    return _remove_sealed_segments(store, lane, keep)


def _manifests(store: Path, lane: str) -> dict[str, Unit]:
    folder = store / "sealed" / lane
    if not folder.exists():
        return {}
    names = [entry.name for entry in folder.iterdir() if UNIT_NAME.fullmatch(entry.name)]
    return {name: read_manifest(folder / name) for name in names}


def _remove_sealed_segments(store: Path, lane: str, keep: int) -> bool:
    """Remove the oldest segments of a replica that are in units, but for so many bytes, and any that came in
    part before its units were known; whether readers are past all that are in units."""
    folder = lane_folder(store, lane)
    sealed, mark = unsealed_start(store, lane).number, read_watermark(folder)
    sizes = {s.number: s.bytes for unit in current_units(store, lane) for s in unit.segments}
    kept = 0
    for number in reversed(segment_numbers(folder)):
        path = segment_path(folder, number)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            kept += size
            in_part = size != sizes.get(number, size)
            if number < sealed and (in_part or (number < mark.segment and kept > keep)):
                path.unlink()
    return mark.segment >= sealed - 1
