"""Drops old sealed units, except those that are still needed (`docs/keeping.md` lists by what).

A drop is recorded before any file is removed: first as events in lane `upkeep`, then in the manifests; then
the files go. An interrupted run is completed by the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollbook.store.catalog.catalog import note_units
from rollbook.store.events import Event, SegmentDropped
from rollbook.store.ids import now_us
from rollbook.store.log.consumer import RUN
from rollbook.store.log.store import Store
from rollbook.store.sealed.leases import leased, removing
from rollbook.store.sealed.unit import Unit, current_units, unit_folder, write_manifest
from rollbook.store.tables.following import follow_or_warn
from rollbook.store.upkeep.claim import UPKEEP_LANE, claim_upkeep, remove_derived, remove_files, remove_wal
from rollbook.store.upkeep.compact import remove_superseded
from rollbook.store.upkeep.retention_policy import LanePart, decide, parse_keep, scan


@dataclass(frozen=True, slots=True)
class UnitVerdict:
    """The decision on a sealed unit.

    Attributes:
        first_seq, next_seq: the lane's events that it holds.
        bytes: that it takes on the disk, WAL copies and derived files included.
        newest_us: wall clock of its newest event, UTC, µs since 1970.
        dropped: whether it goes (in a dry run: would go).
        why_kept: reasons; empty if it goes.
    """

    lane: str
    unit: str
    first_seq: int
    next_seq: int
    bytes: int
    newest_us: int
    dropped: bool
    why_kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetainReport:
    """What retention did, or (`dry_run`) would do: every sealed unit, lane by lane."""

    keep: str
    dry_run: bool
    units: tuple[UnitVerdict, ...]

    @property
    def dropped_bytes(self) -> int:
        """Bytes of the units that go."""
        return sum(unit.bytes for unit in self.units if unit.dropped)


def retain(log: Store, keep: str, *, dry_run: bool = False) -> RetainReport:
    """Drop the sealed units that `keep` does not keep and nothing needs.

    Args:
        keep: `7d`, `500GiB` or `versions:20`; see `upkeep.retention_policy`.

    Raises:
        UpkeepError: `keep` cannot be read.
        LaneLockedError: another process looks after the store.
        CorruptionError: a file that must be read is damaged; nothing was dropped.
    """
    wanted = parse_keep(keep)
    with contextlib.nullcontext() if dry_run else claim_upkeep(log):
        facts = scan(log)
        pending = set(_recorded(log))
        why = decide(facts, wanted, now_us(), leased(log.path), pending)
        if not dry_run:
            own = set(log.own_lanes())
            for place, reasons in zip(facts.places, why, strict=True):
                if not reasons and place.lane not in own:
                    reasons.append("it is another host's: retain it there")
            goes = [_unit(p) for p, reasons in zip(facts.places, why, strict=True) if not reasons]
            _record(log, [u for u in goes if (u.lane, u.name) not in pending], keep)
            for place, reasons in zip(facts.places, why, strict=True):
                if not reasons and not _mark_dropped(log, _unit(place)):
                    reasons.append("a reader has just opened it; the next run drops it")
            follow_or_warn(log)  # before the files go that it names
            _remove_dropped(log)
        units = [_verdict(p, w) for p, w in zip(facts.places, why, strict=True) if p.unit is not None]
    return RetainReport(keep, dry_run, tuple(units))


def _unit(place: LanePart) -> Unit:
    assert place.unit is not None
    return place.unit


def _verdict(place: LanePart, why: list[str]) -> UnitVerdict:
    unit = _unit(place)
    return UnitVerdict(
        place.lane,
        unit.name,
        unit.first_seq,
        unit.next_seq,
        place.bytes,
        place.newest_us,
        not why,
        tuple(why),
    )


def _recorded(log: Store) -> Iterator[tuple[str, str]]:
    """(lane, unit) whose drop was recorded but not carried out: a run was interrupted, or a reader
    had it open."""
    own = set(log.own_lanes())  # on one host of several, its upkeep has its name behind it
    cut = {k: n for k, n in log.head().items() if k in own and k.partition(".")[0] == UPKEEP_LANE}
    for event in log.events(cut):
        record = event.record
        if isinstance(record, SegmentDropped):
            for unit in current_units(log.path, record.of_lane):
                inside = record.first_segment <= unit.first and unit.last <= record.last_segment
                if inside and unit.dropped_us is None:
                    yield unit.lane, unit.name


def _record(log: Store, units: list[Unit], keep: str) -> None:
    """Record all drops in one append, so that the log holds all of them or none."""
    if units:
        events = [
            Event(SegmentDropped(u.lane, u.first, u.last, u.first_seq, u.next_seq, f"keep {keep}"), RUN)
            for u in units
        ]
        with log.writer(UPKEEP_LANE) as writer:
            writer.append(events).result()


def _mark_dropped(log: Store, unit: Unit) -> bool:
    """Write in the unit's manifest that it is dropped, unless a reader has it open."""
    with removing(log.path) as held:
        # A lease taken after this reads the new manifest.
        if (unit.lane, unit.name) in held:
            return False
        write_manifest(unit_folder(log.path, unit), replace(unit, dropped_us=now_us()))
        return True


def _remove_dropped(log: Store) -> None:
    """Remove what is left of every dropped unit."""
    for lane in log.own_lanes():
        dropped = [u for u in current_units(log.path, lane) if u.dropped_us is not None]
        for unit in dropped:
            remove_wal(log.path, unit)
            remove_files(log.path, unit)
            remove_derived(log.path, unit)
        if dropped:
            remove_superseded(log.path, lane)
            note_units(log.path, lane, current_units(log.path, lane))
