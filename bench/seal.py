"""`seal.*`: sealing closed segments into Parquet: size compared with the WAL, speed with pyarrow's
own defaults.

The lane holds trajectories made of real text and its token ids (`bench.corpus`). In each round
its segments are sealed anew (verified, sorted, written, synced, read back and compared), and the
same rows are passed to a plain `pyarrow.parquet.write_table`, with the same compression, and
synced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from rollbook import store
from rollbook.bench.corpus import Corpus
from rollbook.bench.encodings import compare
from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.rounds import Laps, Limit, Work, interleave, times_faster, walls
from rollbook.bench.sinks import ACK_TIMEOUT_S
from rollbook.store import Store
from rollbook.store.sealed.parquet import read_file
from rollbook.store.sealed.seal import closed_segments, seal_segments
from rollbook.store.sealed.unit import TURNS, Unit, lane_units_folder
from rollbook.store.wal.files import lane_folder, segment_path

LANE = "serve"
SEAL, PYARROW = "seal", "pyarrow"
ONE_SEGMENT = 4 << 30
"""More bytes than are written: the lane has one segment, which is closed when its writer is opened again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    limit: Limit = field(default_factory=lambda: Limit(8, 20.0))
    turns: int = 1500
    characters: int = 10 << 20
    vocabulary: int = 32_000

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.limit.rounds


@dataclass(frozen=True, slots=True)
class Measured:
    """The laps, the sizes in bytes, and bytes per value by encoding."""

    laps: Laps
    events: int
    turns: int
    wal_bytes: int
    sealed_bytes: int
    pyarrow_bytes: int
    encodings: dict[str, float]


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Write a lane into `folder`, and seal it again and again.

    Raises:
        CorruptionError: what was sealed does not read back the same.
    """
    log = store.open(folder / "store", create=True)
    events, turns = _write(log, plan)
    numbers = closed_segments(log.path, LANE)
    settings = log.settings().seal
    table = log.table({LANE: events})
    units: list[Unit] = []

    def ready_to_seal(_: int) -> Work:
        shutil.rmtree(lane_units_folder(log.path, LANE), ignore_errors=True)
        return lambda: units.append(seal_segments(log.path, LANE, numbers, settings))

    def ready_to_write(number: int) -> Work:
        path = folder / f"{number}.parquet"
        return lambda: _write_synced(path, table, settings.compression_level)

    sides = {SEAL: ready_to_seal, PYARROW: ready_to_write}
    laps = interleave(sides, plan.limit, on_round)
    rows = read_file(log.path, units[-1], TURNS).select(["kind", "prompt_ids", "completion_ids", "logprobs"])
    wal = sum(segment_path(lane_folder(log.path, LANE), n).stat().st_size for n in numbers)
    return Measured(
        *(laps, events, turns, wal, units[-1].bytes, (folder / "0.parquet").stat().st_size),
        compare(rows, settings.row_group),
    )


def _write(log: Store, plan: Plan) -> tuple[int, int]:
    """Fill the lane and close its segment; how many events and turns it holds."""
    corpus = Corpus.of(plan.characters, plan.vocabulary)
    whole = log.settings().append.model_copy(update={"segment_bytes": ONE_SEGMENT, "segment_age_s": 3600.0})
    turns = 0
    with log.writer(LANE, whole) as writer:
        for events in corpus.trajectories(plan.turns):
            writer.append(events).result(ACK_TIMEOUT_S)
            turns += sum(event.kind == "turn.completed" for event in events)
    with log.writer(LANE, whole):
        return log.head()[LANE], turns


def _write_synced(path: Path, table: object, level: int) -> None:
    pq.write_table(table, path, compression="zstd", compression_level=level)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    ours, theirs = (walls(measured.laps[side]) for side in (SEAL, PYARROW))
    runs, wal = len(ours), measured.wal_bytes
    defaults = "pyarrow's defaults, same zstd level"
    against = f"WAL: {wal} bytes; {defaults}: {measured.pyarrow_bytes} bytes"
    figures = [
        Figure("seal.size", measured.sealed_bytes, "bytes", against, measured.sealed_bytes / wal, runs),
        Figure(
            *("seal.events_per_s", median(measured.events / s for s in ours), "events/s"),
            f"{defaults}, synced, not verified: {median(measured.events / s for s in theirs):.0f} events/s",
            *(times_faster(ours, theirs), runs),
        ),
        *(
            Figure(f"seal.{name}", value, "B/value", "4 bytes in the WAL", None, 1)
            for name, value in measured.encodings.items()
        ),
    ]
    spreads = [
        spread("events sealed", "events/s", [measured.events / s for s in ours]),
        spread("turns sealed", "turns/s", [measured.turns / s for s in ours]),
        spread("WAL sealed", "MB/s", [wal / s / 1e6 for s in ours]),
        spread("WAL sealed", "MB/CPU s", [wal / lap.cpu_s / 1e6 for lap in measured.laps[SEAL]]),
        spread(defaults, "MB/s", [wal / s / 1e6 for s in theirs]),
    ]
    return Outcome(tuple(figures), tuple(spreads))
