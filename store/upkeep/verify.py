"""`rollbook store verify`: reads every byte of the log and reports damage, lane by lane.

Of a sealed unit it verifies the place among the others (segments, sequence numbers, chain), each
file's size and sha256, the Parquet pages, and that it holds each sequence number once. Of a WAL
file, sealed or not, it verifies every frame's checksum, chain and sequence numbers and, if it
was sealed, that it agrees with the manifest. A lane's first fault is reported, and noted in the
lane; the note is removed when the lane is whole again. For a fault of a WAL file whose events
are in an undamaged unit the report says so: `repair_store` uses the unit.

No lock is taken. Beside a live writer, each lane is verified up to what is durable when its turn
comes; beside a sealer, a lease keeps the unit that is being read.

`rollbook store repair` removes a damaged WAL file if a sealed unit holds its events undamaged.

After sealing, the newest WAL files stay (`seal.keep_wal_bytes`) and are read before the unit. So
readers meet damage to one of them, although nothing is lost: without the file they read the
unit. That the unit holds the same events is verified: the chain runs from the lane's first event
through its manifest, its files match their sha256, and they hold every sequence number once.

A removal is recorded as `segment.repaired` before it is done. Any other damaged file is left
unchanged, since no copy of its events is known.

Turns that are answered, but without their request or their trajectory's opening in the log, are
reported too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollbook.store.errors import CorruptionError, RemoteError, StoreError
from rollbook.store.events import Event, SegmentRepaired
from rollbook.store.log.consumer import RUN
from rollbook.store.log.store import Store
from rollbook.store.safe_paths import fsync_folder
from rollbook.store.sealed.leases import take_lease
from rollbook.store.sealed.parquet import TABLE_SCHEMA, checked_parquet, damaged
from rollbook.store.sealed.remote import is_outage, place
from rollbook.store.sealed.unit import SealedFile, SealedSegment, Unit, current_units, unit_folder
from rollbook.store.sql.query import connect_at
from rollbook.store.upkeep.claim import UPKEEP_LANE, claim_upkeep
from rollbook.store.wal.files import Watermark, lane_folder, quarantine, read_watermark, segment_path
from rollbook.store.wal.frame import EMPTY_CHAIN
from rollbook.store.wal.segment import verify_segment

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong in a lane: the file, its WAL segment and the offset of the frame if it is one.

    Attributes:
        unit: name of the sealed unit that holds the segment's events and is whole; None where none does.
    """

    file: str
    reason: str
    segment: int | None = None
    offset: int | None = None
    unit: str | None = None

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at offset {self.offset}"
        return f"{self.file}: damaged{at} ({self.reason})"


@dataclass(slots=True)
class LaneVerified:
    """What was verified of a lane, up to its first fault.

    Attributes:
        events: events that are there; none of units that retention dropped.
        bytes: bytes read.
        left_out: events that an excerpt was made without: they count among none of these.
    """

    lane: str
    events: int = 0
    units: int = 0
    wal_files: int = 0
    bytes: int = 0
    fault: Fault | None = None
    left_out: int = 0


class _FaultError(Exception):
    """Internal: carries a fault to where the lane's verification ends."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a lane is verified: the next segment, the next event, and the chain value before it (hex)."""

    segment: int = 1
    next_seq: int = 0
    chain: str = EMPTY_CHAIN.hex()


def _stop_there(unit: Unit, fault: Fault) -> None:
    raise _FaultError(fault)


