"""Units: sealed ranges of a lane's closed segments, and the choice of the units that readers use.

A unit is a folder of immutable files with a manifest, `UNIT.json`. It appears whole, by a rename. Several
generations may cover a segment for a while (compaction, erasure); the widest and then newest one counts.
The manifest keeps the sequence numbers and chain values of its segments, so the chain of a lane can be
verified without its WAL files.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from rollbook.store.cut import LANE_NAME
from rollbook.store.errors import CorruptionError, FormatError
from rollbook.store.marker import FORMAT_VERSION
from rollbook.store.permissions import make_empty
from rollbook.store.safe_paths import fsync_folder, read_small
from rollbook.store.wal.files import is_replica
from rollbook.store.wal.frame import EMPTY_CHAIN
from rollbook.store.wal.segment import Start

MANIFEST = "UNIT.json"
TURNS, MARKS = "turns.parquet", "marks.parquet"
MANIFEST_BYTES = 32 << 20
"""A manifest names each segment and each erased trajectory; it is never larger."""
UNIT_NAME = re.compile(r"\d{8}-\d{8}\.\d+")
MOST = 1 << 48
"""Upper limit of counts of events and bytes in a manifest, far above real ones."""
HEARD_S = 15.0
"""Within this time a host that is not cut off hears which units of others were replaced."""
_CHAIN = re.compile(r"[0-9a-f]{32}")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A sealed WAL segment: its number, first event, size, and chain value after its last frame (hex)."""

    number: int
    first_seq: int
    events: int
    bytes: int
    chain: str


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file of a unit, by its name in the unit's folder."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Erasure:
    """A trajectory whose text was removed from this unit, when, and whether its tokens were kept."""

    trajectory_id: str
    time_us: int
    tokens_kept: bool


@dataclass(frozen=True, slots=True)
class Unit:
    """A manifest. The unit holds the lane's events `first_seq <= seq < next_seq`, except those left out.

    Attributes:
        chain_before: chain value before the first segment's first frame (hex); each segment has
            its own.
        several: completed turns not sampled by exactly one policy version: a filter on it must
            look into their spans.
        left_out: events of these that an excerpt of a store was made without
            (`interchange.excerpt`).
        remote: where the files are, if not beside the manifest.
        dropped_us: when retention removed the files, or None while they are there.
    """

    lane: str
    generation: int
    chain_before: str
    segments: tuple[SealedSegment, ...]
    files: tuple[SealedFile, ...]
    sealed_us: int
    erased: tuple[Erasure, ...] = ()
    remote: str | None = None
    dropped_us: int | None = None
    several: int = 0
    left_out: int = 0
    format: int = FORMAT_VERSION

    @property
    def first(self) -> int:
        """Number of the first segment."""
        return self.segments[0].number

    @property
    def last(self) -> int:
        """Number of the last segment."""
        return self.segments[-1].number

    @property
    def first_seq(self) -> int:
        """First sequence number it holds."""
        return self.segments[0].first_seq

    @property
    def next_seq(self) -> int:
        """The sequence number after its last event."""
        return self.segments[-1].first_seq + self.segments[-1].events

    @property
    def chain(self) -> str:
        """Chain value after its last frame (hex)."""
        return self.segments[-1].chain

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.first:08d}-{self.last:08d}.{self.generation}"

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file.bytes for file in self.files)

    def file(self, name: str) -> SealedFile | None:
        """The file of that name; None where the unit has no such rows."""
        return next((file for file in self.files if file.name == name), None)


_ADAPTER = TypeAdapter(Unit)


def lane_units_folder(store: Path, lane: str) -> Path:
    """Folder of a lane's units."""
    return store / "sealed" / lane


def unit_folder(store: Path, unit: Unit) -> Path:
    """Folder of a unit's manifest, and of its files unless they are remote."""
    return lane_units_folder(store, unit.lane) / unit.name


def derived_folder(store: Path, unit: Unit) -> Path:
    """Folder of what was derived from a unit; it may be missing."""
    return store / "derived" / unit.lane / unit.name


def manifest_bytes(unit: Unit) -> bytes:
    """The manifest as it is stored: JSON."""
    return orjson.dumps(asdict(unit), option=orjson.OPT_INDENT_2)


def write_manifest(folder: Path, unit: Unit) -> None:
    """Put the manifest in place, whole and durable."""
    temporary = folder / f".{MANIFEST}.tmp"
    with make_empty(temporary).open("wb") as file:
        file.write(manifest_bytes(unit))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST)
    fsync_folder(folder)


def read_manifest(folder: Path) -> Unit:
    """The manifest of a unit's folder.

    Raises:
        CorruptionError: it is missing or damaged.
        FormatError: a newer Rollbook wrote it.
    """
    path = folder / MANIFEST
    try:
        stat = path.stat()
        return _read(path, stat.st_mtime_ns, stat.st_ino)
    except FileNotFoundError:
        raise CorruptionError(f"{path}: the manifest of a sealed unit is missing") from None


@lru_cache(maxsize=65_536)
def _read(path: Path, _mtime_ns: int, _inode: int) -> Unit:
    return parse_manifest(read_small(path, MANIFEST_BYTES), path)


