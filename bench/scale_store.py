"""The store of `bench scale`: sealed except for its newest turns, with a run of many steps, and kept.

Units are written by the same code that seals segments, at about the size at which the sealer
stops merging; only the segments themselves never existed. The newest trajectories are appended
through the log, and so are the trainer's records, which are sealed except for the steps that are
really trained. `scale.json` beside the store describes it; it is written last, so an incomplete
store is made anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import orjson
import pyarrow as pa
import xxhash

from rollbook import store
from rollbook.bench.scale_steps import (
    SFT,
    TRAIN_LANE,
    TRAINED,
    Image,
    Sampled,
    make_image,
    take_steps,
    write_model,
    write_steps,
)
from rollbook.bench.scale_turns import GROUP, LANE, TURNS, WAVE, Agents, events_of, trajectory_name
from rollbook.store import Store
from rollbook.store.events import RewardAssigned, TrajectoryFinished
from rollbook.store.ids import now_us
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed, write_unit
from rollbook.store.sealed.unit import SealedSegment, Unit, current_units
from rollbook.store.settings import SealSettings
from rollbook.store.wal.files import Watermark, lane_folder

TURNS_OF_A_STEP = 1_000
LIVE_SHARE, FEWEST_LIVE = 100, 6 * GROUP
"""One in so many trajectories is not sealed, and at least so many are not."""
UNIT_WAVES = 4
"""About 450 MB of log: two units are more than the sealer merges."""
SEGMENT_BYTES = 64 << 20
APPEND = 2_000
MADE = "scale.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """How much a store holds."""

    turns: int

    @property
    def trajectories(self) -> int:
        """Whole groups of them."""
        return max(self.turns // TURNS // GROUP, 16) * GROUP

    @property
    def live(self) -> int:
        """Trajectories that are not sealed, the newest ones."""
        return max(self.trajectories // LIVE_SHARE // GROUP * GROUP, FEWEST_LIVE)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run, those that are really trained included."""
        return max(self.turns // TURNS_OF_A_STEP, TRAINED + 1)

    @property
    def groups_a_step(self) -> int:
        """Groups that a written step used; some are left for the trained ones, and waiting."""
        sealed = (self.trajectories - self.live) // GROUP
        return (sealed - TRAINED - 1) // (self.steps - TRAINED)


@dataclass(frozen=True, slots=True)
class Made:
    """A store that exists.

    Attributes:
        turns, events: completed turns, and events of the agents' lane.
        steps: committed; the last one can be replayed.
        shown: name of a trajectory in the middle.
        bytes: of all its files.
        seconds: that making it took.
    """

    path: Path
    turns: int
    events: int
    steps: int
    shown: str
    bytes: int
    seconds: float

    @property
    def last_step(self) -> int:
        """Number of the newest step."""
        return self.steps - 1


def model_in(folder: Path) -> Path:
    """The model that all stores in this folder are trained with, made where it is missing."""
    model = folder / "model"
    if not (model / "model.safetensors").exists():
        shutil.rmtree(model, ignore_errors=True)
        write_model(model)
    return model


def store_in(folder: Path, turns: int, on_unit: Callable[[], None] = lambda: None) -> Made:
    """The store of so many turns in this folder, made where it is missing.

    Raises:
        OSError: the disk refuses, for instance because it is full.
    """
    place = folder / f"turns-{turns}"
    with contextlib.suppress(FileNotFoundError):
        return Made(place / "store", **orjson.loads((place / MADE).read_bytes()))
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    begun = time.monotonic()
    counts = _make(place / "store", Shape(turns), model_in(folder), on_unit)
    files = (place / "store").rglob("*")
    size = sum(file.stat().st_size for file in files if file.is_file())
    result = Made(place / "store", *counts, size, round(time.monotonic() - begun, 1))
    values = asdict(result)
    del values["path"]
    (place / MADE).write_bytes(orjson.dumps(values))
    return result


@contextlib.contextmanager
def borrowed(original: Path, scratch: Path) -> Iterator[Path]:
    """Context: a writable copy of a store, in which immutable files are links, so that it takes no
    space."""
    copy = scratch / "borrowed"

    def put(source: str, target: str) -> str:
        same = Path(source).relative_to(original).parts[0] in ("sealed", "derived", "checkpoints")
        return str((os.link if same else shutil.copy2)(source, target) or target)

    shutil.copytree(original, copy, copy_function=put)
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def make_turns(folder: Path, sealed: int, live: int, on_unit: Callable[[], None] = lambda: None) -> Store:
    """A store of so many trajectories, and no steps."""
    log = store.open(folder, create=True)
    agents = Agents(lambda number: 0)
    _seal(log, agents, sealed, on_unit)
    _append(log, agents, live)
    return log


def _make(folder: Path, shape: Shape, model: Path, on_unit: Callable[[], None]) -> tuple[int, int, int, str]:
    """Make it; its completed turns, events of the agents' lane, steps, and a trajectory in the middle."""
    each, written = shape.groups_a_step, shape.steps - TRAINED
    log = store.open(folder, create=True)
    agents = Agents(lambda number: min(max(number // GROUP // each - 1, 0), written))
    sealed = _seal(log, agents, shape.trajectories - shape.live, on_unit)
    live = _append(log, agents, shape.live, open_ones=GROUP)
    image = make_image(folder.with_name("image"), model)
    _train(log, model, image, shape, sealed, live)
    shutil.rmtree(folder.with_name("image"))
    events = log.head()[LANE]
    return shape.trajectories * TURNS, events, shape.steps, trajectory_name(shape.trajectories // 2)


def _seal(log: Store, agents: Agents, count: int, on_unit: Callable[[], None]) -> Sampled:
    """Write so many trajectories as sealed units."""
    sampled = Sampled([], [], [])
    for first in range(0, count, WAVE * UNIT_WAVES):
        some = range(first, min(first + WAVE * UNIT_WAVES, count), WAVE)
        waves = [agents.wave(min(WAVE, count - begun)) for begun in some]
        for wave in waves:
            sampled.trajectory_ids.extend(wave.trajectory_ids)
            sampled.leaf_ids.extend(wave.leaf_ids)
            sampled.ends.extend([wave.table["seq"][-1].as_py() + 1] * len(wave.leaf_ids))
        table = pa.concat_tables(wave.table for wave in waves)
        del waves
        _write_unit(log, table)
        on_unit()
    return sampled


def _write_unit(log: Store, table: pa.Table) -> None:
    """Seal these events, as so many segments as their bytes would have filled."""
    units = current_units(log.path, LANE)
    chain, number = (units[-1].chain, units[-1].last + 1) if units else (bytes(16).hex(), 1)
    first, count = table["seq"][0].as_py(), -(-table.nbytes // SEGMENT_BYTES)
    bounds = [first + table.num_rows * i // count for i in range(count + 1)]
    segments = tuple(
        SealedSegment(
            number=number + i,
            first_seq=begin,
            events=end - begin,
            bytes=table.nbytes // count,
            chain=xxhash.xxh3_128_hexdigest(orjson.dumps([chain, number + i])),
        )
        for i, (begin, end) in enumerate(pairwise(bounds))
    )
    unit = write_unit(log.path, Unit(LANE, 1, chain, segments, (), now_us()), table, SealSettings())
    build_derived(log.path, unit)
    folder = lane_folder(log.path, LANE)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "WATERMARK").write_bytes(Watermark(unit.last, 0, unit.next_seq).pack())


def _append(log: Store, agents: Agents, count: int, open_ones: int = 0) -> Sampled:
    """Append so many trajectories through the log; the last few do not finish."""
    sampled = Sampled([], [], [])
    with log.writer(LANE) as writer:
        for first in range(0, count, WAVE):
            wave = agents.wave(min(WAVE, count - first))
            sampled.trajectory_ids.extend(wave.trajectory_ids)
            sampled.leaf_ids.extend(wave.leaf_ids)
            unfinished = set(sampled.trajectory_ids[count - open_ones :]) if open_ones else set()
            ends = (RewardAssigned, TrajectoryFinished)
            events = [
                event
                for event in events_of(wave.table)
                if not (isinstance(event.record, ends) and event.record.trajectory_id in unfinished)
            ]
            for begun in range(0, len(events), APPEND):
                writer.append(events[begun : begun + APPEND]).result()
    return sampled


def _train(log: Store, model: Path, image: Image, shape: Shape, sealed: Sampled, live: Sampled) -> None:
    """Write the steps of the run and seal them; then have the trainer take the last ones."""
    with log.writer(TRAIN_LANE) as writer:
        written = shape.steps - TRAINED
        used = write_steps(writer, log, image, sealed, written, shape.groups_a_step)
    for unit in seal_closed(log.path, TRAIN_LANE, SealSettings(), all_of_it=True):
        build_derived(log.path, unit)
    remove_sealed_wal(log.path, TRAIN_LANE, current_units(log.path, TRAIN_LANE), 0)
    firsts = [(sealed.members(used + i)[0], live.members(i)[0]) for i in range(TRAINED)]
    chosen = [[sealed.trajectory_ids[old], live.trajectory_ids[new]] for old, new in firsts]
    take_steps(log, model, SFT, chosen)