def verify_lane(
    store: Path,
    lane: str,
    on_bytes: Callable[[int], None] = lambda count: None,
    on_copy: Callable[[Unit, Fault], None] = _stop_there,
) -> LaneVerified:
    """Verify one lane, as the module describes.

    Args:
        on_bytes: called with the number of bytes read.
        on_copy: called with an undamaged unit, before which all is undamaged too, and the fault
            of a WAL file whose events it holds; verification then continues. By default that is
            a fault like any other.
    """
    result = LaneVerified(lane)
    try:
        mark = read_watermark(lane_folder(store, lane))
        at = _Place()
        while at.segment <= mark.segment:
            at = _step(store, at, mark, result, on_bytes, on_copy)
        if at.next_seq < mark.next_seq:
            file = str(lane_folder(store, lane) / "WATERMARK")
            raise _FaultError(
                Fault(file, f"{mark.next_seq} events were acknowledged, the lane holds {at.next_seq}")
            )
    except _FaultError as error:
        result.fault = error.fault
    except RemoteError:
        raise  # nothing is known to be damaged
    except StoreError as error:
        result.fault = Fault(str(lane_folder(store, lane)), str(error))
    return result


def verify_store(log: Store, on_bytes: Callable[[int], None] = lambda count: None) -> list[LaneVerified]:
    """Verify every lane, and write or remove each lane's damage note."""
    results: list[LaneVerified] = []
    for lane in log.lanes():
        result = verify_lane(log.path, lane, on_bytes)
        note_fault(log.path, lane, result.fault)
        results.append(result)
    return results


def note_fault(store: Path, lane: str, fault: Fault | None) -> None:
    """Write the lane's damage note, or remove it. Does nothing if the store is read-only."""
    folder = lane_folder(store, lane)
    with contextlib.suppress(OSError):
        if fault is None:
            (folder / "QUARANTINED").unlink(missing_ok=True)
        else:
            quarantine(folder, str(fault))


def lane_bytes(store: Path, lane: str) -> int:
    """About how many bytes verifying the lane reads."""
    wal = sum(path.stat().st_size for path in lane_folder(store, lane).glob("*.wal") if path.exists())
    try:
        return wal + sum(unit.bytes for unit in current_units(store, lane) if unit.dropped_us is None)
    except CorruptionError:
        return wal  # verify_lane reports the damage


# A lane, unit by unit and then segment by segment ---------------------------------------------------


def _step(
    store: Path,
    at: _Place,
    mark: Watermark,
    result: LaneVerified,
    on_bytes: Callable[[int], None],
    on_copy: Callable[[Unit, Fault], None],
) -> _Place:
    """Verify the unit that holds the next segment, or the segment's WAL file."""
    lane = result.lane
    unit = next((u for u in current_units(store, lane) if u.first <= at.segment <= u.last), None)
    if unit is None:
        return _open_step(store, at, mark, result, on_bytes)
    with take_lease(store, {lane: [unit.name]}) as lease:
        try:
            if not lease.missing:
                _verify_unit(store, unit, at, on_bytes)
                wal = _verify_copies(store, unit, on_bytes, on_copy)
        except (_FaultError, OSError):
            # If the unit was dropped, erased or moved meanwhile, its replacement is verified.
            if unit in current_units(store, lane):
                raise
            return at
    if lease.missing:
        return at
    if unit.dropped_us is None:
        result.events += unit.next_seq - unit.first_seq - unit.left_out
    result.left_out += unit.left_out
    result.units += 1
    result.wal_files += wal
    result.bytes += unit.bytes
    return _Place(unit.last + 1, unit.next_seq, unit.chain)


def _open_step(
    store: Path, at: _Place, mark: Watermark, result: LaneVerified, on_bytes: Callable[[int], None]
) -> _Place:
    path = segment_path(lane_folder(store, result.lane), at.segment)
    stop = mark.offset if at.segment == mark.segment else None
    try:
        info, bad = verify_segment(path, bytes.fromhex(at.chain), at.next_seq, stop)
    except FileNotFoundError:
        if any(u.first <= at.segment <= u.last for u in current_units(store, result.lane)):
            return at  # sealed and removed meanwhile: the unit is verified instead
        raise _FaultError(Fault(str(path), "the segment is missing", at.segment)) from None
    if bad is not None or info is None:
        offset, reason = (bad.offset, bad.reason) if bad else (0, "it holds no frame")
        raise _FaultError(Fault(str(path), reason, at.segment, offset))
    on_bytes(info.bytes)
    result.events += info.events
    result.wal_files += 1
    result.bytes += info.bytes
    return _Place(at.segment + 1, at.next_seq + info.events, info.chain.hex())


