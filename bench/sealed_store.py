"""A store of many sealed turns, made without passing through the log, for the queries of `bench sql`.

Ten turns make a trajectory, two in each of five units in a row, so that every unit holds rows of
five generations of trajectories and every trajectory lies in five units. Units are written by
the same code that seals segments; only the segments themselves never existed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from rollbook import store
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.events.batches import encode
from rollbook.store.ids import new_id
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.sealed.seal import write_unit
from rollbook.store.sealed.unit import SealedSegment, Unit
from rollbook.store.settings import SealSettings
from rollbook.store.wal.files import Watermark, lane_folder

LANE = "bench"
TURNS, SPREAD, EACH = 10, 5, 2
"""Turns of a trajectory, units it is spread over, and its turns in each."""
PROMPT_IDS, COMPLETION_IDS, TEXT = 1_100, 525, 4_600
UNIT_US = 3_600_000_000
"""A unit holds an hour."""
START_US = 1_750_000_000_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """How many units, and how many trajectories begin in each."""

    units: int
    begin: int = 500

    @property
    def turns(self) -> int:
        """Completed turns in all, but for trajectories that end beyond the last unit."""
        return self.units * self.begin * TURNS


class _Agents:
    """Makes the events of one unit after another."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        # Text, ids and logprobs are windows into one long stretch each, never the same twice.
        letters = self._rng.integers(97, 123, 1 << 23, dtype=np.uint8)
        letters[self._rng.integers(0, len(letters), len(letters) // 6)] = 32
        self._text = letters.tobytes().decode()
        self._ids = np.minimum(self._rng.zipf(1.2, 1 << 23), 151_935).astype(np.int32)
        self._logprobs = -self._rng.exponential(0.5, 1 << 23).astype(np.float32)
        self._running: list[tuple[int, list[tuple[str, int]]]] = []

    def _window(self, sequence: Any, size: int) -> Any:
        at = int(self._rng.integers(0, len(sequence) - size))
        return sequence[at : at + size]

    def unit(self, number: int) -> Iterator[Event]:
        """Events of the unit, in order."""
        began = [(new_id(), i) for i in range(self._shape.begin)]
        self._running = [(n, ids) for n, ids in self._running if n > number - SPREAD] + [(number, began)]
        time = START_US + number * UNIT_US
        step = UNIT_US // (self._shape.begin * TURNS * 4)
        for record in self._records(number, began):
            time += step
            yield Event(record, "bench", time_us=time)

    def _records(self, number: int, began: list[tuple[str, int]]) -> Iterator[Any]:
        for trajectory_id, i in began:
            yield kinds.TrajectoryOpened(trajectory_id, f"task-{number}-{i}", f"task-{number}", "a task")
        for turn in range(EACH):
            for n, ids in self._running:
                for trajectory_id, _ in ids:
                    yield from self._turn(trajectory_id, number, (number - n) * EACH + turn)
        for n, ids in self._running:
            if n == number - SPREAD + 1:
                for trajectory_id, i in ids:
                    yield kinds.RewardAssigned(trajectory_id, None, float((i * 7 + n) % 11) / 10)
                    yield kinds.TrajectoryFinished(trajectory_id, "completed", i % 3 == 0)

    def _turn(self, trajectory_id: str, version: int, turn: int) -> Iterator[Any]:
        turn_id = new_id()
        text = self._window(self._text, TEXT)
        messages = [{"role": "user", "content": text[:400]}]
        sampling: Any = ({"temperature": 1.0}, "m", {"temperature": 1.0}, {}, "key")
        yield kinds.TurnRequested(
            trajectory_id, turn_id, turn_id, None, "first", None, 0, messages, *sampling
        )
        ids = self._window(self._ids, PROMPT_IDS + COMPLETION_IDS)
        yield kinds.TurnCompleted(
            *(trajectory_id, turn_id, "actor", version, ids[:PROMPT_IDS], ids[PROMPT_IDS:]),
            self._window(self._logprobs, COMPLETION_IDS),
            (kinds.VersionSpan("actor", version, 0, COMPLETION_IDS),),
            *(PROMPT_IDS * (turn + 1), "0" * 64, "stop", {"role": "assistant", "content": text[400:]}),
            *({"temperature": 1.0}, [], {"engine_us": 1_000_000}),
        )
        yield kinds.TurnDelivered(trajectory_id, turn_id, "sent")


def make(folder: Path, shape: Shape, on_unit: Callable[[], None], seed: int = 0) -> tuple[Store, int]:
    """A store at `folder` with sealed units only; with it, the bytes their rows had as Arrow.

    Raises:
        OSError: the disk refuses, for instance because it is full.
    """
    log = store.open(folder, create=True)
    lane_folder(log.path, LANE).mkdir(parents=True)
    agents = _Agents(shape, seed)
    settings, next_seq, raw, chain = SealSettings(), 0, 0, bytes(16).hex()
    for number in range(1, shape.units + 1):
        batch = encode(list(agents.unit(number)), next_seq)
        lanes = pa.repeat(pa.scalar(LANE), batch.num_rows)
        table = pa.Table.from_arrays([lanes, *batch.columns], schema=TABLE_SCHEMA)
        end = xxhash.xxh3_128_hexdigest(orjson.dumps([chain, number]))
        segment = SealedSegment(number, next_seq, batch.num_rows, batch.nbytes, end)
        unit = write_unit(log.path, Unit(LANE, 1, chain, (segment,), (), START_US), table, settings)
        build_derived(log.path, unit)
        next_seq, chain, raw = next_seq + batch.num_rows, end, raw + batch.nbytes
        (lane_folder(log.path, LANE) / "WATERMARK").write_bytes(Watermark(number, 0, next_seq).pack())
        on_unit()
    return log, raw
