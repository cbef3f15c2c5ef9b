"""`rollbook store repair`: removes a damaged WAL file if a sealed unit holds its events undamaged.

After sealing, the newest WAL files stay (`seal.keep_wal_bytes`) and are read before the unit. So readers meet
damage to one of them, although nothing is lost: without the file they read the unit. That the unit holds the
same events is verified: the chain runs from the lane's first event through its manifest, its files match
their sha256, and they hold every sequence number once.

A removal is recorded as `segment.repaired` before it is done. Any other damaged file is left unchanged, since
no copy of its events is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollbook.store.durable import fsync_folder
from rollbook.store.events import Event, SegmentRepaired
from rollbook.store.log.consumer import RUN
from rollbook.store.log.store import Store
from rollbook.store.sealed.unit import Unit
from rollbook.store.upkeep.claim import only_one
from rollbook.store.upkeep.remove import UPKEEP_LANE
from rollbook.store.upkeep.verify import Fault, note_fault, verify_lane


@dataclass(frozen=True, slots=True)
class LaneRepaired:
    """The result of a repair of one lane.

    Attributes:
        repaired: damaged WAL files that are gone; each names the unit that is read instead.
        fault: the first damage that cannot be repaired; what lies behind it was not looked at.
    """

    lane: str
    repaired: tuple[Fault, ...]
    fault: Fault | None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"whole": self.fault is None}


def repair_store(
    log: Store, on_bytes: Callable[[str, int], None] = lambda lane, count: None
) -> list[LaneRepaired]:
    """Verify every lane, and remove the damaged WAL files whose events are in units that are whole.

    Raises:
        LaneLockedError: another process changes sealed units, or writes lane `upkeep`.
        UpkeepError: the store only reads what another one uploaded.
        RemoteError: object storage does not answer.
    """
    with only_one(log):
        return [_repair(log, lane, on_bytes) for lane in log.lanes()]


def _repair(log: Store, lane: str, on_bytes: Callable[[str, int], None]) -> LaneRepaired:
    damaged: list[tuple[Unit, Fault]] = []
    found = verify_lane(
        log.path, lane, lambda count: on_bytes(lane, count), lambda unit, fault: damaged.append((unit, fault))
    )
    if damaged:
        with log.writer(UPKEEP_LANE) as writer:
            writer.append([Event(_record(unit, fault), RUN) for unit, fault in damaged]).result()
        for _, fault in damaged:
            Path(fault.file).unlink(missing_ok=True)
        fsync_folder(Path(damaged[0][1].file).parent)
    note_fault(log.path, lane, found.fault)
    return LaneRepaired(lane, tuple(fault for _, fault in damaged), found.fault)


def _record(unit: Unit, fault: Fault) -> SegmentRepaired:
    [segment] = [s for s in unit.segments if s.number == fault.segment]
    end = segment.first_seq + segment.events
    return SegmentRepaired(unit.lane, segment.number, unit.name, segment.first_seq, end, fault.reason)