# A unit ---------------------------------------------------------------------------------------------


def _verify_unit(store: Path, unit: Unit, at: _Place, on_bytes: Callable[[int], None]) -> None:
    """Verify a unit: its place, its manifest and its files."""
    manifest = str(unit_folder(store, unit) / "UNIT.json")
    # A unit that replaced units that are verified already begins before `at`.
    if unit.first == at.segment and (unit.first_seq, unit.chain_before) != (at.next_seq, at.chain):
        raise _FaultError(
            Fault(
                manifest,
                f"begins at event {unit.first_seq} with chain {unit.chain_before}, but what comes before it "
                f"ends at event {at.next_seq} with chain {at.chain}",
            )
        )
    number, seq = unit.first, unit.first_seq
    for segment in unit.segments:
        if (segment.number, segment.first_seq) != (number, seq):
            raise _FaultError(Fault(manifest, f"segment {segment.number} is not in its place"))
        number, seq = segment.number + 1, segment.first_seq + segment.events
    if unit.dropped_us is not None:
        return
    seqs = [_verify_file(store, unit, file) for file in unit.files]
    on_bytes(unit.bytes)
    held = np.sort(np.concatenate([np.empty(0, np.int64), *seqs]))
    if not _holds(unit, held):
        but = f", but for {unit.left_out} left out" if unit.left_out else ""
        problem = f"its files do not hold events {unit.first_seq} to {unit.next_seq - 1} once each{but}"
        raise _FaultError(Fault(manifest, problem))


def _holds(unit: Unit, held: npt.NDArray[np.int64]) -> bool:
    """Whether these ascending sequence numbers are exactly those that the unit must have, once each."""
    # Compared first, because a damaged manifest may give an impossible array size.
    if len(held) != unit.next_seq - unit.first_seq - unit.left_out:
        return False
    if not unit.left_out:
        return np.array_equal(held, np.arange(unit.first_seq, unit.next_seq))
    inside = not len(held) or bool(unit.first_seq <= held[0] and held[-1] < unit.next_seq)
    return inside and bool((np.diff(held) > 0).all())


def _verify_file(store: Path, unit: Unit, file: SealedFile) -> npt.NDArray[np.int64]:
    """Verify one Parquet file; its rows' sequence numbers."""
    system, folder = place(store, unit)
    path = f"{folder}/{file.name}"
    try:
        digest, size = hashlib.sha256(), 0
        with system.open_input_stream(path) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        if (size, digest.hexdigest()) != (file.bytes, file.sha256):
            raise _FaultError(
                Fault(path, f"{size} bytes with another sha256 than its manifest's {file.bytes}")
            )
        seqs = [np.empty(0, np.int64)]
        with system.open_input_file(path) as source:
            parquet = checked_parquet(source)
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group).select(TABLE_SCHEMA.names)
                if set(table.column("lane").unique().to_pylist()) != {unit.lane}:
                    raise _FaultError(Fault(path, f"holds rows of other lanes than {unit.lane!r}"))
                seqs.append(table.column("seq").to_numpy())
    except (pa.ArrowException, OSError, KeyError) as error:
        if is_outage(error):
            raise damaged(store, unit, file.name, error) from error
        raise _FaultError(Fault(path, f"it cannot be read: {error}")) from error
    held = np.concatenate(seqs)
    if len(held) != file.rows:
        raise _FaultError(Fault(path, f"{len(held)} rows, not its manifest's {file.rows}"))
    return held


def _verify_copies(
    store: Path,
    unit: Unit,
    on_bytes: Callable[[int], None],
    on_copy: Callable[[Unit, Fault], None],
) -> int:
    """Verify the WAL files that are still there beside a unit that is whole; how many are sound."""
    count, chain = 0, unit.chain_before
    for segment in () if unit.dropped_us is not None else unit.segments:
        with contextlib.suppress(FileNotFoundError):  # removed before, or at this moment
            fault = _fault_of_copy(store, unit, segment, chain)
            if fault is not None:
                on_copy(unit, fault)
            count += fault is None
            on_bytes(segment.bytes)
        chain = segment.chain
    return count