def parse_manifest(data: bytes, path: object) -> Unit:
    """The unit that a manifest's bytes describe; `path` is for messages.

    Raises:
        CorruptionError: they are damaged.
        FormatError: a newer Rollbook wrote them.
    """
    with contextlib.suppress(orjson.JSONDecodeError, TypeError, KeyError, IndexError):
        version = orjson.loads(data)["format"]
        if version > FORMAT_VERSION:
            raise FormatError(f"{path} is in format {version}: update rollbook to read it")
    try:
        unit = _ADAPTER.validate_json(data)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()[:3])
        raise CorruptionError(f"{path}: the manifest of a sealed unit is damaged: {problems}") from error
    if not unit.segments:
        raise CorruptionError(f"{path}: the manifest names no segment")
    if wrong := _impossible(unit):
        raise CorruptionError(f"{path}: no manifest of a sealed unit has {wrong}: restore it from a copy")
    return unit


def _impossible(unit: Unit) -> str | None:
    """The first impossible value in a manifest: names become paths, and numbers become memory sizes."""
    if not LANE_NAME.fullmatch(unit.lane):
        return f"the lane {unit.lane!r}"
    for file in unit.files:
        if file.name not in (TURNS, MARKS):
            return f"a file {file.name!r}"
        if not (0 <= file.rows <= MOST and 0 <= file.bytes <= MOST):
            return f"{file.rows} rows and {file.bytes} bytes in {file.name}"
    for segment in unit.segments:
        numbers = (segment.first_seq, segment.events, segment.bytes)
        if not (0 < segment.number < 10**8 and all(0 <= n <= MOST for n in numbers)):
            return f"a segment {segment.number} with first event, events and bytes of {numbers}"
    if not all(_CHAIN.fullmatch(chain) for chain in (unit.chain_before, *(s.chain for s in unit.segments))):
        return "a chain value of this form"
    if not (0 < unit.generation <= MOST and 0 <= unit.left_out <= unit.next_seq - unit.first_seq):
        return f"the generation {unit.generation} and {unit.left_out} events left out"
    if unit.remote is not None and not unit.remote.endswith(f"/sealed/{unit.lane}/{unit.name}"):
        return f"the address {unit.remote!r}"
    return None


def all_units(store: Path, lane: str) -> list[Unit]:
    """Every unit of the lane that is whole, superseded ones too, by first segment.

    Raises:
        CorruptionError: a manifest is missing or damaged.
    """
    folder = lane_units_folder(store, lane)
    while True:
        names = _unit_names(folder)
        units = [unit for name in names if (unit := _manifest_if_there(folder / name)) is not None]
        # A listing made during a replacement may miss both the new unit and those it replaced. It is valid
        # only if a second listing is equal.
        if len(units) == len(names) and _unit_names(folder) == names:
            return units


def _unit_names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if UNIT_NAME.fullmatch(name))
    except FileNotFoundError:
        return []


def _manifest_if_there(folder: Path) -> Unit | None:
    try:
        unit = read_manifest(folder)
        if (unit.lane, unit.name) != (folder.parent.name, folder.name):
            raise CorruptionError(f"{folder}: its manifest is that of unit {unit.lane}/{unit.name}")
        return unit
    except CorruptionError:
        if folder.exists():
            raise
        return None


def current_units(store: Path, lane: str) -> list[Unit]:
    """The current units in ascending order, without overlap: of overlapping units the widest, then
    the newest."""
    return choose(all_units(store, lane))


def while_replaced(store: Path, lane: str, read: Callable[[list[Unit]], _T]) -> _T:
    """Call `read` with the lane's current units, and again if it fails and the units have changed
    meanwhile.

    For readers of a unit's files without a lease: the sealer may remove a unit that another one replaced. Of
    another host's lane that is heard of a little later than it is done.

    Raises:
        CorruptionError: `read` raised it, and the units are the same as before.
    """
    until = time.monotonic() + HEARD_S
    while True:
        units = current_units(store, lane)
        try:
            return read(units)
        except CorruptionError:
            if not _replaced_by(until, store, lane, units):
                raise


def _replaced_by(until: float, store: Path, lane: str, units: list[Unit]) -> bool:
    """Whether a lane has other units than these; of another host's lane that is waited for, until a time."""
    while current_units(store, lane) == units:
        if not is_replica(store, lane) or time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def choose(units: Iterable[Unit]) -> list[Unit]:
    """Choose the current units among units that may cover the same segments. Pure."""
    chosen: list[Unit] = []
    for unit in sorted(units, key=lambda u: (u.first, -u.last, -u.generation)):
        if not chosen or unit.first > chosen[-1].last:
            chosen.append(unit)
    return chosen


def with_remote(unit: Unit, uri: str) -> Unit:
    """The same unit, its files at `uri`."""
    return replace(unit, remote=uri)


def unsealed_start(store: Path, lane: str) -> Start:
    """Where the segments after the last sealed unit begin.

    Raises:
        CorruptionError: units do not follow each other without a gap.
    """
    number, next_seq, chain, size = 1, 0, EMPTY_CHAIN.hex(), 0
    for unit in current_units(store, lane):
        if (unit.first, unit.first_seq, unit.chain_before) != (number, next_seq, chain):
            raise CorruptionError(
                f"lane {lane!r}: sealed unit {unit.name} begins at segment {unit.first}, event "
                f"{unit.first_seq}, but the one before ends at segment {number}, event {next_seq}: restore "
                f"the missing folder in {store / 'sealed' / lane}"
            )
        number, next_seq, chain = unit.last + 1, unit.next_seq, unit.chain
        size = unit.segments[-1].bytes
    return Start(number, next_seq, bytes.fromhex(chain), size)
