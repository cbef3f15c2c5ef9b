"""`cluster.register_*`: sealed units into Iceberg tables, by the command that users have and by the sealer's
call.

One unit is really sealed. The others are links to its files under segments of their own, so that a thousand
of them have a thousand footers to read and take seconds to make.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from rollbook import store
from rollbook.bench.figure import Figure, Outcome, spread
from rollbook.bench.processes import BenchError
from rollbook.bench.rounds import Limit
from rollbook.bench.scale_commands import run
from rollbook.bench.turns import RUN, make_turn
from rollbook.store import Event, Store
from rollbook.store.events import TurnDelivered
from rollbook.store.sealed.derived import SCALARS
from rollbook.store.sealed.unit import Unit, current_units, derived_folder, unit_folder, write_manifest
from rollbook.store.tables.publish import publish_tables
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.wal.files import Watermark, lane_folder, write_watermark

LANE = "serve"
REGISTER_S, NOTHING_S = 10.0, 0.1
"""Goals."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    limit: Limit = field(default_factory=lambda: Limit(3, 120.0))
    units: int = 1_000
    turns: int = 40
    repeats: int = 10
    """Calls with nothing new, and with one unit more, a round."""

    @property
    def steps(self) -> int:
        """How often `on_round` will be called, unless time runs out."""
        return self.limit.rounds


@dataclass(slots=True)
class Measured:
    """Seconds of the command that registers all units, and of calls with nothing new and with a unit more."""

    units: int
    files: int = 0
    register_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    nothing_s: list[float] = field(default_factory=list)
    one_s: list[float] = field(default_factory=list)


def measure(folder: Path, plan: Plan, on_round: Callable[[], None]) -> Measured:
    """Register the units of a new store in each round.

    Raises:
        BenchError: a table does not have them all.
    """
    template = _template(folder / "template", plan.turns)
    measured = Measured(plan.units)
    deadline = time.monotonic() + plan.limit.seconds
    for number in range(plan.limit.rounds):
        log = linked(template, folder / f"store-{number}")
        link_units(template, log, range(1, plan.units + 1))
        use, out = run(["store", "publish", "--store", log.path, "--json"], folder)
        tables = orjson.loads(out)["tables"]
        if [table["added"] for table in tables] != [plan.units] * len(tables):
            raise BenchError(f"{plan.units} units were to be added: {tables}")
        measured.files = sum(table["files"] for table in tables)
        measured.register_s.append(use.wall_s)
        measured.cpu_s.append(use.cpu_s)
        publish_tables(log)  # a sealer's first call imports, and parses each manifest
        for i in range(plan.repeats):
            measured.nothing_s.append(_timed(log, 0))
            link_units(template, log, [plan.units + 1 + i])
            measured.one_s.append(_timed(log, 1))
        on_round()
        if time.monotonic() >= deadline:
            break
    return measured


def _timed(log: Store, added: int) -> float:
    begun = time.perf_counter()
    report = publish_tables(log)
    seconds = time.perf_counter() - begun
    if {table.added for table in report.tables} != {added}:
        raise BenchError(f"{added} files were to be added to each table: {report}")
    return seconds


def _template(path: Path, turns: int) -> Store:
    """A store of one unit."""
    rng = np.random.default_rng(0)
    log = store.open(path, create=True)
    records = [make_turn(rng) for _ in range(turns)]
    with log.writer(LANE) as writer:
        for turn in records:
            delivered = TurnDelivered(turn.trajectory_id, turn.turn_id, "sent")
            writer.append([Event(turn, RUN), Event(delivered, RUN)]).result()
    Sealer(log).run_once()
    return log


def linked(template: Store, path: Path) -> Store:
    """A new store with the template's lane, of which there is no unit yet."""
    log = store.open(path, create=True)
    for lane in template.lanes():
        lane_folder(log.path, lane).mkdir()
        write_watermark(lane_folder(log.path, lane), Watermark(1, 0, 0))
    return log


def link_units(template: Store, log: Store, numbers: range | list[int]) -> None:
    """Give the store a unit of each of these segments, by links to the files of the template's unit."""
    [lane] = template.lanes()
    [old] = current_units(template.path, lane)
    for number in numbers:
        link_unit(template, old, log, replace(old, segments=(replace(old.segments[0], number=number),)))


def link_unit(source: Store, old: Unit, log: Store, new: Unit) -> None:
    """Give the store a unit whose files are links to those of another one."""
    places = [(unit_folder, file.name) for file in old.files]
    for folder_of, name in [*places, (derived_folder, SCALARS)]:
        folder_of(log.path, new).mkdir(parents=True, exist_ok=True)
        os.link(folder_of(source.path, old) / name, folder_of(log.path, new) / name)
    write_manifest(unit_folder(log.path, new), new)


def outcome(measured: Measured) -> Outcome:
    """The figures and spreads of a measurement."""
    count, runs = measured.units, len(measured.register_s)
    figures = (
        Figure(
            *("cluster.register_s", median(measured.register_s), "s"),
            f"goal: {count} units, {measured.files} files, by `rollbook store publish` in {REGISTER_S:g} s",
            *(None, runs),
        ),
        Figure(
            *("cluster.register_nothing_s", median(measured.nothing_s), "s"),
            f"goal: the call in a process, {count} units and nothing new: {NOTHING_S:g} s",
            *(None, len(measured.nothing_s)),
        ),
    )
    spreads = (
        spread(f"{count} units registered", "s", measured.register_s),
        spread(f"{count} units registered", "CPU s", measured.cpu_s),
        spread("nothing new", "ms", [1000 * s for s in measured.nothing_s]),
        spread("one unit more, three commits", "ms", [1000 * s for s in measured.one_s]),
    )
    return Outcome(figures, spreads)