def _fault_of_copy(store: Path, unit: Unit, segment: SealedSegment, chain: str) -> Fault | None:
    path = segment_path(lane_folder(store, unit.lane), segment.number)
    info, bad = verify_segment(path, bytes.fromhex(chain), segment.first_seq, segment.bytes)
    if bad is not None or info is None:
        offset, reason = (bad.offset, bad.reason) if bad else (0, "it holds no frame")
        return Fault(str(path), reason, segment.number, offset, unit.name)
    if (info.events, info.bytes, info.chain.hex()) != (segment.events, segment.bytes, segment.chain):
        return Fault(str(path), "it is not the file that was sealed", segment.number, unit=unit.name)
    return None


@dataclass(frozen=True, slots=True)
class LaneRepaired:
    """The result of a repair of one lane.

    Attributes:
        repaired: damaged WAL files that were removed; each names the unit that is read instead.
        fault: the first damage that cannot be repaired; nothing after it was checked.
    """

    lane: str
    repaired: tuple[Fault, ...]
    fault: Fault | None


def repair_store(log: Store, on_bytes: Callable[[int], None] = lambda count: None) -> list[LaneRepaired]:
    """Verify every lane, and remove the damaged WAL files whose events are in units that are whole.

    Raises:
        LaneLockedError: another process changes sealed units, or writes lane `upkeep`.
        UpkeepError: the store only reads what another one uploaded.
        RemoteError: object storage does not answer.
    """
    with claim_upkeep(log):
        return [_repair(log, lane, on_bytes) for lane in log.own_lanes()]


def _repair(log: Store, lane: str, on_bytes: Callable[[int], None]) -> LaneRepaired:
    damaged: list[tuple[Unit, Fault]] = []
    result = verify_lane(log.path, lane, on_bytes, lambda unit, fault: damaged.append((unit, fault)))
    if damaged:
        with log.writer(UPKEEP_LANE) as writer:
            writer.append([Event(_record(unit, fault), RUN) for unit, fault in damaged]).result()
        for _, fault in damaged:
            Path(fault.file).unlink(missing_ok=True)
        fsync_folder(Path(damaged[0][1].file).parent)
    note_fault(log.path, lane, result.fault)
    return LaneRepaired(lane, tuple(fault for _, fault in damaged), result.fault)


def _record(unit: Unit, fault: Fault) -> SegmentRepaired:
    [segment] = [s for s in unit.segments if s.number == fault.segment]
    end = segment.first_seq + segment.events
    return SegmentRepaired(unit.lane, segment.number, unit.name, segment.first_seq, end, fault.reason)


_ROWS = 4096
_QUERY = """
    SELECT any_value(run) AS run, trajectory_id, turn_id, 'turn.requested' AS missing
    FROM internal.turn_parts WHERE NOT whole GROUP BY trajectory_id, turn_id
    HAVING any_value(completed) IS NOT NULL AND any_value(requested) IS NULL
    UNION ALL
    SELECT run, trajectory_id, turn_id, 'trajectory.opened'
    FROM internal.turn_scalars ANTI JOIN internal.trajectory_scalars USING (trajectory_id)
    ORDER BY ALL"""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A turn in the log without its event of the kind `missing`: it is in no view, and never trained."""

    run: str
    trajectory_id: str
    turn_id: str
    missing: str

    def __str__(self) -> str:
        return (
            f"turn {self.turn_id} of trajectory {self.trajectory_id} (run {self.run}) has no {self.missing}: "
            "it was answered, and is in no view"
        )


def incomplete_turns(log: Store) -> Iterator[Incomplete]:
    """The log's incomplete turns, in bounded memory."""
    with connect_at(log) as connection:
        cursor = connection.execute(_QUERY)
        while rows := cursor.fetchmany(_ROWS):
            yield from (Incomplete(*row) for row in rows)
